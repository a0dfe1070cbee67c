"""The gate on every weight transfer: trainer and engine must give the same log-probs of fixed probes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from megatron_rl.errors import LostEngineError, ReshardError
from megatron_rl.parallel.collectives import broadcast_object, broadcast_outcome
from megatron_rl.reshard.diagnosis import Diagnosis
from megatron_rl.reshard.verify import ParityReport, Probe, Values, compare, parity_bound
from megatron_rl.rollout.engine import GenerateRequest, RolloutEngine
from megatron_rl.train.diagnose import Case, diagnose
from megatron_rl.train.policy import Policy
from megatron_rl.train.trials import Trials, sequence_logprobs

SAMPLED_TOKENS = 16  # that each replica adds to the longest prompt
_SEED = 1
_REMEMBERED = 8  # earlier versions whose log-probs are kept
_DIAGNOSIS_S = 300.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """One comparison; `diagnosis` says why trainer and engine differ by more than `bound`, None if they do not."""

    version: int
    report: ParityReport
    bound: float
    seconds: float
    diagnosis: Diagnosis | None

    def __str__(self) -> str:
        report = self.report
        return (
            f"parity: after the transfer of weight version {self.version} trainer and engine differ by "
            f"{report.max:.3g} nats at {report.worst} (mean {report.mean:.3g}, p99 {report.p99:.3g} over "
            f"{report.num_values} log-probs, bound {self.bound:g}): {self.diagnosis}"
        )

    def check(self) -> None:
        """Raises ReshardError, with the diagnosis, when trainer and engine do not agree."""
        if self.diagnosis is not None:
            raise ReshardError(str(self))

    def metrics(self) -> dict[str, float]:
        report = self.report
        return {
            "sync/parity_mean": report.mean,
            "sync/parity_p99": report.p99,
            "sync/parity_max": report.max,
            "sync/parity_s": self.seconds,
        }

    def to_json(self) -> dict[str, Any]:
        found = self.diagnosis
        return {
            "weight_version": self.version,
            "bound": self.bound,
            **self.report.to_json(),
            "parity_seconds": self.seconds,
            **({"fault": found.fault.value, "evidence": found.evidence} if found else {}),
        }


class ParityGate:
    """Fixed prompts that every replica scores, and a few tokens that each samples, after every transfer.

    Scoring goes past the engine's prefix cache and its sampler, sampling goes through both. The sampler is asked
    for the run's `temperature` and for no truncation: log-probs over the kept tokens alone would not compare.
    `engine` on the driving rank alone; `prompts` are the same on all ranks, the longest first.
    """

    def __init__(
        self,
        policy: Policy,
        engine: RolloutEngine | None,
        prompts: Sequence[Sequence[int]],
        *,
        bound: float | None,
        temperature: float,
        push: Callable[[int], object],
        group: dist.ProcessGroup | None,
        sampled_tokens: int = SAMPLED_TOKENS,
        diagnosis_s: float = _DIAGNOSIS_S,
    ) -> None:
        self._policy, self._engine, self._prompts = policy, engine, [tuple(ids) for ids in prompts]
        self._rounding = parity_bound(str(policy.dtype).removeprefix("torch."))
        self._bound = self._rounding if bound is None else bound
        self._temperature, self._push, self._group = temperature, push, group
        self._sampled_tokens, self._diagnosis_s = sampled_tokens, diagnosis_s
        self._history: deque[tuple[int, Sequence[Values]]] = deque(maxlen=_REMEMBERED)
        self._at_start = _scores_at_start(engine, self._prompts) if engine is not None else []

    def check(self, version: int) -> Verdict:
        """Compare both sides; with a gap over the bound, find out why. Collective, the same on every rank.

        Raises LostEngineError on every rank when an engine is lost meanwhile.
        """
        began = time.monotonic()
        probes, engine = broadcast_outcome(
            self._ask if self._engine is not None else None,
            src=0,
            group=self._group,
            shared=LostEngineError,
        )
        trainer = self._trainer(probes)
        diagnosis, report = None, None
        if self._engine is not None:
            report = compare(probes, trainer, engine)
        report = broadcast_object(report, src=0, group=self._group)
        assert report is not None
        if not report.max <= self._bound:
            diagnosis = self._diagnose(version, report, probes, trainer, engine)
        self._history.append((version, trainer[0][: len(self._prompts)]))
        return Verdict(
            version=version,
            report=report,
            bound=self._bound,
            seconds=time.monotonic() - began,
            diagnosis=diagnosis,
        )

    def _ask(self) -> tuple[list[list[Probe]], list[list[Values]]]:
        """Probes and the engine's log-probs of them, by replica."""
        assert self._engine is not None
        probes: list[list[Probe]] = []
        values: list[list[Values]] = []
        scores = self._engine.score_all(self._prompts)
        samples = _sample(
            self._engine, self._prompts[0], len(scores), self._temperature, self._sampled_tokens
        )
        for scored, (tokens, logprobs) in zip(scores, samples, strict=True):
            prompts = [Probe(token_ids=ids) for ids in self._prompts]
            sampled = Probe(token_ids=(*self._prompts[0], *tokens), start=len(self._prompts[0]))
            probes.append([*prompts, sampled])
            values.append([*scored, logprobs])
        return probes, values

    def _trainer(self, probes: Sequence[Sequence[Probe]]) -> list[list[Values]]:
        """This side's log-probs of the same, by replica; prompts are the same for all and computed once."""
        scored: list[Values] = list(sequence_logprobs(self._policy, self._prompts))
        sampled = [probe for of_replica in probes for probe in of_replica if probe.is_sampled]
        logprobs = sequence_logprobs(
            self._policy, [probe.token_ids for probe in sampled], temperature=self._temperature
        )
        return [[*scored, values[probe.start - 1 :]] for probe, values in zip(sampled, logprobs, strict=True)]

    def _diagnose(
        self,
        version: int,
        report: ParityReport,
        probes: Sequence[Sequence[Probe]],
        trainer: Sequence[Sequence[Values]],
        engine: Sequence[Sequence[Values]],
    ) -> Diagnosis:
        trials = Trials(self._policy, lambda: self._push(version), group=self._group)
        if self._engine is None:
            trials.serve()
            return broadcast_outcome(None, src=0, group=self._group, shared=LostEngineError)
        worst = report.worst.replica
        case = Case(
            report=report,
            probes=probes[worst],
            trainer=trainer[worst],
            engine=engine[worst],
            history=dict(self._history),
            at_start=self._at_start[worst] if self._at_start else None,
            spec=self._policy.spec,
            bound=self._bound,
            rounding=self._rounding,
            temperature=self._temperature,
        )
        replica = _Replica(self._engine, worst, self._temperature, self._sampled_tokens)

        def find() -> Diagnosis:
            try:
                return diagnose(case, trials, replica, budget_s=self._diagnosis_s)
            finally:
                trials.close()

        return broadcast_outcome(find, src=0, group=self._group, shared=LostEngineError)


@dataclass(frozen=True, slots=True)
class _Replica:
    """`AskEngine` of one replica."""

    engine: RolloutEngine
    replica: int
    temperature: float
    sampled_tokens: int

    def score(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        return self.engine.score_all(prompts)[self.replica]

    def sample(self, prompt: Sequence[int]) -> tuple[Sequence[int], Values]:
        count = self.replica + 1
        return _sample(self.engine, prompt, count, self.temperature, self.sampled_tokens)[self.replica]


def _scores_at_start(engine: RolloutEngine, prompts: Sequence[Sequence[int]]) -> list[list[list[float]]]:
    """By replica; none where an engine was started without weights, or one is lost: the first transfer sees to it."""
    with suppress(LostEngineError):
        if all(status["stale"] is None for status in engine.status()):
            return engine.score_all(prompts)
    return []


def _sample(
    engine: RolloutEngine, prompt: Sequence[int], count: int, temperature: float, max_tokens: int
) -> list[tuple[Sequence[int], Values]]:
    """What the first `count` replicas each add to `prompt`: one request per replica, the same one."""
    request = GenerateRequest(
        prompt_token_ids=prompt, seed=_SEED, max_tokens=max_tokens, temperature=temperature
    )
    return [(done.token_ids, done.logprobs) for done in engine.generate([request] * count, evenly=True)]

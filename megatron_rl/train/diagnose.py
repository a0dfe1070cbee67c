"""Why trainer and engine differ: explanations are tried one by one until one reproduces what the engine says.

Runs on the driver; `Trials` is its hand on the trainer ranks, the engine answers for itself. First come the
explanations that only numbers are needed for, then those that need other forward passes of the trainer, and last
those that send changed weights: the engine's own are gone then, which the run, about to stop, no longer needs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from megatron_rl.errors import LostEngineError, LostPeerError, MegatronRLError
from megatron_rl.model.spec import ModelSpec
from megatron_rl.model.what_if import EqualHead, OnlyLayers, OtherRope
from megatron_rl.reshard.diagnosis import (
    Diagnosis,
    Fault,
    fit_temperature,
    fit_truncation,
    matching_version,
)
from megatron_rl.reshard.verify import ParityReport, Probe, Values, max_gap
from megatron_rl.train.trials import RowsTrial, Trial, Trials

_MAX_ROWS = 16  # positions of which whole rows of the vocabulary are fetched
_THETAS = sorted(digits * 10.0**power for power in range(3, 8) for digits in (1, 1.5, 2, 5, 8))


class AskEngine(Protocol):
    """The replica that differs, as the diagnosis uses it."""

    def score(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs of each prompt's tokens from the second on."""
        ...

    def sample(self, prompt: Sequence[int]) -> tuple[Sequence[int], Values]:
        """Tokens that the engine adds to `prompt`, and the log-probs that it reports of them."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """What was seen, of the replica that differs most; values by probe."""

    report: ParityReport
    probes: Sequence[Probe]
    trainer: Sequence[Values]
    engine: Sequence[Values]
    history: Mapping[int, Sequence[Values]]  # the trainer's of scored probes, by earlier version
    at_start: Sequence[Values] | None  # the engine's of scored probes, before the first transfer
    spec: ModelSpec
    bound: float  # that the run was given
    rounding: float  # that the data type explains
    temperature: float  # of sampling

    @property
    def tolerance(self) -> float:
        return max(self.bound, self.rounding)

    def gap(self, *, sampled: bool) -> float:
        """Largest gap over the sampled or the scored probes; 0 without any."""
        return max((max_gap(*pair) for pair in self._pairs(sampled)), default=0.0)

    def scored(self) -> list[int]:
        return [i for i, probe in enumerate(self.probes) if not probe.is_sampled]

    def _pairs(self, sampled: bool) -> list[tuple[Values, Values]]:
        every = zip(self.probes, self.trainer, self.engine, strict=True)
        return [(mine, theirs) for probe, mine, theirs in every if probe.is_sampled == sampled]


class _OutOfTimeError(MegatronRLError):
    """The time for the diagnosis is over."""


def diagnose(case: Case, trials: Trials, engine: AskEngine, *, budget_s: float) -> Diagnosis:
    """The first explanation that holds. Never raises for what it finds, also not when an engine or a transfer fails.

    After `budget_s` no further trial begins; a trial itself is bounded by the time-outs of transfers and requests.
    """
    inquiry = _Inquiry(case, trials, engine, deadline=time.monotonic() + budget_s)
    try:
        for look in inquiry.explanations():
            if (found := look()) is not None:
                return found
    except (LostPeerError, LostEngineError):
        raise
    except MegatronRLError as error:
        inquiry.seen.append(f"the search ended early: {error}")
    return Diagnosis(fault=Fault.UNKNOWN, evidence="; ".join(inquiry.seen) or "no explanation fits")


@dataclass
class _Inquiry:
    case: Case
    trials: Trials
    engine: AskEngine
    deadline: float
    seen: list[str] = field(default_factory=list)  # what was ruled out or noticed on the way

    def explanations(self) -> list[Callable[[], Diagnosis | None]]:
        at_hand = [self._not_finite, self._rounding, self._stale]
        if self.case.gap(sampled=False) <= self.case.tolerance:
            return [*at_hand, self._sampling, self._prefix_cache]
        return [*at_hand, self._temperature, self._rope, self._transfer, self._head, self._layers]

    def _not_finite(self) -> Diagnosis | None:
        for side, values in (("trainer", self.case.trainer), ("engine", self.case.engine)):
            for number, of_probe in enumerate(values):
                bad = next((i for i, value in enumerate(of_probe) if not math.isfinite(value)), None)
                if bad is not None:
                    position = self.case.probes[number].start + bad
                    what = f"the {side}'s log-prob of token {position} of probe {number} is {of_probe[bad]}"
                    return Diagnosis(fault=Fault.NOT_FINITE, evidence=what)
        return None

    def _rounding(self) -> Diagnosis | None:
        if self.case.report.max > self.case.rounding:
            return None
        evidence = (
            f"the gap of {self.case.report.max:.2g} is above the bound of {self.case.bound:g}, but rounding alone "
            f"explains {self.case.rounding:g}"
        )
        return Diagnosis(fault=Fault.ROUNDING, evidence=evidence)

    def _stale(self) -> Diagnosis | None:
        case = self.case
        # a version that is itself as near as the present one explains nothing
        present = [case.trainer[i] for i in case.scored()]
        earlier = {
            version: values
            for version, values in case.history.items()
            if max(map(max_gap, values, present)) > case.tolerance
        }
        found = matching_version(earlier, self._scored_by_engine(), tolerance=case.tolerance)
        if found is None:
            self.seen.append(f"not one of the {len(case.history)} earlier versions that are remembered")
            return None
        version, gap = found
        evidence = f"the engine answers to {gap:.1g} as the trainer did at weight version {version}"
        return Diagnosis(fault=Fault.STALE, evidence=evidence)

    # the engine scores prompts as the trainer does, and only what it sampled differs

    def _sampling(self) -> Diagnosis | None:
        case = self.case
        number = next(i for i, probe in enumerate(case.probes) if probe.is_sampled)
        rows, labels, engine = self._rows(number, temperature=case.temperature)
        heat, kept = fit_temperature(rows, labels, engine), fit_truncation(rows, labels, engine)
        # with coarse rounding both may do: what leaves less unexplained is it
        if kept is None or kept.largest > case.tolerance or heat.rms < kept.rms:
            return self._at_temperature(
                [number],
                case.temperature * heat.factor,
                expected=case.temperature,
                what="sampled tokens",
            )
        return Diagnosis(
            fault=Fault.TRUNCATED,
            evidence=f"prompts agree to {case.gap(sampled=False):.1g}, of sampled tokens {kept}",
        )

    def _prefix_cache(self) -> Diagnosis | None:
        """A prompt that the engine never saw cannot have been cached; nor are prompts that it scores."""
        case = self.case
        used = next(probe for probe in case.probes if probe.is_sampled)
        unseen = used.token_ids[: used.start][::-1]
        tokens, theirs = self.engine.sample(unseen)
        ours = self._logprobs(Trial(sequences=[[*unseen, *tokens]], temperature=case.temperature))[0]
        gap = max_gap(ours[len(unseen) - 1 :], theirs)
        if gap > case.tolerance:
            self.seen.append(
                f"prompts agree, sampled tokens differ, those after a new prompt by {gap:.3g} too"
            )
            return None
        evidence = (
            f"tokens sampled after a new prompt agree to {gap:.1g}, those after a prompt seen before do not"
        )
        return Diagnosis(fault=Fault.PREFIX_CACHE, evidence=evidence)

    # other forward passes of the trainer

    def _temperature(self) -> Diagnosis | None:
        number = self.case.scored()[0]
        found = fit_temperature(*self._rows(number, temperature=1.0))
        return self._at_temperature(self.case.scored(), found.factor, expected=1.0, what="prompts")

    def _at_temperature(
        self, numbers: Sequence[int], temperature: float, *, expected: float, what: str
    ) -> Diagnosis | None:
        trial = Trial(sequences=self._sequences(numbers), temperature=temperature)
        gap = self._gap(numbers, self._logprobs(trial))
        if gap > self.case.tolerance:
            self.seen.append(f"no temperature explains it (nearest {temperature:.3g}, still {gap:.3g} off)")
            return None
        evidence = (
            f"the engine answers for {what} to {gap:.1g} as at temperature {temperature:.4g}, expected was "
            f"{expected:g}"
        )
        return Diagnosis(fault=Fault.TEMPERATURE, evidence=evidence)

    def _rope(self) -> Diagnosis | None:
        """The first token of a sequence sees itself alone, so that no rotation matters to what it predicts."""
        case, numbers = self.case, self.case.scored()
        first = max(abs(case.engine[i][0] - case.trainer[i][0]) for i in numbers)
        if first > case.tolerance:
            self.seen.append(f"position 0 differs by {first:.3g} already, so it is not the rotary embedding")
            return None
        early, late = (self._mean_gap(numbers, part) for part in (0, 1))
        pattern = f"position 0 of every probe agrees, the mean gap is {early:.2g} in first halves and {late:.2g} after"
        for other in self._other_ropes():
            gap = self._gap(numbers, self._logprobs(Trial(sequences=self._sequences(numbers), change=other)))
            if gap <= case.tolerance:
                own = f"the model has {case.spec.rope_theta:g}{_scaling(case.spec, True)}"
                evidence = (
                    f"{pattern}; the engine answers to {gap:.1g} as with rope_theta {other.theta:g}"
                    f"{_scaling(case.spec, other.scaled)}, {own}"
                )
                return Diagnosis(fault=Fault.ROPE, evidence=evidence)
        self.seen.append(
            f"{pattern}: positions, or projections of queries and keys; no usual rope_theta fits"
        )
        return None

    def _other_ropes(self) -> list[OtherRope]:
        spec = self.case.spec
        scalings = (True, False) if spec.rope_scaling else (False,)
        every = [OtherRope(theta=t, scaled=s) for s in scalings for t in (spec.rope_theta, *_THETAS)]
        own = OtherRope(theta=spec.rope_theta, scaled=spec.rope_scaling is not None)
        return [other for other in every if other != own]

    # other weights sent to the engine

    def _transfer(self) -> Diagnosis | None:
        gap = self._gap_after_push()
        if gap > self.case.tolerance:
            self.seen.append(f"a second transfer of the same weights leaves a gap of {gap:.3g}")
            return None
        after = f"after a second transfer of the same weights the gap is {gap:.1g}"
        start = self.case.at_start
        if start is not None and max(map(max_gap, start, self._scored_by_engine())) <= self.case.tolerance:
            evidence = f"the engine answered as it did before the first transfer; {after}"
            return Diagnosis(fault=Fault.STALE, evidence=evidence)
        return Diagnosis(fault=Fault.TRANSFER, evidence=after)

    def _head(self) -> Diagnosis | None:
        """With a head of equal rows every token is equally likely, whatever the rest of the model does."""
        sequences = self._sequences(self.case.scored())
        self._logprobs(Trial(sequences=sequences, change=EqualHead(), push=True))
        answers = self.engine.score(sequences)
        uniform = -math.log(self.case.spec.vocab_size)
        gap = max(abs(value - uniform) for values in answers for value in values)
        if gap <= self.case.tolerance:
            self.seen.append("the engine's head takes what is sent")
            return None
        if max(map(max_gap, answers, self._scored_by_engine())) <= self.case.tolerance:
            evidence = "the engine goes on answering the same, whatever weights are sent"
            return Diagnosis(fault=Fault.STALE, evidence=evidence)
        evidence = f"sent a head of equal rows, the engine still prefers some tokens by up to {gap:.3g} nats"
        return Diagnosis(fault=Fault.HEAD, evidence=evidence)

    def _layers(self) -> Diagnosis | None:
        """Layers whose tensors are all zero hand their input on: what is left on shows what it alone does."""
        none_on, engine_off = self._only(())
        every = range(self.case.spec.num_layers)
        if self._agree(none_on, engine_off):
            suspects = self._differing(every)
            ignored = [layer for layer in suspects if self._has_no_effect(layer, none_on, engine_off)]
        else:
            suspects = ignored = [layer for layer in every if self._has_no_effect(layer, none_on, engine_off)]
        if len(ignored) == 1:
            others = [layer for layer in suspects if layer not in ignored]
            beside = f"; layer {', '.join(map(str, others))} differs too when on alone" if others else ""
            evidence = f"layer {ignored[0]} of the engine does not follow what is sent for it{beside}"
        elif len(suspects) == 1:
            evidence = f"with layer {suspects[0]} alone left on the two differ, with any other they agree"
        else:
            where = f"layers {', '.join(map(str, suspects))}" if suspects else "embedding, final norm or head"
            self.seen.append(f"switching layers off one by one leaves {where}")
            return None
        return Diagnosis(fault=Fault.ONE_LAYER, evidence=evidence)

    def _differing(self, layers: Sequence[int]) -> list[int]:
        """Those of `layers` that differ when left on alone; halves that agree are not looked into."""
        if self._agree(*self._only(layers)):
            return []
        if len(layers) == 1:
            return list(layers)
        half = len(layers) // 2
        return [*self._differing(layers[:half]), *self._differing(layers[half:])]

    def _has_no_effect(self, layer: int, none_on: list[Values], engine_off: list[Values]) -> bool:
        trainer, engine = self._only((layer,))
        return self._agree(engine_off, engine) and not self._agree(none_on, trainer)

    def _only(self, layers: Sequence[int]) -> tuple[list[Values], list[Values]]:
        """What both sides say with `layers` left on, on both sides."""
        sequences = self._sequences(self.case.scored())
        change = OnlyLayers(layers=frozenset(layers))
        ours = self._logprobs(Trial(sequences=sequences, change=change, push=True))
        return list(ours), list(self.engine.score(sequences))

    def _agree(self, ours: Sequence[Values], theirs: Sequence[Values]) -> bool:
        # without layers the logits may be larger than the model's own, and rounding with them
        scale = max(1.0, max(abs(value) for values in ours for value in values) / 10)
        return max(map(max_gap, ours, theirs)) <= self.case.tolerance * scale

    def _gap_after_push(self) -> float:
        sequences = self._sequences(self.case.scored())
        ours = self._logprobs(Trial(sequences=sequences, push=True))
        return max(map(max_gap, ours, self.engine.score(sequences)))

    def _scored_by_engine(self) -> list[Values]:
        """What the engine said before anything was tried."""
        return [self.case.engine[i] for i in self.case.scored()]

    def _logprobs(self, trial: Trial) -> list[list[float]]:
        if time.monotonic() > self.deadline:
            raise _OutOfTimeError("no time is left to try more")
        return self.trials.logprobs(trial)

    def _rows(self, number: int, *, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        """Rows, tokens and the engine's values of the first positions of a probe."""
        probe = self.case.probes[number]
        positions = range(probe.start, len(probe.token_ids))[:_MAX_ROWS]
        rows = self.trials.rows(
            RowsTrial(sequence=probe.token_ids, positions=positions, temperature=temperature)
        )
        labels = torch.tensor([probe.token_ids[position] for position in positions])
        return rows, labels, torch.tensor(self.case.engine[number][: len(positions)], dtype=torch.float64)

    def _sequences(self, numbers: Sequence[int]) -> list[Sequence[int]]:
        return [self.case.probes[i].token_ids for i in numbers]

    def _gap(self, numbers: Sequence[int], logprobs: Sequence[Values]) -> float:
        """Largest gap of whole-sequence `logprobs` to what the engine said."""
        starts = [self.case.probes[i].start - 1 for i in numbers]
        return max(
            max_gap(values[start:], self.case.engine[i])
            for i, start, values in zip(numbers, starts, logprobs, strict=True)
        )

    def _mean_gap(self, numbers: Sequence[int], part: int) -> float:
        gaps: list[float] = []
        for i in numbers:
            every = [abs(a - b) for a, b in zip(self.case.trainer[i], self.case.engine[i], strict=True)]
            half = (len(every) + 1) // 2
            gaps += every[half:] if part else every[:half]
        return sum(gaps) / max(1, len(gaps))


def _scaling(spec: ModelSpec, scaled: bool) -> str:
    if spec.rope_scaling is None:
        return ""
    return f" and scaling by {spec.rope_scaling.factor:g}" if scaled else " without scaling"

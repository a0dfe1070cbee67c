"""Live training that sends its weights into running vLLM engines, on the ranks of a test, and what both sides saw.

The ranks go through all cases in the same processes. Rank 0 owns the engines; all cases of a lesson share them.
Tests judge, this only measures.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from megatron_rl.algo.aggregate import normaliser
from megatron_rl.algo.losses import policy_loss
from megatron_rl.algo.surrogates import gppo
from megatron_rl.data.pack import with_old_logprobs
from megatron_rl.data.types import Completion, TrainSample
from megatron_rl.model.spec import ModelSpec
from megatron_rl.parallel.collectives import broadcast_object
from megatron_rl.parallel.groups import destroy_process_groups, init_process_groups
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.platform import device
from megatron_rl.recipe.schema import ModelConfig
from megatron_rl.recipe.stages import EngineConfig, OptimizerConfig, ScheduleConfig
from megatron_rl.reshard.plan import ReshardPlan
from megatron_rl.reshard.verify import max_gap
from megatron_rl.rollout.engine import GenerateRequest
from megatron_rl.rollout.vllm_engine import VllmEngine
from megatron_rl.rollout.weight_sync import WeightSync
from megatron_rl.train.batches import local_batches
from megatron_rl.train.launcher import free_port
from tests.helpers.models import make_tiny_hf

TRAINED_SYNCS = 3  # in a row, with optimizer steps before each
STEPS_PER_SYNC = 2
LEARNING_RATE = 1e-3
MAX_MODEL_LEN = 64
TIMEOUT_S = 120.0
START_TIMEOUT_S = 900.0  # of engines; on a busy machine one takes minutes
VOCAB = 251
PROBES = (
    tuple((7 * i) % VOCAB for i in range(60)),
    (250, 0, 249, 1, 128, 127, 250, 0),  # both ends of the vocabulary, and of its halves
    (33, 33, 33, 33),
)
PROMPTS = ((3, 7, 9), (250, 4), (101, 33, 250, 249, 6, 90), (0,))
GROUP = 2  # completions of each prompt
SAMPLED_TOKENS = 12


@dataclass(frozen=True, kw_only=True)
class Target:
    """The shape of an engine."""

    tp: int
    replicas: int = 1

    @property
    def name(self) -> str:
        return f"{self.replicas}xtp{self.tp}" if self.replicas > 1 else f"tp{self.tp}"

    @property
    def config(self) -> EngineConfig:
        return EngineConfig(
            tp=self.tp, replicas=self.replicas, max_concurrent=16, start_timeout_s=START_TIMEOUT_S,
            request_timeout_s=TIMEOUT_S,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layout to train in, and how its weights travel.

    `options` are those of EngineConfig that say so. `elsewhere`: the workers claim to be on a machine of their own.
    """

    name: str
    layout: ParallelLayout
    options: Mapping[str, Any] = field(default_factory=dict)
    elsewhere: bool = False


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """All cases of one model, each sent to all of the targets."""

    model: str
    hf_path: Path
    targets: Sequence[Target]
    cases: Sequence[Case]


@dataclass(frozen=True, kw_only=True)
class Answers:
    """What an engine says at one moment: log-probs of PROBES, by replica, and what it samples from PROMPTS."""

    scores: list[list[list[float]]]
    completions: list[Completion]

    def equal(self, other: Answers) -> bool:
        """Whether both hold the same numbers, to the last bit; their weight versions may differ."""
        return self.scores == other.scores and self._samples() == other._samples()

    def _samples(self) -> list[tuple[Sequence[int], Sequence[float]]]:
        return [(done.token_ids, done.logprobs) for done in self.completions]


@dataclass(frozen=True, kw_only=True)
class Sync:
    """One transfer into one engine. Gaps are the largest between trainer and engine, in nats."""

    version: int
    before: float  # on the probes, with the weights of the transfer before
    scored: float  # on the probes, after it
    sampled: float  # on what the engine sampled after it
    answers: Answers
    bytes: int
    buckets: int
    relayed: int  # bytes that workers passed on to others
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Findings:
    """By model and target, what engines said on weights they read from the checkpoint by themselves; all transfers.

    Transfers are by model, case and target, in order: untrained weights, `TRAINED_SYNCS` trained ones, and the first
    of those again.
    """

    loaded: dict[tuple[str, str], Answers] = field(default_factory=dict)
    syncs: dict[tuple[str, str, str], list[Sync]] = field(default_factory=dict)


class PlacedEngine(VllmEngine):
    """An engine whose workers can claim to be on a machine of their own."""

    elsewhere = False

    def worker_nodes(self) -> tuple[str, ...]:
        nodes = super().worker_nodes()
        return tuple("elsewhere" for _ in nodes) if self.elsewhere else nodes


Engines = Mapping[str, PlacedEngine]  # by the name of their target; empty on ranks above 0


def train_and_sync(rank: int, world_size: int, lessons: Sequence[Lesson], log_dir: Path) -> Findings:
    """On every rank: all cases of all lessons. Rank 0 finds, the others find nothing."""
    device.activate()
    meeting = dist.TCPStore(
        "127.0.0.1",
        int(os.environ["MASTER_PORT"]),
        None,
        rank == 0,
        timedelta(seconds=START_TIMEOUT_S),
        wait_for_workers=False,
    )
    found = Findings()
    for lesson, engines in _with_engines(lessons, log_dir) if rank == 0 else ((each, {}) for each in lessons):
        for name, engine in engines.items():
            found.loaded[lesson.model, name] = ask(engine)
        for case in lesson.cases:
            if rank < case.layout.world_size:
                with _joined(case.layout, rank, meeting, f"{lesson.model} {case.name}"):
                    for name, syncs in Training(lesson, case, rank, engines).run().items():
                        if rank == 0:
                            found.syncs[lesson.model, case.name, name] = syncs
    return found


def _with_engines(lessons: Sequence[Lesson], log_dir: Path) -> Iterator[tuple[Lesson, Engines]]:
    """Each lesson with its engines; those of the next one start meanwhile."""
    with ThreadPoolExecutor() as pool, ExitStack() as closing:

        def start(lesson: Lesson, target: Target) -> PlacedEngine:
            engine = PlacedEngine.start(
                target.config, hf_path=lesson.hf_path, dtype="float32", spec=ModelSpec.from_hf(lesson.hf_path),
                max_model_len=MAX_MODEL_LEN, seed=1, log_dir=log_dir / lesson.model / target.name,
            )  # fmt: skip
            assert isinstance(engine, PlacedEngine)
            closing.callback(engine.close)
            return engine

        def start_all(lesson: Lesson) -> dict[str, Future[PlacedEngine]]:
            return {target.name: pool.submit(start, lesson, target) for target in lesson.targets}

        starting = start_all(lessons[0])
        for lesson, following in zip(lessons, [*lessons[1:], None], strict=True):
            engines = {name: engine.result() for name, engine in starting.items()}
            starting = start_all(following) if following else {}
            yield lesson, engines
            for engine in engines.values():
                engine.close()


@contextmanager
def _joined(layout: ParallelLayout, rank: int, meeting: dist.TCPStore, name: str) -> Iterator[None]:
    """Process groups of the layout's ranks alone; the ranks beyond go on to their next case."""
    if rank == 0:
        meeting.set(name, str(free_port()))
    init_process_groups(
        layout, rank=rank, world_size=layout.world_size, master_addr="127.0.0.1", master_port=int(meeting.get(name)),
        timeout_s=TIMEOUT_S,
    )  # fmt: skip
    yield
    dist.barrier()
    destroy_process_groups()


class Training:
    """A policy in one layout and its transfers into every engine; the same calls on every rank."""

    def __init__(self, lesson: Lesson, case: Case, rank: int, engines: Engines) -> None:
        from megatron_rl.train.policy import Policy  # megatron-core comes after the platform is known

        spec = ModelSpec.from_hf(lesson.hf_path)
        config = ModelConfig(hf_path=str(lesson.hf_path), dtype="float32", spec="local")
        self.policy = Policy(config, spec, case.layout, rank=rank)
        self.policy.start_stage(OptimizerConfig(lr=LEARNING_RATE), ScheduleConfig(), total_steps=100)
        self._version, self._engines = -1, engines
        for engine in engines.values():
            engine.elsewhere = case.elsewhere
        self._transfers = {
            target.name: WeightSync(
                self.policy.named_params, spec=spec, layout=case.layout, rank=rank, engine=engines.get(target.name),
                config=replace(target.config, **case.options), dtype=torch.float32,
            )
            for target in lesson.targets
        }  # fmt: skip

    def run(self) -> dict[str, list[Sync]]:
        """By target, its transfers in the order that Findings tells."""
        rounds = [self._sync_all()]
        first: list[dict[str, torch.Tensor]] = []
        for number in range(TRAINED_SYNCS):
            answers = next(iter(rounds[-1].values())).answers
            for _ in range(STEPS_PER_SYNC):
                self._step(answers.completions)
            rounds.append(self._sync_all())
            if number == 0:
                first = [{k: v.clone() for k, v in chunk.items()} for chunk in self.policy.named_params()]
        for chunk, values in zip(self.policy.named_params(), first, strict=True):
            for name, param in chunk.items():
                param.copy_(values[name])
        rounds.append(self._sync_all())
        for transfer in self._transfers.values():
            transfer.disconnect()
        return {name: [each[name] for each in rounds] for name in self._transfers}

    def _step(self, completions: Sequence[Completion]) -> None:
        """One optimizer step of the clipped surrogate on what an engine sampled; every second answer is good."""
        samples = [_sample(*rollout, good=i % 2 == 0) for i, rollout in enumerate(_rollouts(completions))]
        policy = self.policy
        batches = local_batches(samples, policy.layout, dp_rank=policy.dp_rank, tokens_per_microbatch=48)
        old = policy.logprobs(batches)
        batches = [with_old_logprobs(batch, values) for batch, values in zip(batches, old, strict=True)]
        count = normaliser(samples, "token_mean")
        loss = partial(policy_loss, surrogate=gppo(0.2, 0.28), aggregate="token_mean", normaliser=count)
        policy.forward_backward(batches, loss)
        policy.optimizer_step()

    def _sync_all(self) -> dict[str, Sync]:
        """The weights as they are into every engine, and what both sides then say."""
        self._version += 1
        ours = self._logprobs(PROBES)
        return {name: self._sync(name, transfer, ours) for name, transfer in self._transfers.items()}

    def _sync(self, name: str, transfer: WeightSync, ours: list[list[float]]) -> Sync:
        engine = self._engines.get(name)
        before = _gap(ours, engine.score_all(PROBES)) if engine is not None else 0.0
        result = transfer.push(self._version)
        answers = broadcast_object(ask(engine) if engine is not None else None, src=0)
        assert answers is not None
        rollouts = _rollouts(answers.completions)
        sampled = self._logprobs([[*prompt, *done.token_ids] for prompt, done in rollouts])
        return Sync(
            version=result.version,
            before=before,
            scored=_gap(ours, answers.scores),
            sampled=max(
                max_gap(values[len(prompt) - 1 :], done.logprobs)
                for values, (prompt, done) in zip(sampled, rollouts, strict=True)
            ),
            answers=answers,
            bytes=result.bytes,
            buckets=transfer.plan.num_buckets,
            relayed=_relayed(transfer.plan),
            seconds=result.seconds,
        )

    def _logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        from megatron_rl.train.trials import sequence_logprobs

        return sequence_logprobs(self.policy, sequences)


def write_model(directory: Path, **options: Any) -> Path:
    """A tiny model (options of `make_tiny_hf`) whose log-probs float32 itself gets wrong by 2e-6 at most."""
    path = make_tiny_hf(directory, vocab=VOCAB, **options) / "model.safetensors"
    weights = {
        name: value if name.endswith("norm.weight") else value * 0.3
        for name, value in load_file(path).items()
    }
    save_file(weights, path, metadata={"format": "pt"})
    return path.parent


def ask(engine: VllmEngine) -> Answers:
    requests = [
        GenerateRequest(prompt_token_ids=prompt, seed=seed, max_tokens=SAMPLED_TOKENS, temperature=1.0)
        for prompt in PROMPTS
        for seed in range(GROUP)
    ]
    return Answers(scores=engine.score_all(PROBES), completions=engine.generate(requests))


def _rollouts(completions: Sequence[Completion]) -> list[tuple[Sequence[int], Completion]]:
    """Each completion beside its prompt."""
    prompts = [prompt for prompt in PROMPTS for _ in range(GROUP)]
    return list(zip(prompts, completions, strict=True))


def _sample(prompt: Sequence[int], completion: Completion, *, good: bool) -> TrainSample:
    answer = completion.token_ids
    return TrainSample(
        token_ids=[*prompt, *answer],
        loss_mask=[False] * len(prompt) + [True] * len(answer),
        rollout_logprobs=[0.0] * len(prompt) + list(completion.logprobs),
        advantage=1.0 if good else -1.0,
        is_positive=good,
    )


def _relayed(plan: ReshardPlan) -> int:
    workers = range(plan.num_trainers, plan.num_trainers + plan.num_workers)
    return sum(message.bytes for worker in workers for message in plan.messages_from(worker))


def _gap(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[Sequence[float]]]) -> float:
    """Over the probes of every replica."""
    return max(max_gap(a, b) for replica in theirs for a, b in zip(ours, replica, strict=True))

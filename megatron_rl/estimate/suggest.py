"""The layouts of a recipe on so many GPUs that are predicted to be fastest, among those that fit in their memory."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megatron_rl.estimate.candidates import (
    EngineChoice,
    TrainerChoice,
    engine_choices,
    engine_degrees,
    trainer_choices,
    with_engines_that_split,
)
from megatron_rl.estimate.generation import Engines, generation_time
from megatron_rl.estimate.hardware import Hardware
from megatron_rl.estimate.memory import ELEMENT_BYTES, stage_memory, takes_turns
from megatron_rl.estimate.memory_engine import engine_memory
from megatron_rl.estimate.memory_fit import largest_fraction, tightest
from megatron_rl.estimate.memory_types import GIB, EngineMemory, StageMemory
from megatron_rl.estimate.stage_time import Assumed, rl_work, sample_lengths
from megatron_rl.estimate.timing import TransferLoad, sync_s, train_pass
from megatron_rl.estimate.training import FORWARD, Trainer, pass_time, update_s
from megatron_rl.estimate.work import ModelWork, model_work
from megatron_rl.model.hf_tables import hf_tensors
from megatron_rl.model.spec import ModelSpec
from megatron_rl.recipe.resolve import longest_sample
from megatron_rl.recipe.schema import Recipe
from megatron_rl.recipe.stages import RlStage, SftStage
from megatron_rl.recipe.transfer import is_colocated

_SPLITS = (1 / 4, 1 / 2, 3 / 4)  # of the GPUs for engines, where they have their own


@dataclass(frozen=True, kw_only=True, slots=True)
class Suggestion:
    """One layout with its price. `total_s` is that of all steps whose number is known, or of one step of each stage."""

    trainer: TrainerChoice
    engine: EngineChoice | None  # None: no RL stage
    memory_fraction: float  # of engines
    total_s: float
    phases: dict[str, float]  # seconds of `total_s`; what overlaps is counted in both
    trainer_bytes: int  # at its peak
    spare_bytes: int  # of a GPU; negative: so much is missing
    peak: str  # the phase in which the trainer needs most

    @property
    def fits(self) -> bool:
        return self.spare_bytes >= 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Suggestions:
    """`best` fit, fastest first. `faster_without_memory` would beat the first of them and do not fit."""

    best: tuple[Suggestion, ...]
    faster_without_memory: tuple[Suggestion, ...]
    num_considered: int
    fit_s: tuple[float, ...]  # seconds of all that fit, ascending

    @property
    def num_fit(self) -> int:
        return len(self.fit_s)

    def place(self, total_s: float) -> int:
        """Which one a layout that takes so long would be, from 1; as fast to a thousandth is as good."""
        return 1 + bisect_left(self.fit_s, total_s * 0.999)


class _Search:
    """What all candidates share."""

    def __init__(self, recipe: Recipe, spec: ModelSpec, hardware: Hardware, assumed: Assumed) -> None:
        self.recipe, self.spec, self.hardware, self.assumed = recipe, spec, hardware, assumed
        self.work: ModelWork = model_work(spec)
        self.num_tensors = len(hf_tensors(spec))
        self.capacity = int(hardware.memory_gib * GIB)
        self.rl = [stage for stage in recipe.stages if isinstance(stage, RlStage)]
        known = [_steps(stage) for stage in recipe.stages]
        self.weights = [float(steps) for steps in known] if any(known) else [1.0] * len(known)
        self._generated: dict[tuple[EngineChoice, float, int], float] = {}

    def engine_memories(self, choice: EngineChoice) -> list[EngineMemory]:
        """Of the engines of every RL stage."""
        element_bytes = ELEMENT_BYTES[self.recipe.model.dtype]
        return [
            engine_memory(self.spec, replace(stage.engine, tp=choice.tp), element_bytes=element_bytes)
            for stage in self.rl
        ]

    def generate_s(self, choice: EngineChoice, memory: EngineMemory, fraction: float, number: int) -> float:
        """Seconds of one generation of RL stage `number`; infinite where the cache does not hold one sequence."""
        key = (choice, fraction, number)
        if key not in self._generated:
            self._generated[key] = self._generation(choice, memory, fraction, self.rl[number])
        return self._generated[key]

    def _generation(
        self, choice: EngineChoice, memory: EngineMemory, fraction: float, stage: RlStage
    ) -> float:
        budget = int(self.capacity * fraction)
        if not memory.sequences(budget, longest_sample(stage)):
            return math.inf
        engines = Engines(
            work=self.work,
            hardware=self.hardware,
            tp=choice.tp,
            replicas=choice.replicas,
            max_concurrent=stage.engine.max_concurrent,
            kv_tokens=memory.kv_bytes(budget) / memory.kv_token_bytes,
        )
        load = rl_work(stage, self.assumed, transfer_s=0.0)
        time = generation_time(
            engines, sequences=load.generated, prompt_tokens=load.prompt_tokens, lengths=load.lengths
        )
        return time.total_s


def suggest(
    recipe: Recipe, spec: ModelSpec, hardware: Hardware, assumed: Assumed, *, num_gpus: int, count: int = 10
) -> Suggestions:
    """Every layout on `num_gpus` GPUs: the trainer on all of them and its engines too, or, where the recipe gives those
    GPUs of their own (`is_colocated`), the trainer on a part and engines on the rest."""
    # its own may be why there are suggestions
    recipe = with_engines_that_split(recipe, spec, gpus_per_node=hardware.gpus_per_node)
    search = _Search(recipe, spec, hardware, assumed)
    found = sorted(_all(search, num_gpus), key=lambda s: (s.total_s, not s.fits, s.trainer.layout.pp))
    fitting = [suggestion for suggestion in found if suggestion.fits]
    first = fitting[0].total_s if fitting else math.inf
    missing = [suggestion for suggestion in found if not suggestion.fits and suggestion.total_s < first]
    return Suggestions(
        best=tuple(fitting[:count]),
        faster_without_memory=tuple(missing[:3]),
        num_considered=len(found),
        fit_s=tuple(suggestion.total_s for suggestion in fitting),
    )


def _all(search: _Search, num_gpus: int) -> Iterator[Suggestion]:
    """The best engines for each choice of the trainer."""
    degrees = engine_degrees(search.spec, gpus_per_node=search.hardware.gpus_per_node)
    for own_gpus in _engine_gpus(search, num_gpus):
        choices = list(engine_choices(degrees, num_gpus=num_gpus, own_gpus=own_gpus))
        engines = [(choice, search.engine_memories(choice)) for choice in choices]
        for trainer in trainer_choices(
            search.recipe,
            search.spec,
            world_size=num_gpus - own_gpus,
            gpus_per_node=search.hardware.gpus_per_node,
        ):
            priced = _trainer_price(search, trainer)
            if not search.rl:
                yield _sft_suggestion(search, trainer, priced)
                continue
            options = [
                _with_engines(search, trainer, priced, choice, memories) for choice, memories in engines
            ]
            if options:
                yield min(options, key=lambda s: (not s.fits, s.total_s))


def _engine_gpus(search: _Search, num_gpus: int) -> list[int]:
    """How many GPUs engines may have for themselves; 0: they share the trainer's."""
    if not search.rl:
        return [0]
    node = search.hardware.gpus_per_node
    own = [int(num_gpus * share) for share in _SPLITS]
    if num_gpus > node:
        own = [gpus // node * node for gpus in own]
    own = sorted({gpus for gpus in own if gpus})
    return [0] if all(map(is_colocated, search.rl)) else own


@dataclass(frozen=True, kw_only=True, slots=True)
class _TrainerPrice:
    """Of one choice of the trainer: per stage seconds of log-probs, training and update, and its memory."""

    logprob_s: Sequence[float]
    train_s: Sequence[float]
    memory: Sequence[StageMemory]


def _trainer_price(search: _Search, choice: TrainerChoice) -> _TrainerPrice:
    recipe = choice.apply(search.recipe)
    cost = train_pass(choice.recompute)
    logprobs, trains = [], []
    memory = []
    for stage in recipe.stages:
        trainer = Trainer(
            work=search.work,
            layout=choice.layout,
            hardware=search.hardware,
            microbatch_tokens=stage.tokens_per_microbatch,
        )
        if isinstance(stage, SftStage):
            lengths = sample_lengths(stage, search.assumed)
            tokens, context = stage.global_batch_size * lengths.mean, lengths.mean_square / lengths.mean / 2
            updates, scorings = 1, 0
        else:
            load = rl_work(stage, search.assumed, transfer_s=0.0)
            tokens, context = load.trained * load.sample_tokens, load.context
            updates, scorings = load.updates, load.scorings
        one = pass_time(trainer, cost, tokens=tokens / updates, context=context).total_s
        trains.append((one + update_s(trainer)) * updates)
        logprobs.append(scorings * pass_time(trainer, FORWARD, tokens=tokens, context=context).total_s)
        memory.append(
            stage_memory(
                stage,
                recipe.model,
                search.spec,
                choice.layout,
                sleeps=takes_turns(stage),
                gpus_per_node=search.hardware.gpus_per_node,
            )
        )
    return _TrainerPrice(logprob_s=logprobs, train_s=trains, memory=memory)


def _sft_suggestion(search: _Search, trainer: TrainerChoice, price: _TrainerPrice) -> Suggestion:
    total = sum(weight * train for weight, train in zip(search.weights, price.train_s, strict=True))
    tight = max(map(tightest, price.memory), key=lambda tight: tight.bytes)
    return Suggestion(
        trainer=trainer,
        engine=None,
        memory_fraction=0.0,
        total_s=total,
        phases={"train": total},
        trainer_bytes=tight.bytes,
        spare_bytes=search.capacity - tight.bytes,
        peak=tight.phase.phase,
    )


def _with_engines(
    search: _Search,
    trainer: TrainerChoice,
    price: _TrainerPrice,
    choice: EngineChoice,
    memories: Sequence[EngineMemory],
) -> Suggestion:
    """Engines on the trainer's GPUs get what it leaves them, those on their own nine tenths."""
    shared = frozenset[int]() if choice.own_gpus else frozenset(range(trainer.layout.pp))
    engines = iter(memories)
    held = [
        replace(stage, engine=next(engines), shared_pp=shared) if stage.engine is not None else stage
        for stage in price.memory
    ]
    tight = max(map(tightest, held), key=lambda tight: tight.bytes)
    fraction = min(largest_fraction(stage, search.capacity) for stage in held if stage.engine is not None)
    least = max(
        memory.needed(1, longest_sample(stage)) for memory, stage in zip(memories, search.rl, strict=True)
    )
    spare = min(int(search.capacity * fraction) - least, search.capacity - tight.bytes)
    phases = dict.fromkeys(("generate", "reward", "logprob", "train", "sync"), 0.0)
    total, number = 0.0, 0
    for i, stage in enumerate(search.recipe.stages):
        weight = search.weights[i]
        sides = price.logprob_s[i] + price.train_s[i]
        phases["logprob"] += weight * price.logprob_s[i]
        phases["train"] += weight * price.train_s[i]
        if isinstance(stage, SftStage):
            total += weight * sides
            continue
        # too small a cache is priced as the smallest that would do, so that it can be said what it costs
        usable = fraction if spare >= 0 else least / search.capacity + 0.005
        made = search.generate_s(choice, memories[number], usable, number)
        reward = rl_work(stage, search.assumed, transfer_s=0.0).reward_s
        transfer = _transfer_s(search, trainer, choice, stage.engine.bucket_mib * 2**20)
        phases["generate"] += weight * made
        phases["reward"] += weight * reward
        phases["sync"] += weight * transfer
        step = max(made + reward, sides) if stage.overlap != "none" else made + reward + sides
        total += weight * (step + transfer)
        number += 1
    return Suggestion(
        trainer=trainer,
        engine=choice,
        memory_fraction=fraction,
        total_s=total,
        phases=phases,
        trainer_bytes=tight.bytes,
        spare_bytes=spare,
        peak=tight.phase.phase,
    )


def _transfer_s(search: _Search, trainer: TrainerChoice, choice: EngineChoice, bucket_bytes: int) -> float:
    """A bound without a plan: the busiest of those that send and receive.

    Engines of their own are on other machines. On the trainer's, other pipeline stages may be (tp comes before dp
    before pp in the order of ranks).
    """
    layout = trainer.layout
    model = search.work.num_weights * ELEMENT_BYTES[search.recipe.model.dtype]
    crossing = 1.0
    if not choice.own_gpus:
        crossing = (layout.pp - 1) / layout.pp if layout.world_size > search.hardware.gpus_per_node else 0.0
    # a worker hears in each bucket from every rank that holds a part of its own
    heard = math.ceil(layout.tp / choice.tp) * math.ceil(model / choice.tp / bucket_bytes)
    load = TransferLoad(
        sent_bytes=model * choice.replicas / layout.world_size,
        received_bytes=model / choice.tp,
        crossing_frac=crossing,
        messages=heard * max(1.0, choice.tp * choice.replicas / layout.world_size),
        tensors=search.num_tensors,
    )
    return sync_s(search.hardware, load)


def _steps(stage: SftStage | RlStage) -> int:
    return stage.steps if isinstance(stage, SftStage) else stage.iterations

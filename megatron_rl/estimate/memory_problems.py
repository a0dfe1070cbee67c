"""What does not fit, as problems of a recipe, each with the nearest values that do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from megatron_rl.errors import LayoutError
from megatron_rl.estimate.engine_gpus import place_problems
from megatron_rl.estimate.memory import stage_memory, takes_turns
from megatron_rl.estimate.memory_fit import beside_engine, largest_fraction, smallest_fraction, tightest
from megatron_rl.estimate.memory_types import GIB, StageMemory
from megatron_rl.model.spec import ModelSpec
from megatron_rl.model.splits import split_problems
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.recipe.problems import Problem
from megatron_rl.recipe.resolve import longest_sample
from megatron_rl.recipe.schema import ModelConfig, Recipe
from megatron_rl.recipe.stages import RlStage, Stage
from megatron_rl.reshard.plan_text import size_text


@dataclass(frozen=True, kw_only=True, slots=True)
class _Choice:
    """One stage as it could be."""

    stage: Stage
    model: ModelConfig
    layout: ParallelLayout


def memory_problems(
    recipe: Recipe,
    spec: ModelSpec,
    layout: ParallelLayout,
    *,
    memory_gib: float,
    gpus_per_node: int,
    sleeps: bool = False,
) -> list[Problem]:
    """Every stage that needs more than a GPU of `memory_gib` has, by the estimate. `layout` splits the model."""
    capacity = int(memory_gib * GIB)
    problems: list[Problem] = []
    for index, stage in enumerate(recipe.stages):
        choice = _Choice(stage=stage, model=recipe.model, layout=layout)
        problems += _stage_problems(
            choice,
            spec,
            f"stages.{index}",
            capacity=capacity,
            gpus_per_node=gpus_per_node,
            sleeps=sleeps or takes_turns(stage),
        )
        if isinstance(stage, RlStage):
            problems += place_problems(
                stage, f"stages.{index}.engine", layout.world_size, gpus_per_node=gpus_per_node
            )
    return problems


def _stage_problems(
    choice: _Choice, spec: ModelSpec, path: str, *, capacity: int, gpus_per_node: int, sleeps: bool
) -> Iterator[Problem]:
    def measure(other: _Choice) -> StageMemory:
        return stage_memory(
            other.stage, other.model, spec, other.layout, sleeps=sleeps, gpus_per_node=gpus_per_node
        )

    memory = measure(choice)
    tight = tightest(memory)
    if tight.bytes > capacity:
        parts = ", ".join(f"{name} {size_text(size)}" for name, size in _largest_first(tight.phase.parts))
        changes = _changes(
            choice,
            spec,
            gpus_per_node=gpus_per_node,
            is_enough=lambda other: tightest(measure(other)).bytes <= capacity,
        )
        # other phases hold what does not depend on tokens
        is_of_tokens = tight.phase.phase in ("train", "logprob")
        yield Problem(
            f"{path}.tokens_per_microbatch" if is_of_tokens else "layout",
            (f"with {memory.tokens_per_microbatch} tokens " if is_of_tokens else f"in {path} ")
            + f"a rank of pp rank {tight.rank.pp_rank} needs {size_text(tight.bytes)} in its {tight.phase.phase} "
            f"phase ({parts}), but a GPU has {size_text(capacity)}; {changes}",
        )
    if isinstance(choice.stage, RlStage) and memory.engine is not None:
        # a trainer that does not fit alone has its line
        yield from _engine_problems(
            choice.stage, memory, path, capacity=capacity, is_alone=tight.bytes > capacity
        )


def _engine_problems(
    stage: RlStage, memory: StageMemory, path: str, *, capacity: int, is_alone: bool
) -> Iterator[Problem]:
    engine, fraction = memory.engine, stage.engine.gpu_memory_fraction
    assert engine is not None
    least = smallest_fraction(engine, capacity, sequences=1, tokens=memory.longest)
    most = largest_fraction(memory, capacity)
    tight = beside_engine(memory)
    where = f"{path}.engine.gpu_memory_fraction"
    if engine.sequences(int(fraction * capacity), memory.longest) < 1:
        room = size_text(engine.kv_bytes(int(fraction * capacity)))
        yield Problem(
            where,
            f"got {fraction:g} of {size_text(capacity)}, which leaves {room} for keys and values, but one sequence of "
            f"{memory.longest} tokens takes {size_text(engine.kv_token_bytes * memory.longest)} per worker; "
            + (f"use at least {least:g}, or raise engine.tp" if least <= 0.9 else "raise engine.tp"),
        )
    if is_alone or tight is None or tight.bytes + int(fraction * capacity) <= capacity:
        return
    helps = (
        f"use at most {most:g}"
        if most >= least
        else "there is no share that serves both: split the model more"
    )
    yield Problem(
        where,
        f"got {fraction:g} of {size_text(capacity)}, but trainer ranks on the same GPUs (pp rank "
        f"{tight.rank.pp_rank}) need {size_text(tight.bytes)} in their {tight.phase.phase} phase; {helps}, or give "
        "engines machines of their own (engine.hosts)",
    )


def _largest_first(parts: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(parts.items(), key=lambda part: -part[1])


def _changes(
    choice: _Choice, spec: ModelSpec, *, gpus_per_node: int, is_enough: Callable[[_Choice], bool]
) -> str:
    """Single changes that make it fit, in words; else what all of them together do."""
    found = [
        text
        for text, other in (
            *_recompute(choice),
            *_fewer_tokens(choice, is_enough),
            *_splits(choice, spec, gpus_per_node),
        )
        if is_enough(other)
    ]
    # splits come by rising degree: the first of each kind is the nearest
    nearest = {text.partition(" ")[0]: text for text in reversed(found)}
    if nearest:
        return "any of these fits: " + ", ".join(reversed(nearest.values()))
    smaller = _with_tokens(replace(choice, model=replace(choice.model, recompute="full")), _least(choice))
    for text, other in _splits(smaller, spec, gpus_per_node):
        if is_enough(other):
            return (
                f"no single change fits, but {text} with model.recompute full and tokens_per_microbatch "
                f"{other.stage.tokens_per_microbatch} does"
            )
    return "no layout of this number of processes fits; use more of them, or GPUs with more memory"


def _recompute(choice: _Choice) -> Iterator[tuple[str, _Choice]]:
    if choice.model.recompute != "full":
        yield "model.recompute full", replace(choice, model=replace(choice.model, recompute="full"))


def _fewer_tokens(choice: _Choice, is_enough: Callable[[_Choice], bool]) -> Iterator[tuple[str, _Choice]]:
    """The most tokens that fit, in multiples of the least that a micro-batch must have room for or of 1024."""
    least, now = _least(choice), choice.stage.tokens_per_microbatch
    step = 1024
    low, high = 0, max(0, (now - 1 - least) // step)
    if least >= now or not is_enough(_with_tokens(choice, least)):
        return
    while low < high:
        middle = (low + high + 1) // 2
        if is_enough(_with_tokens(choice, least + middle * step)):
            low = middle
        else:
            high = middle - 1
    tokens = least + low * step
    yield f"tokens_per_microbatch {tokens}", _with_tokens(choice, tokens)


def _least(choice: _Choice) -> int:
    """Of a micro-batch: the longest sample, up to a multiple of tp."""
    tp = choice.layout.tp
    return -(-longest_sample(choice.stage) // tp) * tp


def _with_tokens(choice: _Choice, tokens: int) -> _Choice:
    return replace(choice, stage=replace(choice.stage, tokens_per_microbatch=tokens))


def _splits(choice: _Choice, spec: ModelSpec, gpus_per_node: int) -> Iterator[tuple[str, _Choice]]:
    """More tensor, then more pipeline parallelism over the same processes, as far as the model can be split."""
    layout = choice.layout
    for key, limit in (("tp", gpus_per_node), ("pp", layout.world_size)):
        degree = 2 * getattr(layout, key)
        while degree <= min(limit, layout.world_size):
            other = _relaid(layout, key, degree, spec)
            if other is not None:
                yield f"layout.{key} {degree}", replace(choice, layout=other)
            degree *= 2


def _relaid(layout: ParallelLayout, key: str, degree: int, spec: ModelSpec) -> ParallelLayout | None:
    degrees = {"tp": layout.tp, "pp": layout.pp} | {key: degree}
    ranks = degrees["tp"] * degrees["pp"]
    if layout.world_size % ranks:
        return None
    try:
        other = replace(
            layout,
            **degrees,
            dp=layout.world_size // ranks,
            sp=layout.sp or degrees["tp"] > 1,
            first_stage_layers=None,
            last_stage_layers=None,
        )
    except LayoutError:
        return None
    return None if any(split_problems(spec, other)) else other

"""Layouts that a recipe could have on so many GPUs: all that its model and batches can be split by."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from megatron_rl.errors import LayoutError
from megatron_rl.model.spec import ModelSpec
from megatron_rl.parallel.degrees import divisors
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.recipe.resolve import layout_problems, longest_sample, samples_per_step
from megatron_rl.recipe.schema import LayoutConfig, Recipe
from megatron_rl.recipe.stages import RlStage, Stage
from megatron_rl.reshard.tables import check_target

_MOST_PP, _MOST_VPP = 16, 4
_LEAST_COLUMNS = 256  # of a shard of an expert; ours: a tile of a tensor core's product or two


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerChoice:
    """A layout of the trainer with what else decides its memory."""

    layout: ParallelLayout
    recompute: str
    tokens: tuple[int, ...]  # tokens_per_microbatch of every stage

    def apply(self, recipe: Recipe) -> Recipe:
        """The recipe with this choice in the place of its own."""
        layout = self.layout
        stages = tuple(
            replace(stage, tokens_per_microbatch=tokens)
            for stage, tokens in zip(recipe.stages, self.tokens, strict=True)
        )
        return replace(
            recipe,
            layout=LayoutConfig(
                tp=layout.tp, pp=layout.pp, vpp=layout.vpp, sp=layout.sp, ep=layout.ep, etp=layout.etp
            ),
            model=replace(recipe.model, recompute=self.recompute),  # type: ignore[arg-type]
            stages=stages,
        )


def trainer_choices(
    recipe: Recipe, spec: ModelSpec, *, world_size: int, gpus_per_node: int
) -> Iterator[TrainerChoice]:
    """Every choice that passes the checks: tp inside a node, sequence parallel with it, even pipelines."""
    own = tuple(stage.tokens_per_microbatch for stage in recipe.stages)
    for layout in _layouts(spec, world_size=world_size, gpus_per_node=gpus_per_node):
        least = tuple(_least_tokens(stage, layout) for stage in recipe.stages)
        for tokens in dict.fromkeys((own, least)):
            for recompute in ("none", "full"):
                choice = TrainerChoice(layout=layout, recompute=recompute, tokens=tokens)
                if not any(layout_problems(choice.apply(recipe), layout, spec)):
                    yield choice


def possible_worlds(recipe: Recipe, spec: ModelSpec, *, gpus_per_node: int) -> list[int]:
    """Numbers of processes that some layout may be for, ascending: all that have a choice, and a few more. dp divides
    the batches of every stage."""
    batches = math.gcd(*(samples_per_step(stage) for stage in recipe.stages))
    depths = [n for n in divisors(spec.num_layers) if n <= _MOST_PP]
    return sorted({math.prod(each) for each in product(divisors(gpus_per_node), depths, divisors(batches))})


def _layouts(spec: ModelSpec, *, world_size: int, gpus_per_node: int) -> Iterator[ParallelLayout]:
    for tp in divisors(gpus_per_node):
        for pp in (n for n in divisors(spec.num_layers) if n <= _MOST_PP):
            chunks = [n for n in divisors(spec.num_layers // pp) if n <= _MOST_VPP] if pp > 1 else [1]
            for vpp, (ep, etp) in product(chunks, _expert_degrees(spec, tp=tp, world_size=world_size)):
                try:
                    yield ParallelLayout.for_world(
                        tp=tp, pp=pp, vpp=vpp, sp=tp > 1, ep=ep, etp=etp, world_size=world_size
                    )
                except LayoutError:
                    continue


def _expert_degrees(spec: ModelSpec, *, tp: int, world_size: int) -> list[tuple[int, int | None]]:
    """(ep, etp): experts split as the rest, or whole. No shard of one gets too narrow for its products."""
    if spec.moe is None:
        return [(1, None)]
    found: list[tuple[int, int | None]] = []
    for ep in (n for n in divisors(spec.moe.num_experts) if n <= world_size):
        if tp == 1 or spec.moe.expert_ffn_size // tp >= _LEAST_COLUMNS:
            found.append((ep, None))
        if tp > 1 and ep > 1:
            found.append((ep, 1))
    return found


def _least_tokens(stage: Stage, layout: ParallelLayout) -> int:
    """The smallest micro-batch that the longest sample fits, in whole multiples of tp."""
    return -(-longest_sample(stage) // layout.tp) * layout.tp


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineChoice:
    """Engines of all RL stages. `own_gpus` 0: on the GPUs of the trainer."""

    tp: int
    replicas: int
    own_gpus: int


def engine_degrees(spec: ModelSpec, *, gpus_per_node: int) -> list[int]:
    """Every tp that an engine of the model can have on one machine; the first is 1."""
    degrees = []
    for tp in divisors(gpus_per_node):
        try:
            check_target(spec, tp=tp)
        except LayoutError:
            continue
        degrees.append(tp)
    return degrees


def with_engines_that_split(recipe: Recipe, spec: ModelSpec, *, gpus_per_node: int) -> Recipe:
    """Engines of the nearest smaller tp where a stage's own is none that the model can be split by."""
    degrees = engine_degrees(spec, gpus_per_node=gpus_per_node)

    def fitting(stage: Stage) -> Stage:
        if not isinstance(stage, RlStage) or stage.engine.tp in degrees:
            return stage
        tp = max(degree for degree in degrees if degree < stage.engine.tp)
        return replace(stage, engine=replace(stage.engine, tp=tp))

    return replace(recipe, stages=tuple(map(fitting, recipe.stages)))


def engine_choices(tps: Sequence[int], *, num_gpus: int, own_gpus: int) -> Iterator[EngineChoice]:
    """One engine on every tp GPUs, of those of the trainer or of its own."""
    available = own_gpus or num_gpus
    for tp in tps:
        if available % tp == 0:
            yield EngineChoice(tp=tp, replicas=available // tp, own_gpus=own_gpus)

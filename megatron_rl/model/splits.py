"""Whether a layout can split a model, and the nearest degrees that can. Pure arithmetic.

megatron-core 0.16.1 takes some layouts that lose layers or train experts wrongly without a word; none gets past
here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron_rl.parallel.degrees import divisors, nearest
from megatron_rl.parallel.layout import ParallelLayout

if TYPE_CHECKING:
    from megatron_rl.model.spec import ModelSpec


def split_problems(spec: ModelSpec, layout: ParallelLayout) -> Iterator[str]:
    """Everything that keeps `layout` from splitting `spec`; each text starts with the dotted key to change."""
    tensor = list(_tensor_problems(spec, layout.tp))
    # one misfit per degree: the next would name the same key
    yield from tensor[:1]
    yield from _pipeline_problems(spec.num_layers, layout)
    yield from _expert_problems(spec, layout)


def _tensor_problems(spec: ModelSpec, tp: int) -> Iterator[str]:
    misfits = list(_tensor_misfits(spec, tp))
    if misfits:
        allowed = [n for n in divisors(spec.num_heads) if not any(_tensor_misfits(spec, n))]
        yield from (f"layout.tp: got {tp}, {misfit}; use {nearest(tp, allowed)}" for misfit in misfits)


def _tensor_misfits(spec: ModelSpec, tp: int) -> Iterator[str]:
    sizes = [("attention heads", spec.num_heads)]
    if spec.moe is None:
        sizes.append(("ffn_size", spec.ffn_size))
    for what, size in sizes:
        if size % tp:
            yield f"which does not divide the model's {size} {what}"
    kv_heads = spec.num_kv_heads
    if kv_heads % tp and tp % kv_heads:
        yield f"but the model's {kv_heads} kv heads must divide it or be divided by it"


def _pipeline_problems(num_layers: int, layout: ParallelLayout) -> Iterator[str]:
    if layout.first_stage_layers is None and layout.last_stage_layers is None:
        stages = layout.pp * layout.vpp
        if num_layers % stages:
            yield (
                f"layout.pp: got pp*vpp = {layout.pp}*{layout.vpp} = {stages}, which does not divide the "
                f"model's {num_layers} layers; make pp*vpp {nearest(stages, divisors(num_layers))}"
            )
        return
    if not is_partition(num_layers, layout):
        key = "first_stage_layers" if layout.first_stage_layers is not None else "last_stage_layers"
        yield f"layout.{key}: {_uneven_misfit(num_layers, layout)}"


def is_partition(num_layers: int, layout: ParallelLayout) -> bool:
    """Whether stages are cut into equal chunks which, in pipeline order, hold each layer once; none is empty."""
    stages = layout.stage_layers(num_layers)
    if sum(stages) != num_layers or any(layers % layout.vpp for layers in stages):
        return False
    chunks = [
        layout.chunk_layers(num_layers, pp_rank=pp_rank, chunk=chunk)
        for chunk in range(layout.vpp)
        for pp_rank in range(layout.pp)
    ]
    held = [layer for chunk in chunks for layer in chunk]
    return all(chunks) and held == list(range(num_layers))


def _uneven_misfit(num_layers: int, layout: ParallelLayout) -> str:
    first, last = layout.first_stage_layers, layout.last_stage_layers
    ends = [f"{key} = {n}" for key, n in (("first_stage_layers", first), ("last_stage_layers", last)) if n]
    return (
        f"got {' and '.join(ends)} with pp = {layout.pp}, vpp = {layout.vpp}, which does not split the model's "
        f"{num_layers} layers into stages that are multiples of vpp; {_uneven_hint(num_layers, layout)}"
    )


def _uneven_hint(num_layers: int, layout: ParallelLayout) -> str:
    """Sizes of the end stages near those asked for; with both set, both may move."""
    first, last = layout.first_stage_layers, layout.last_stage_layers
    sizes = range(layout.vpp, num_layers, layout.vpp)
    candidates = [
        (a, b)
        for a in (sizes if first is not None else (None,))
        for b in (sizes if last is not None else (None,))
        if is_partition(num_layers, _with_ends(layout, a, b))
    ]
    if not candidates:
        return f"no sizes do: choose pp and vpp so that pp*vpp is at most {num_layers}"
    best = sorted(candidates, key=lambda pair: (_distance(pair, (first, last)), pair))[:2]
    return "use " + " or ".join(
        " and ".join(
            f"{key} = {n}"
            for key, n in (("first_stage_layers", a), ("last_stage_layers", b))
            if n is not None
        )
        for a, b in best
    )


def _with_ends(layout: ParallelLayout, first: int | None, last: int | None) -> ParallelLayout:
    return ParallelLayout(pp=layout.pp, vpp=layout.vpp, first_stage_layers=first, last_stage_layers=last)


def _distance(pair: tuple[int | None, int | None], wanted: tuple[int | None, int | None]) -> int:
    return sum(abs((a or 0) - (b or 0)) for a, b in zip(pair, wanted, strict=True))


def _expert_problems(spec: ModelSpec, layout: ParallelLayout) -> Iterator[str]:
    if spec.moe is None:
        if layout.ep > 1:
            yield f"layout.ep: got {layout.ep}, but the model has no experts; set it to 1"
        if layout.etp is not None:
            yield f"layout.etp: got {layout.etp}, but the model has no experts; set it to null"
        return
    if spec.moe.num_experts % layout.ep:
        yield (
            f"layout.ep: got {layout.ep}, which does not divide the model's {spec.moe.num_experts} experts; "
            f"use {nearest(layout.ep, divisors(spec.moe.num_experts))}"
        )
    if spec.moe.expert_ffn_size % layout.expert_tp:
        key = "tp" if layout.etp is None else "etp"
        yield (
            f"layout.{key}: got {layout.expert_tp}, which does not divide the {spec.moe.expert_ffn_size} columns of "
            f"an expert; use {nearest(layout.expert_tp, divisors(spec.moe.expert_ffn_size))}"
        )
    if layout.ep == 1 and layout.expert_tp != layout.tp:
        # megatron-core then sums gradients of experts over the wrong ranks
        yield (
            f"layout.etp: got {layout.expert_tp} with ep = 1 and tp = {layout.tp}; without expert parallelism "
            "experts are split as the rest: set layout.etp to null, or layout.ep above 1"
        )
    if layout.tp > 1 and not layout.sp:
        yield (
            f"layout.sp: got false with tp = {layout.tp}; megatron-core trains experts only on activations that "
            "are sharded between tp ranks: set layout.sp to true"
        )

"""Suggested layouts as rows of text with overrides to paste, and as plain JSON types."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from megatron_rl.estimate.memory_types import GIB
from megatron_rl.estimate.suggest import Suggestion, Suggestions
from megatron_rl.estimate.text import Row, seconds
from megatron_rl.recipe.schema import Recipe
from megatron_rl.recipe.stages import RlStage
from megatron_rl.recipe.transfer import is_colocated

_MATTERS = 0.002  # of the total: a smaller difference is no reason


def suggestion_rows(
    found: Suggestions, recipe: Recipe, *, own_s: float | None, own_gpus: int, fits: bool, num_gpus: int
) -> list[Row]:
    """The best layouts, what each loses to the first, where the recipe's own stands, and what memory ruled out.

    `own_gpus`: of the recipe as it is, which may have engines beside `num_gpus` of the trainer.
    """
    rows: list[Row] = [
        ("", ""),
        (
            "suggestions",
            f"{num_gpus} GPU{'s' * (num_gpus > 1)}: {found.num_considered} layouts that model and batches split by, "
            f"{found.num_fit} fit in memory; the fastest, as overrides",
        ),
    ]
    if not found.best:
        return rows + [_without_memory(suggestion, recipe) for suggestion in found.faster_without_memory]
    first = found.best[0]
    if own_s is not None:
        rows.append(("  recipe's own", _own(found, own_s, fits=fits, own_gpus=own_gpus, num_gpus=num_gpus)))
    for number, suggestion in enumerate(found.best, start=1):
        rows.append(
            (f"  {number}", f"{seconds(suggestion.total_s)}, {_memory(suggestion)}{_loss(suggestion, first)}")
        )
        rows.append(("", f"  {' '.join(overrides(suggestion, recipe))}"))
    rows += [_without_memory(suggestion, recipe) for suggestion in found.faster_without_memory]
    if first.engine is not None:
        rows.append(("  engines", _where(first)))
    return rows


def _own(found: Suggestions, own_s: float, *, fits: bool, own_gpus: int, num_gpus: int) -> str:
    own = f"{seconds(own_s)}, {own_s / found.best[0].total_s:.2f} x the first"
    if not fits:
        where = f" on {own_gpus} GPUs" if own_gpus != num_gpus else ""
        return f"does not fit; it would take {own}{where}"
    if own_gpus != num_gpus:
        return f"{own}, but on {own_gpus} GPUs: {num_gpus} of the trainer and those of its engines"
    place = found.place(own_s)
    return f"{own}, " + (
        f"place {place} of {found.num_fit}" if place <= found.num_fit else "behind all of these"
    )


def _where(first: Suggestion) -> str:
    if first.engine is not None and first.engine.own_gpus:
        return (
            f"on {first.engine.own_gpus} GPUs of their own: launch/slurm_multinode.sh --engine-nodes N fills "
            "engine.hosts"
        )
    return "on the trainer's GPUs, on every machine: launch/slurm_multinode.sh fills engine.hosts"


def overrides(suggestion: Suggestion, recipe: Recipe) -> list[str]:
    """What to append to a command: the layout, and what else differs from the recipe; first the processes, if fewer."""
    return list(_overrides(suggestion, recipe))


def _overrides(suggestion: Suggestion, recipe: Recipe) -> Iterator[str]:
    trainer, engine = suggestion.trainer, suggestion.engine
    layout = trainer.layout
    if engine is not None and engine.own_gpus:
        yield f"--world {layout.world_size}"
    yield f"layout.tp={layout.tp}"
    yield f"layout.pp={layout.pp}"
    yield f"layout.vpp={layout.vpp}"
    yield f"layout.sp={str(layout.sp).lower()}"
    if layout.ep != recipe.layout.ep:
        yield f"layout.ep={layout.ep}"
    if layout.etp != recipe.layout.etp:
        yield f"layout.etp={'null' if layout.etp is None else layout.etp}"
    for name in ("first_stage_layers", "last_stage_layers"):
        if getattr(recipe.layout, name) is not None:
            yield f"layout.{name}=null"
    if trainer.recompute != recipe.model.recompute:
        yield f"model.recompute={trainer.recompute}"
    for i, (stage, tokens) in enumerate(zip(recipe.stages, trainer.tokens, strict=True)):
        if tokens != stage.tokens_per_microbatch:
            yield f"stages.{i}.tokens_per_microbatch={tokens}"
        if isinstance(stage, RlStage) and engine is not None:
            yield from _placing(stage, f"stages.{i}.engine", own_gpus=engine.own_gpus > 0)
            wanted = {
                "tp": engine.tp,
                "replicas": engine.replicas,
                "gpu_memory_fraction": suggestion.memory_fraction,
            }
            for name, value in wanted.items():
                if value != getattr(stage.engine, name):
                    yield f"stages.{i}.engine.{name}={value:g}"


def _placing(stage: RlStage, path: str, *, own_gpus: bool) -> Iterator[str]:
    """Hosts are those of the recipe's own engines; without them it may have to be said where others are."""
    bare = replace(stage, engine=replace(stage.engine, hosts=(), secret_file=None))
    if stage.engine.hosts:
        yield f"{path}.hosts=[]"
    if stage.engine.secret_file is not None:
        yield f"{path}.secret_file=null"
    if is_colocated(bare) == own_gpus:
        if stage.engine.sleep:
            yield f"{path}.sleep=false"
        yield f"{path}.colocated={str(not own_gpus).lower()}"


def _memory(suggestion: Suggestion) -> str:
    text = f"trainer {suggestion.trainer_bytes / GIB:.0f} GiB at its peak"
    if suggestion.engine is None:
        return f"{text}, {suggestion.spare_bytes / GIB:.0f} GiB spare"
    share = f"{suggestion.memory_fraction:.0%} of a GPU for engines"
    return f"{text}, {share}" + (" of their own" if suggestion.engine.own_gpus else "")


def _loss(suggestion: Suggestion, first: Suggestion) -> str:
    """The phases in which it takes longer than the best one, the worst first."""
    if suggestion is first:
        return ""
    more = {
        name: spent - first.phases[name]
        for name, spent in suggestion.phases.items()
        if spent - first.phases[name] > _MATTERS * first.total_s
    }
    worst = sorted(more, key=lambda name: -more[name])[:2]
    reasons = ", ".join(f"{name} +{seconds(more[name])}" for name in worst)
    slower = suggestion.total_s / first.total_s - 1
    return f"; {slower:.1%} slower" + (f": {reasons}" if reasons else "")


def _without_memory(suggestion: Suggestion, recipe: Recipe) -> Row:
    missing = f"{-suggestion.spare_bytes / GIB:.0f} GiB short"
    where = f"trainer {suggestion.trainer_bytes / GIB:.0f} GiB in {suggestion.peak}"
    return ("  does not fit", f"{missing}, {where}: {' '.join(overrides(suggestion, recipe))}")


def suggestion_data(
    found: Suggestions, recipe: Recipe, *, own_s: float | None, own_gpus: int
) -> dict[str, Any]:
    """The same for programs."""

    def plain(suggestion: Suggestion) -> dict[str, Any]:
        return {
            "overrides": overrides(suggestion, recipe),
            "world_size": suggestion.trainer.layout.world_size,
            "engine_gpus": suggestion.engine.own_gpus if suggestion.engine else 0,
            "total_s": suggestion.total_s,
            "phases_s": suggestion.phases,
            "trainer_bytes": suggestion.trainer_bytes,
            "spare_bytes": suggestion.spare_bytes,
            "peak": suggestion.peak,
        }

    return {
        "own_total_s": own_s,
        "own_num_gpus": own_gpus,
        "num_considered": found.num_considered,
        "num_fit": found.num_fit,
        "best": [plain(suggestion) for suggestion in found.best],
        "faster_without_memory": [plain(suggestion) for suggestion in found.faster_without_memory],
    }

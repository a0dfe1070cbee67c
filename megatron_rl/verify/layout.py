"""`verify layout`: one process against each layout, on the user's model, data and algorithm."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path

from megatron_rl.arguments import write_problem
from megatron_rl.errors import MegatronRLError, RecipeError
from megatron_rl.model.spec import ModelSpec
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.recipe.load import LoadedRecipe, load_recipe
from megatron_rl.recipe.resolve import check_recipe, run_layout, smallest_world
from megatron_rl.recipe.stages import RlStage
from megatron_rl.train.launcher import held_port
from megatron_rl.verify.jobs import LayoutJob
from megatron_rl.verify.layouts import (
    DEFAULTS,
    EXPERT_DEFAULTS,
    GRADIENT_BOUND,
    GRADIENT_FLOOR,
    LOSS_BOUND,
    NORM_BOUND,
    Measurement,
    layout_config,
    layout_table,
    layout_text,
    parse_layout,
)
from megatron_rl.verify.place import deadline, open_place, say
from megatron_rl.verify.prepare import Prepared, prepare, write_recipe
from megatron_rl.verify.rank import start_ranks
from megatron_rl.verify.table import NOT_RUN, PROVEN, REFUTED, verdict


def verify_layout(args: argparse.Namespace) -> int:
    """The exit code. Raises MegatronRLError for what cannot be run."""
    if args.json is not None and (problem := write_problem(args.json)):
        raise MegatronRLError(f"--json {args.json}: {problem}")
    overrides = [*args.overrides, "model.dtype=float32"]
    layouts = _layouts(args, overrides)
    with deadline(args.timeout_s), open_place(args.keep) as place:
        say(f"{args.recipe}: 1 process against {', '.join(map(layout_text, layouts))}, in float32")
        prepared = prepare(args.recipe, overrides, place, shrink=args.shrink, layouts=layouts)
        prepared = write_recipe(replace(prepared.recipe, layout=layout_config(ParallelLayout())), place)
        _check(prepared, layouts)
        if code := _measure(prepared, layouts, timeout_s=args.timeout_s):
            # beyond 128: interrupted
            return code if code > 128 else NOT_RUN
        references, measured = read_measurements(place)
    return report(references, measured, json_file=args.json)


def _layouts(args: argparse.Namespace, overrides: Sequence[str]) -> list[ParallelLayout]:
    """Those asked for; else the recipe's own and the usual ones. By number of processes, none twice."""
    if args.layouts:
        found = [parse_layout(text) for text in args.layouts]
    else:
        recipe = load_recipe(args.recipe, overrides).recipe
        has_experts = ModelSpec.from_hf(recipe.model.hf_path).moe is not None
        found = [parse_layout(text) for text in (EXPERT_DEFAULTS if has_experts else DEFAULTS)]
        own = run_layout(recipe.layout, world_size=smallest_world(recipe))
        # a small model is not split as the large one is
        found = found if args.shrink or own.world_size == 1 else [own, *found]
    distinct = [layout for layout in dict.fromkeys(found) if layout.world_size > 1]
    if not distinct:
        raise MegatronRLError("--layouts: names one process only, which is what the others are compared with")
    return sorted(distinct, key=lambda layout: layout.world_size)


def _check(prepared: Prepared, layouts: Sequence[ParallelLayout]) -> None:
    """Raises RecipeError for a layout that the model or the batch does not divide by, or a loss that depends on it."""
    loaded = load_recipe(prepared.path)
    for index, stage in enumerate(loaded.recipe.stages):
        if isinstance(stage, RlStage) and stage.algorithm.normaliser == "micro_batch":
            raise RecipeError(
                f"stages.{index}.algorithm.normaliser: got micro_batch, whose loss depends on the layout by "
                "definition, so that there is nothing to prove; set it to step for this command"
            )
    for layout in layouts:
        # a layout's own line says which degree does not fit
        of_layout = replace(loaded.recipe, layout=layout_config(layout))
        with_source = LoadedRecipe(
            recipe=of_layout, source=f"--layouts {layout_text(layout)}", origins=loaded.origins, places={}
        )
        check_recipe(with_source, world_size=layout.world_size)


def _measure(prepared: Prepared, layouts: Sequence[ParallelLayout], *, timeout_s: float) -> int:
    """Start the ranks of each number of processes in turn; the first exit code that is not 0."""
    groups = [[ParallelLayout()], *(list(same) for _, same in groupby(layouts, lambda each: each.world_size))]
    for group in groups:
        nproc = group[0].world_size
        say(f"starting {nproc} process{'es' if nproc > 1 else ''}: {', '.join(map(layout_text, group))}")
        with held_port() as port:
            job = LayoutJob(
                recipe=str(prepared.path),
                layouts=tuple(group),
                place=str(prepared.place),
                port=port,
                timeout_s=timeout_s,
            )
            if code := start_ranks(job, nproc=nproc, place=prepared.place):
                return code
    return 0


def read_measurements(place: Path) -> tuple[list[Measurement], list[Measurement]]:
    """What the ranks left: of one process, and of all layouts, by number of processes."""
    files = sorted(place.glob("world_*.json"), key=lambda path: int(path.stem.partition("_")[2]))
    every = [Measurement.from_json(one) for path in files for one in json.loads(path.read_text())]
    references = [one for one in every if not one.gaps]
    return references, [one for one in every if one.gaps]


def report(
    references: Sequence[Measurement], measured: Sequence[Measurement], *, json_file: Path | None = None
) -> int:
    """Print the table and the verdict, and return the exit code."""
    print()
    print("\n".join(layout_table(references, measured)))
    print("\n".join(_notes(references)))
    faults = list(_faults(references, measured))
    layouts = len({one.layout for one in measured})
    tensors = len(measured[0].gaps)
    proven = f"{layouts} layouts compute what one process does, all {tensors} gradient tensors of each batch"
    print(verdict(faults, proven=proven))
    if json_file is not None:
        data = {"proven": not faults, "faults": faults}
        data |= {"references": list(map(asdict, references)), "layouts": list(map(asdict, measured))}
        json_file.write_text(json.dumps(data, indent=2) + "\n")
    return REFUTED if faults else PROVEN


def _notes(references: Sequence[Measurement]) -> Iterator[str]:
    for one in references:
        if one.shares is not None:
            high, low = one.shares
            yield f"rl: the upper clip acts on {high:.0%} of the tokens, the lower one on {low:.0%}"
    yield (
        f"float32; bounds: loss {LOSS_BOUND:g}, gradient norm {NORM_BOUND:g}, and {GRADIENT_BOUND:g} of the largest "
        f"element of each gradient tensor (at least {GRADIENT_FLOOR:g} of the model's); replicas bit-equal after a step"
    )


def _faults(references: Sequence[Measurement], measured: Sequence[Measurement]) -> Iterator[str]:
    by_part = {one.part: one for one in references}
    for one in measured:
        for fault in one.faults(by_part[one.part]):
            yield f"{one.layout}, {one.part}: {fault}"

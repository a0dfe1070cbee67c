"""What a run directory says, read back: the source of the summary and of the report."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from megatron_rl.errors import CheckpointError, DataError
from megatron_rl.evaluation.result import EvalResult
from megatron_rl.model.checkpoint_files import CHECKPOINTS_DIR
from megatron_rl.recipe.schema import Recipe
from megatron_rl.train.files import read_jsonl
from megatron_rl.train.progress import stage_length
from megatron_rl.train.records import EVAL_FILE, METRICS_FILE, RECIPE_FILE

Curve = list[tuple[float, float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalPoint:
    """An evaluation and the step it was made after."""

    step: int
    result: EvalResult


@dataclass(frozen=True, kw_only=True, slots=True)
class RunData:
    run_dir: Path
    lines: list[dict[str, Any]]  # of metrics.jsonl, by step
    evals: list[EvalPoint]  # in the order they were made; a repeated one only once
    recipe: str  # recipe.resolved.yaml as text

    def curve(self, name: str) -> Curve:
        """(step, value) wherever the metric has a finite value."""
        points = ((line["step"], line.get(name)) for line in self.lines)
        return [(float(step), float(value)) for step, value in points if isinstance(value, (int, float))]

    def stages(self) -> list[str]:
        """Stage names in order of appearance."""
        return list(dict.fromkeys(str(line["stage"]) for line in self.lines))

    def seconds_per_span(self) -> dict[str, float]:
        """Total seconds of each `time/NAME_s` over the run, largest first, without the iteration itself."""
        totals: dict[str, float] = {}
        for line in self.lines:
            for name, value in line.items():
                if name.startswith("time/") and name != "time/iteration_s" and value is not None:
                    totals[name[5:-2]] = totals.get(name[5:-2], 0.0) + float(value)
        return dict(sorted(totals.items(), key=lambda pair: -pair[1]))

    def eval_sets(self) -> dict[str, list[EvalPoint]]:
        """Evaluations by set name."""
        by_name: dict[str, list[EvalPoint]] = {}
        for point in self.evals:
            by_name.setdefault(point.result.name, []).append(point)
        return by_name


def read_run(run_dir: Path | str) -> RunData:
    """Raises DataError for a directory that is none of ours, or for a broken line in it."""
    run_dir = Path(run_dir)
    if not (run_dir / METRICS_FILE).exists():
        raise DataError(f"{run_dir}: no {METRICS_FILE} there; give the directory of a run that has begun")
    try:
        lines = sorted(read_jsonl(run_dir / METRICS_FILE), key=lambda line: line["step"])
        evals = _eval_points(read_jsonl(run_dir / EVAL_FILE))
    except (ValueError, KeyError, TypeError) as fault:
        raise DataError(f"{run_dir}: a record cannot be read ({type(fault).__name__}: {fault})") from None
    recipe_path = run_dir / RECIPE_FILE
    recipe = recipe_path.read_text("utf-8", "replace") if recipe_path.exists() else ""
    return RunData(run_dir=run_dir, lines=lines, evals=evals, recipe=recipe)


def check_never_saved(run_dir: Path, recipe: Recipe) -> None:
    """Raises CheckpointError where a run without checkpoint must have had one: it is not begun anew over its records.

    A save is published before the second one after it begins, and at the end of a stage.
    """
    if recipe.checkpoint is None:
        return
    last = max((int(line["step"]) for line in read_jsonl(run_dir / METRICS_FILE)), default=0)
    if last > min(2 * recipe.checkpoint.every_steps, stage_length(recipe.stages[0])):
        raise CheckpointError(
            f"{run_dir}: has {last} steps in {METRICS_FILE} but no checkpoint to resume from; put back what was in "
            f"{run_dir / CHECKPOINTS_DIR}, or start again in another directory"
        )


def _eval_points(lines: Iterable[dict[str, Any]]) -> list[EvalPoint]:
    """A resumed run repeats the evaluation it stopped after: the later one counts."""
    points: dict[tuple[str, str, int], EvalPoint] = {}
    for line in lines:
        result = EvalResult.from_json(line)
        points[line.get("stage", ""), result.name, result.iteration] = EvalPoint(
            step=line["step"], result=result
        )
    return sorted(points.values(), key=lambda point: point.step)


def smooth(values: list[float], num_points: int) -> list[float]:
    """Means over `num_points` equal stretches; the values themselves if there are no more than that."""
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) <= num_points:
        return finite
    edges = [index * len(finite) // num_points for index in range(num_points + 1)]
    return [sum(finite[a:b]) / (b - a) for a, b in pairwise(edges)]

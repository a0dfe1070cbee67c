"""What a run directory says, read back: the source of the summary and of the report."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from megatron_rl.errors import CheckpointError, DataError
from megatron_rl.evaluation.result import EvalResult
from megatron_rl.model.checkpoint_files import CHECKPOINTS_DIR
from megatron_rl.recipe.schema import Recipe
from megatron_rl.train.files import is_finite, read_jsonl, read_some_jsonl
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
    # of metrics.jsonl, by step: stage, iteration, step and the metrics that are finite numbers
    lines: list[dict[str, Any]]
    evals: list[EvalPoint]  # in the order they were made; a repeated one only once
    recipe: str  # recipe.resolved.yaml as text
    faults: list[str]  # each record that could not be read and is left out

    def curve(self, name: str) -> Curve:
        """(step, value) wherever the metric has a finite value."""
        return [(float(line["step"]), float(line[name])) for line in self.lines if name in line]

    def stages(self) -> list[str]:
        """Stage names in order of appearance."""
        return list(dict.fromkeys(str(line["stage"]) for line in self.lines))

    def seconds_per_span(self) -> dict[str, float]:
        """Total seconds of each `time/NAME_s` over the run, largest first, without the iteration itself."""
        totals: dict[str, float] = {}
        for line in self.lines:
            for name, value in line.items():
                if name.startswith("time/") and name != "time/iteration_s":
                    totals[name[5:-2]] = totals.get(name[5:-2], 0.0) + float(value)
        return dict(sorted(totals.items(), key=lambda pair: -pair[1]))

    def eval_sets(self) -> dict[str, list[EvalPoint]]:
        """Evaluations by set name."""
        by_name: dict[str, list[EvalPoint]] = {}
        for point in self.evals:
            by_name.setdefault(point.result.name, []).append(point)
        return by_name


def read_run(run_dir: Path | str) -> RunData:
    """What can be read of a run; `faults` says what cannot. Raises DataError for a directory that holds none."""
    run_dir = Path(run_dir)
    if not (run_dir / METRICS_FILE).exists():
        raise DataError(f"{run_dir}: no {METRICS_FILE} there; give the directory of a run that has begun")
    faults: list[str] = []
    lines = sorted(_metrics(run_dir / METRICS_FILE, faults), key=lambda line: float(line["step"]))
    evals = _eval_points(run_dir / EVAL_FILE, faults)
    recipe_path = run_dir / RECIPE_FILE
    recipe = recipe_path.read_text("utf-8", "replace") if recipe_path.exists() else ""
    return RunData(run_dir=run_dir, lines=lines, evals=evals, recipe=recipe, faults=faults)


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


def _metrics(path: Path, faults: list[str]) -> list[dict[str, Any]]:
    found, broken = read_some_jsonl(path)
    faults += broken
    lines = []
    for place, line in found:
        if not is_finite(line.get("step")) or not is_finite(line.get("iteration")) or "stage" not in line:
            faults.append(f"{place}: has no stage, or no number of step or iteration")
            continue
        finite = {name: value for name, value in line.items() if is_finite(value)}
        lines.append({**finite, "stage": str(line["stage"])})
    return lines


def _eval_points(path: Path, faults: list[str]) -> list[EvalPoint]:
    """A resumed run repeats the evaluation it stopped after: the later one counts."""
    found, broken = read_some_jsonl(path)
    faults += broken
    points: dict[tuple[str, str, int], EvalPoint] = {}
    for place, line in found:
        try:
            if not is_finite(step := line["step"]):
                raise ValueError("step is no number")
            point = EvalPoint(step=int(step), result=EvalResult.from_json(line))
        except (ValueError, KeyError, TypeError, AttributeError) as fault:
            faults.append(f"{place}: is no evaluation ({type(fault).__name__}: {fault})")
            continue
        points[str(line.get("stage", "")), point.result.name, point.result.iteration] = point
    return sorted(points.values(), key=lambda point: point.step)


def smooth(values: list[float], num_points: int) -> list[float]:
    """Means over `num_points` equal stretches; the values themselves if there are no more than that."""
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) <= num_points:
        return finite
    edges = [index * len(finite) // num_points for index in range(num_points + 1)]
    return [sum(finite[a:b]) / (b - a) for a, b in pairwise(edges)]

"""Run variants of one recipe with several seeds each, and write what they reached: table, curves, numbers.

An experiment is a YAML file: `recipe`, `common` overrides of every run, `measure` (a name of metrics.jsonl, read from
the last stage), and `arms`, a name and overrides for each. A run that is finished is not run again, one that was cut
short goes on with --resume, so the same command continues an interrupted experiment.
"""

from __future__ import annotations

import argparse
import html
import json
import math
import re
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from svg_chart import line_chart

from megatron_rl.arguments import positive_int
from megatron_rl.errors import MegatronRLError
from megatron_rl.recipe.load import load_recipe
from megatron_rl.recipe.yaml_text import parse_document
from megatron_rl.train.files import read_jsonl, to_json, write_atomically

DONE = "ablation.json"  # in a run directory: the numbers of a finished run
Curve = list[tuple[float, float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Experiment:
    """What to run. Paths start at the current directory, as in a recipe."""

    recipe: str
    measure: str
    arms: dict[str, list[str]]
    common: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """One variant: a curve for each seed, (step, value) with the steps of metrics.jsonl."""

    name: str
    overrides: Sequence[str]
    curves: Mapping[int, Curve]

    def ends(self) -> list[float]:
        """Last value of each seed."""
        return [curve[-1][1] for curve in self.curves.values()]

    def gains(self) -> list[float]:
        return [curve[-1][1] - curve[0][1] for curve in self.curves.values()]

    def mean_curve(self) -> Curve:
        """Mean over seeds at every step that all of them measured."""
        values = [dict(curve) for curve in self.curves.values()]
        steps = sorted(set.intersection(*(set(each) for each in values)))
        return [(step, statistics.fmean(each[step] for each in values)) for step in steps]


def load_experiment(path: Path) -> Experiment:
    """Raises MegatronRLError for a file that is none, and for what its recipe does not take."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise MegatronRLError(f"{path}: cannot be read: {error}") from None
    data = parse_document(text, source=str(path)).data
    experiment = _experiment(data, place=path)
    for name, overrides in experiment.arms.items():
        try:
            load_recipe(experiment.recipe, [*experiment.common, *overrides])
        except MegatronRLError as error:
            raise MegatronRLError(f"{path}: arms.{name}: {error}") from None
    return experiment


def _experiment(data: Any, *, place: Path) -> Experiment:
    keys = {
        "recipe": "a path",
        "measure": "a name of metrics.jsonl",
        "arms": "names with lists of path=value",
    }
    keys |= {"common": "a list of path=value"}
    if not isinstance(data, dict):
        raise MegatronRLError(f"{place}: must be a mapping with the keys {', '.join(keys)}")
    data = {"common": [], **data}
    for key in [*(data.keys() - keys.keys()), *keys]:
        if key not in keys or key not in data:
            raise MegatronRLError(
                f"{place}: {key}: {'missing' if key in keys else 'unknown'}, keys are {', '.join(keys)}"
            )
    arms, common = data["arms"], data["common"]
    fits = {
        "recipe": isinstance(data["recipe"], str),
        "measure": isinstance(data["measure"], str),
        "arms": isinstance(arms, dict) and bool(arms) and all(map(_is_overrides, arms.values())),
        "common": _is_overrides(common),
    }
    for key, is_right in fits.items():
        if not is_right:
            raise MegatronRLError(f"{place}: {key}: must be {keys[key]}")
    return Experiment(recipe=data["recipe"], measure=data["measure"], arms=arms, common=tuple(common))


def _is_overrides(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def run_all(
    experiment: Experiment, out: Path, *, seeds: Sequence[int], jobs: int, timeout_s: float
) -> list[Arm]:
    """Run what is not finished yet, `jobs` at a time. Raises MegatronRLError naming the log of a run that failed."""
    wanted = [(name, seed) for seed in seeds for name in experiment.arms]
    with ThreadPoolExecutor(max_workers=jobs) as threads:
        curves = list(
            threads.map(
                lambda one: _run(
                    experiment, out / f"{one[0]}-seed{one[1]}", one[0], seed=one[1], timeout_s=timeout_s
                ),
                wanted,
            )
        )
    found = dict(zip(wanted, curves, strict=True))
    return [
        Arm(name=name, overrides=overrides, curves={seed: found[name, seed] for seed in seeds})
        for name, overrides in experiment.arms.items()
    ]


def _run(experiment: Experiment, run_dir: Path, name: str, *, seed: int, timeout_s: float) -> Curve:
    overrides = [*experiment.common, *experiment.arms[name], f"run.seed={seed}"]
    asked = {"recipe": experiment.recipe, "overrides": overrides, "measure": experiment.measure}
    done = run_dir / DONE
    if done.is_file():
        kept = json.loads(done.read_text(encoding="utf-8"))
        if kept["asked"] != asked:
            raise MegatronRLError(
                f"{run_dir}: holds a run of {kept['asked']}, but {asked} is asked for; give another --out"
            )
        return [(float(step), float(value)) for step, value in kept["curve"]]
    # also before its first step a run leaves files
    resume = ["--resume"] * (run_dir.is_dir() and any(run_dir.iterdir()))
    command = [sys.executable, "-m", "megatron_rl", "train", experiment.recipe, "--run-dir", str(run_dir)]
    log = run_dir.with_name(f"{run_dir.name}.log")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as stream:
        try:
            code = subprocess.run(
                [*command, *resume, *overrides],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                timeout=timeout_s,
            ).returncode
        except subprocess.TimeoutExpired:
            raise MegatronRLError(f"{run_dir}: not finished after {timeout_s:g} s; see {log}") from None
    if code != 0:
        raise MegatronRLError(f"{run_dir}: ended with exit code {code}; see {log}")
    curve = measured(run_dir, experiment.measure)
    write_atomically(done, to_json({"asked": asked, "curve": curve}, indent=2))
    print(f"{run_dir.name}: {curve[0][1]:.4f} to {curve[-1][1]:.4f}", flush=True)
    return curve


def measured(run_dir: Path, name: str) -> Curve:
    """`name` over the steps of the run's last stage. Raises MegatronRLError where it was not measured twice."""
    lines = read_jsonl(run_dir / "metrics.jsonl")
    curve = [(float(line["step"]), float(line[name])) for line in lines if line.get(name) is not None]
    # an evaluation before the first iteration has no line of metrics of its own
    at_start = [
        line for line in read_jsonl(run_dir / "eval.jsonl")
        if line["iteration"] == 0 and name == f"eval/{line['set']}/avg_at_k"
    ]  # fmt: skip
    if at_start and curve:
        curve.insert(0, (0.0, float(at_start[-1]["avg_at_k"])))
    if len(curve) < 2:
        raise MegatronRLError(f"{run_dir}: {name} was measured {len(curve)} times, at least 2 are needed")
    return curve


def table(arms: Sequence[Arm], *, measure: str) -> str:
    """Markdown: per arm the ends of all seeds, their mean with standard error over seeds, and the mean gain."""
    seeds = list(arms[0].curves)
    head = ["arm", *(f"seed {seed}" for seed in seeds), "mean", "standard error", "gain"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for arm in arms:
        ends = arm.ends()
        error = statistics.stdev(ends) / math.sqrt(len(ends)) if len(ends) > 1 else math.nan
        numbers = [*ends, statistics.fmean(ends), error]
        cells = [f"{value:.3f}" for value in numbers] + [f"{statistics.fmean(arm.gains()):+.3f}"]
        lines.append(f"| {arm.name} | {' | '.join(cells)} |")
    return "\n".join([f"`{measure}` at the end:", "", *lines])


def write_results(out: Path, experiment: Experiment, arms: Sequence[Arm]) -> str:
    """Write results.json, table.md and curves.svg below `out`; the table."""
    text = table(arms, measure=experiment.measure)
    results: dict[str, Any] = {
        arm.name: {"overrides": list(arm.overrides), "curves": {str(s): c for s, c in arm.curves.items()}}
        for arm in arms
    }
    write_atomically(
        out / "results.json", to_json({"measure": experiment.measure, "arms": results}, indent=2)
    )
    write_atomically(out / "table.md", (text + "\n").encode())
    write_atomically(out / "curves.svg", picture({arm.name: arm.mean_curve() for arm in arms}).encode())
    return text


def picture(curves: Mapping[str, Curve]) -> str:
    """The curves as an SVG file of its own, names beneath in the colour of their line."""
    chart = line_chart(curves).partition("</svg>")[0]
    colours = re.findall(r'<polyline [^>]*stroke="(#\w+)"', chart)
    height = int(re.findall(r'height="(\d+)"', chart)[0])
    names = "".join(
        f'<text x="58" y="{height + 14 * (line + 1)}" fill="{colour}">{html.escape(name)}</text>'
        for line, (name, colour) in enumerate(zip(curves, colours, strict=True))
    )
    grown = height + 14 * len(curves) + 6
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 420 {grown}" width="420" height="{grown}" '
        'font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="white"/>'
    )
    return f"{head}{chart.partition('>')[2]}{names}</svg>\n"


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example:\n  ablate.py tools/ablations/surrogates.yaml --out runs/surrogates --seeds 1 2 3",
    )
    parser.add_argument("experiment", type=Path, metavar="EXPERIMENT", help="YAML file")
    parser.add_argument("--out", type=Path, required=True, help="directory of the runs and results")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="default: 1 2 3")
    parser.add_argument("--jobs", type=positive_int, default=1, help="runs at a time (default: 1)")
    parser.add_argument(
        "--timeout-s", type=float, default=3600.0, metavar="S", help="of one run (default: 3600)"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        experiment = load_experiment(args.experiment)
        arms = run_all(experiment, args.out, seeds=args.seeds, jobs=args.jobs, timeout_s=args.timeout_s)
        print(write_results(args.out, experiment, arms))
    except (MegatronRLError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

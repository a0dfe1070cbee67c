"""Who can do what when: the share of right answers by difficulty and step, from rollouts and evaluations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.report.evaluations import set_names
from megatron_rl.report.figures import Card, plain
from megatron_rl.report.series import rounded, spread
from megatron_rl.report.source import Source
from megatron_rl.train.files import is_finite, read_some_jsonl

_MAX_FILES = 60  # of rollouts, of each run
_MAX_BYTES = 4 * 2**20  # read of each
_MAX_EVALS = 60
_MAX_BANDS = 10
_MAX_RUNS = 4  # a map each


def difficulty_cards(sources: Sequence[Source]) -> list[Card]:
    """Maps of the rollouts of each run and of each evaluated set."""
    cards = []
    for source in sources[:_MAX_RUNS]:
        of_run = "" if len(sources) == 1 else f", {plain(source.name)}"
        trained = _of_rollouts(source.run.run_dir / "rollouts")
        if trained is not None:
            cards.append(_card(f"Rollouts by difficulty{of_run}", trained, x="iteration"))
        for name in set_names([source]):
            evaluated = _of_evaluations(source, name)
            if evaluated is not None:
                cards.append(_card(f"{plain(name)} by difficulty{of_run}", evaluated, x="step"))
    return cards


Cells = dict[tuple[int, float], list[float]]  # column and difficulty: right, all


def _of_rollouts(folder: Path) -> tuple[list[float], Cells] | None:
    files = rollout_files(folder)
    chosen = [files[index] for index in spread(len(files), _MAX_FILES)]
    cells: Cells = {}
    for column, (_, path) in enumerate(chosen):
        for line in read_some(path, _MAX_BYTES)[0]:
            if is_finite(line.get("difficulty")):
                cell = cells.setdefault((column, float(line["difficulty"])), [0.0, 0.0])
                cell[0] += line.get("verdict") == "correct"
                cell[1] += 1
    return ([float(number) for number, _ in chosen], cells) if cells else None


def _of_evaluations(source: Source, name: str) -> tuple[list[float], Cells] | None:
    every = source.run.eval_sets().get(name, [])
    chosen = [every[index] for index in spread(len(every), _MAX_EVALS)]
    cells: Cells = {}
    for column, point in enumerate(chosen):
        for problem in point.result.problems:
            if problem.difficulty is not None:
                cell = cells.setdefault((column, float(problem.difficulty)), [0.0, 0.0])
                cell[0] += problem.num_correct
                cell[1] += problem.num_samples
    return ([float(max(0, point.step)) for point in chosen], cells) if cells else None


def _card(title: str, found: tuple[list[float], Cells], *, x: str) -> Card:
    columns, cells = found
    bands = difficulty_bands({difficulty for _, difficulty in cells})
    labels = list(dict.fromkeys(bands.values()))
    right = [[0.0] * len(columns) for _ in labels]
    count = [[0.0] * len(columns) for _ in labels]
    for (column, difficulty), (num_right, num) in cells.items():
        row = labels.index(bands[difficulty])
        right[row][column] += num_right
        count[row][column] += num
    shares = [
        [rounded(r / n, 4) if n else None for r, n in zip(rights, counts, strict=True)]
        for rights, counts in zip(right, count, strict=True)
    ]
    # each column is named, not placed: evaluations and iterations that were kept are not evenly apart
    trace = {
        "type": "heatmap",
        "x": [f"{column:g}" for column in columns],
        "y": labels,
        "z": shares,
        "customdata": count,
        "zmin": 0,
        "zmax": 1,
        "colorscale": "Cividis",
        "xgap": 1,
        "ygap": 1,
        "hoverongaps": False,
        "colorbar": {"tickformat": ".0%", "thickness": 10, "outlinewidth": 0},
        "hovertemplate": f"{x} %{{x}}, difficulty %{{y}}<br>%{{z:.1%}} right of %{{customdata}}<extra></extra>",
    }
    layout = {
        "xaxis": {"title": {"text": x}, "type": "category", "nticks": 12},
        "yaxis": {
            "title": {"text": "difficulty (larger is harder)"},
            "type": "category",
            "automargin": True,
        },
        "hovermode": "closest",
    }
    note = "share of right answers; empty where no such problem was drawn"
    return Card(title=title, note=note, figure={"data": [trace], "layout": layout})


def difficulty_bands(levels: set[float], most: int = _MAX_BANDS) -> Mapping[float, str]:
    """The band of each difficulty: itself, or beyond `most` levels one of as many equal shares of them."""
    ordered = sorted(levels)
    number = min(most, len(ordered))
    found: dict[float, str] = {}
    for index in range(number):
        inside = ordered[index * len(ordered) // number : (index + 1) * len(ordered) // number]
        label = f"{inside[0]:g}" if len(inside) == 1 else f"{inside[0]:g} to {inside[-1]:g}"
        found |= dict.fromkeys(inside, label)
    return found


def rollout_files(folder: Path, prefix: str = "iter_") -> list[tuple[int, Path]]:
    """Iteration and file of each `PREFIX000012.jsonl`, in order."""
    files = folder.glob(f"{prefix}*.jsonl") if folder.is_dir() else ()
    numbers = ((path.stem.removeprefix(prefix), path) for path in files)
    return sorted((int(number), path) for number, path in numbers if number.isdecimal())


def read_some(path: Path, max_bytes: int) -> tuple[list[dict[str, Any]], list[str]]:
    """Objects of whole lines among the first `max_bytes`, and what is wrong with other lines or the file."""
    try:
        found, faults = read_some_jsonl(path, max_bytes=max_bytes)
    except OSError as error:
        return [], [f"{path}: cannot be read ({error.strerror or error})"]
    return [line for _, line in found], faults

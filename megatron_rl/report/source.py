"""What a report shows of each run: its records, by the name that tells it from the others."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from megatron_rl.recipe.read_resolved import Setting, read_resolved
from megatron_rl.report.windows import window_starts
from megatron_rl.train.files import read_jsonl
from megatron_rl.train.records import PARITY_FILE, STARTS_FILE
from megatron_rl.train.run_data import RunData, read_run


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """Something that happened at a step: `kind` is stage, window, resume, restart or promotion."""

    step: float
    kind: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One run of a report."""

    name: str
    run: RunData
    settings: list[Setting]  # of the resolved recipe, in its order
    syncs: list[dict[str, Any]]  # of parity.json
    marks: list[Mark]


def read_sources(run_dirs: Sequence[Path]) -> list[Source]:
    """The runs in the order given. Raises DataError for a directory that holds none, or a record that is broken."""
    return [_read(Path(run_dir), name) for run_dir, name in zip(run_dirs, short_names(run_dirs), strict=True)]


def short_names(run_dirs: Sequence[Path]) -> list[str]:
    """Of each directory as few last parts of its path as tell it from the others; equal paths are numbered."""
    paths = [Path(run_dir).resolve() for run_dir in run_dirs]
    names = []
    for index, path in enumerate(paths):
        others = [other for number, other in enumerate(paths) if number != index and other != path]
        length = 1
        while length < len(path.parts) and any(
            other.parts[-length:] == path.parts[-length:] for other in others
        ):
            length += 1
        again = paths[:index].count(path)
        names.append("/".join(path.parts[-length:]) + (f" ({again + 1})" if again else ""))
    return names


def _read(run_dir: Path, name: str) -> Source:
    run = read_run(run_dir)
    settings = read_resolved(run.recipe)
    windows = [Mark(step=step, kind="window", text=text) for step, text in window_starts(settings, run.lines)]
    return Source(
        name=name,
        run=run,
        settings=settings,
        syncs=_syncs(run_dir / PARITY_FILE),
        marks=sorted([*_marks(run), *windows], key=lambda mark: mark.step),
    )


def _syncs(path: Path) -> list[dict[str, Any]]:
    """Transfers with the gaps that were measured; nothing for a file that an older or another program wrote."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return []
    entries = found if isinstance(found, list) else []
    return [entry for entry in entries if isinstance(entry, dict) and is_number(entry.get("step"))]


def _marks(run: RunData) -> Iterator[Mark]:
    for before, line in pairwise(run.lines):
        if before["stage"] != line["stage"]:
            yield Mark(step=float(line["step"]), kind="stage", text=str(line["stage"]))
        for name in ("engine/restarts", "reward/worker_restarts"):
            # counted since a stage began or was taken up
            count = line.get(name) or 0
            known = (before.get(name) or 0) if before["stage"] == line["stage"] else 0
            if is_number(count) and is_number(known) and count > known:
                yield Mark(
                    step=float(line["step"]), kind="restart", text=f"{name.replace('_', ' ')}: {count:g}"
                )
    for line in run.lines:
        if line.get("curriculum/promoted") == 1:
            window = line.get("curriculum/window") or 0
            yield Mark(step=float(line["step"]), kind="promotion", text=f"window {window:g} ends early")
    for start in read_jsonl(run.run_dir / STARTS_FILE):
        if is_number(start.get("step")):
            yield Mark(
                step=float(start["step"]), kind="resume", text=f"resumed {start.get('time', '')}".strip()
            )


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)

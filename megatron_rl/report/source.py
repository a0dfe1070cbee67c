"""What a report shows of each run: its records, by the name that tells it from the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from megatron_rl.errors import MegatronRLError, kept_in, raise_together
from megatron_rl.recipe.read_resolved import Setting, read_resolved
from megatron_rl.report.windows import window_starts
from megatron_rl.train.files import is_finite, parse_json, read_some_jsonl
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
    faults: list[str]  # records that could not be read and are left out


def read_sources(run_dirs: Sequence[Path]) -> list[Source]:
    """The runs in the order given. Raises MegatronRLError naming every directory that holds none."""
    errors: list[MegatronRLError] = []
    sources = []
    for run_dir, name in zip(run_dirs, short_names(run_dirs), strict=True):
        with kept_in(errors):
            sources.append(_read(Path(run_dir), name))
    raise_together(errors)
    return sources


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
    syncs, of_syncs = _syncs(run_dir / PARITY_FILE)
    starts, of_starts = read_some_jsonl(run_dir / STARTS_FILE)
    windows = [Mark(step=step, kind="window", text=text) for step, text in window_starts(settings, run.lines)]
    marks = [*_marks(run), *windows, *_resumes([start for _, start in starts])]
    return Source(
        name=name,
        run=run,
        settings=settings,
        syncs=syncs,
        marks=sorted(marks, key=lambda mark: mark.step),
        faults=[*run.faults, *of_syncs, *of_starts],
    )


def _syncs(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Transfers with the gaps that were measured, and what is wrong with the file."""
    if not path.exists():
        return [], []
    try:
        found = parse_json(path.read_bytes())
    except ValueError as error:
        return [], [f"{path}: cannot be read ({error})"]
    entries = found if isinstance(found, list) else []
    kept = [entry for entry in entries if isinstance(entry, dict) and is_finite(entry.get("step"))]
    num_left_out = len(entries) - len(kept)
    return kept, [f"{path}: {num_left_out} entries have no number of step"] if num_left_out else []


def _resumes(starts: Sequence[dict[str, Any]]) -> Iterator[Mark]:
    for start in starts:
        if is_finite(start.get("step")):
            text = f"resumed {start.get('time', '')}".strip()
            yield Mark(step=float(start["step"]), kind="resume", text=text)


def _marks(run: RunData) -> Iterator[Mark]:
    for before, line in pairwise(run.lines):
        if before["stage"] != line["stage"]:
            yield Mark(step=float(line["step"]), kind="stage", text=str(line["stage"]))
        for name in ("engine/restarts", "reward/worker_restarts"):
            # counted since a stage began or was taken up
            count = line.get(name) or 0
            known = (before.get(name) or 0) if before["stage"] == line["stage"] else 0
            if count > known:
                yield Mark(
                    step=float(line["step"]), kind="restart", text=f"{name.replace('_', ' ')}: {count:g}"
                )
    for line in run.lines:
        if line.get("curriculum/promoted") == 1:
            window = line.get("curriculum/window") or 0
            yield Mark(step=float(line["step"]), kind="promotion", text=f"window {window:g} ends early")

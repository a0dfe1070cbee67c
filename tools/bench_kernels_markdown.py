"""Tables in Markdown from files of tools/bench_kernels.py, one per file: one line per contender, both phases in it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

HEAD = (
    "op, shape",
    "contender",
    "forward",
    "forward + backward",
    "x torch eager",
    "floor",
    "extra MiB",
    "largest error",
)
EAGER = "torch eager"

Rows = Mapping[tuple[str, str], Mapping[str, Any]]  # (contender, phase) -> row


def tables(data: Mapping[str, Any]) -> Iterator[str]:
    about = data["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    rates = "; ".join(
        f"{dtype} product {one['flops_per_s'] / 1e12:.3g} TFLOP/s, copy {one['bytes_per_s'] / 1e9:.3g} GB/s"
        for dtype, one in about["ceilings"].items()
    )
    yield f"{about['processor']}, {about['threads']} thread(s), {versions}, {about['date']}. In the same run: {rates}."
    yield ""
    yield f"| {' | '.join(HEAD)} |"
    yield "|" + "---|" * len(HEAD)
    for case, rows in _cases(data["rows"]).items():
        contenders = dict.fromkeys(contender for contender, _ in rows)
        for contender in contenders:
            line = _line(rows, contender)
            if line is not None:
                yield f"| {case} | {contender} | {' | '.join(line)} |"


def _cases(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[tuple[str, str], Mapping[str, Any]]]:
    found: dict[str, dict[tuple[str, str], Mapping[str, Any]]] = {}
    for row in rows:
        name = f"{row['op']}{' ' + row['variant'] if row['variant'] else ''}, {row['shape']} {row['dtype']}"
        found.setdefault(name, {})[row["contender"], row["phase"]] = row
    return found


def _line(rows: Rows, contender: str) -> list[str] | None:
    """Cells of a contender; None where it did not run."""
    forward, both = rows.get((contender, "forward")), rows.get((contender, "both"))
    if forward is None:
        return None
    last = both or forward
    eager = rows.get((EAGER, last["phase"]))
    ratio = "-" if eager is None else f"{last['seconds']['median'] / eager['seconds']['median']:.2f}"
    if last["is_ours"] and not last["tested"]:
        ratio += " (not tested)"
    error = max(last["errors"].values(), default=None)
    return [
        _time(forward),
        "-" if both is None else _time(both),
        ratio,
        f"{last['floor_share']:.0%}",
        f"{last['peak_mib']:.0f}",
        "-" if error is None else f"{error:.1e}",
    ]


def _time(row: Mapping[str, Any]) -> str:
    seconds = row["seconds"]
    scale, unit = (1.0, "s") if seconds["median"] >= 1 else (1e3, "ms")
    spread = f" ({seconds['p10'] * scale:.3g} to {seconds['p90'] * scale:.3g})" if row["rounds"] > 1 else ""
    return f"{seconds['median'] * scale:.3g} {unit}{spread}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", type=Path, nargs="+", help="written by bench_kernels.py --json")
    for path in parser.parse_args(argv).files:
        print(*tables(json.loads(path.read_text(encoding="utf-8"))), "", sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

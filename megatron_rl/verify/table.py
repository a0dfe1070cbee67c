"""Tables and verdicts as text."""

from __future__ import annotations

from collections.abc import Sequence

PROVEN, REFUTED, NOT_RUN = 0, 1, 2  # exit codes


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with their columns aligned, two spaces apart; the first row is the heading."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def cut(lines: Sequence[str], *, limit: int) -> list[str]:
    """At most `limit` lines: the first and the last ones, and how many were left out between them."""
    if len(lines) <= limit:
        return list(lines)
    head = limit // 2
    tail = limit - 1 - head
    return [*lines[:head], f"  ... {len(lines) - head - tail} lines more ...", *lines[len(lines) - tail :]]


def verdict(faults: Sequence[str], *, proven: str) -> str:
    """`verdict: proven ...`, or `verdict: refuted` with one line per fault."""
    if not faults:
        return f"verdict: proven: {proven}"
    return "\n".join(["verdict: refuted", *(f"  {fault}" for fault in faults)])

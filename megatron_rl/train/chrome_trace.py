"""Lanes of spans as a Chrome trace: JSON that Perfetto (ui.perfetto.dev) and chrome://tracing open."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_rl.platform.spans import Span

# the processes of the trace: its lanes are their threads
TRAINER, ENGINES = 0, 1
_IDLE_NS = 1_000_000  # a shorter gap is no idleness


@dataclass(frozen=True, kw_only=True, slots=True)
class Lane:
    """One trainer rank or one engine replica; times are of rank 0's clock, right within `error_ns`."""

    process: int  # TRAINER or ENGINES
    number: int
    name: str  # with host and process
    spans: Sequence[Span]
    error_ns: int = 0
    # from when to when it was looked at: gaps are idleness; None: a gap says nothing
    watched_ns: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """What is written: `about` goes with it as it is."""

    lanes: Sequence[Lane]
    about: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """In microseconds since the first span."""
        spans = [(lane, span) for lane in self.lanes for span in with_idle(lane)]
        zero = min((span.start_ns for _, span in spans), default=0)
        clocks = {lane.name: lane.error_ns / 1000 for lane in self.lanes}
        return {
            "traceEvents": [*self._names(), *(_event(lane, span, zero) for lane, span in spans)],
            "displayTimeUnit": "ms",
            "otherData": {**self.about, "clock_error_us": clocks},
        }

    def _names(self) -> Iterator[dict[str, Any]]:
        for process, name in ((TRAINER, "trainer"), (ENGINES, "engines")):
            if any(lane.process == process for lane in self.lanes):
                yield _meta("process_name", process, 0, name=name)
                yield _meta("process_sort_index", process, 0, sort_index=process)
        for lane in self.lanes:
            yield _meta("thread_name", lane.process, lane.number, name=lane.name)
            yield _meta("thread_sort_index", lane.process, lane.number, sort_index=lane.number)

    def write(self, path: Path) -> None:
        """Gzipped JSON. Raises OSError where it cannot be written."""
        content = gzip.compress(json.dumps(self.to_json(), separators=(",", ":")).encode(), mtime=0)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def with_idle(lane: Lane) -> list[Span]:
    """By when they began, the outer first, with `idle` where a watched lane has none."""
    spans = sorted(lane.spans, key=lambda span: (span.start_ns, -span.end_ns))
    if lane.watched_ns is None:
        return spans
    filled, (since, until) = [], lane.watched_ns
    for span in spans:
        if span.start_ns - since > _IDLE_NS:
            filled.append(Span("idle", since, span.start_ns))
        filled.append(span)
        since = max(since, span.end_ns)
    if until - since > _IDLE_NS:
        filled.append(Span("idle", since, until))
    return filled


def _event(lane: Lane, span: Span, zero: int) -> dict[str, Any]:
    event = {
        "name": span.name,
        "ph": "X",
        "pid": lane.process,
        "tid": lane.number,
        "ts": (span.start_ns - zero) / 1000,
        "dur": (span.end_ns - span.start_ns) / 1000,
    }
    return {**event, "args": dict(span.args)} if span.args else event


def _meta(what: str, process: int, thread: int, **args: Any) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": args}

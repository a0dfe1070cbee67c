"""A Chrome trace as its viewer understands it: lanes of events that nest."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ROUNDING_US = 0.01


@dataclass(frozen=True, slots=True)
class Event:
    name: str
    start: float  # microseconds
    end: float
    inside: tuple[str, ...]  # names of the events around it, the outermost first
    args: Mapping[str, Any]


def read_trace(path: Path) -> dict[str, list[Event]]:
    """Lanes by name. Fails where a lane has no name or two, or where events overlap without one being in the other."""
    with gzip.open(path) as stream:
        return lanes_of(json.load(stream))


def lanes_of(trace: Mapping[str, Any]) -> dict[str, list[Event]]:
    events = trace["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert len(set(names.values())) == len(names) == sum(e["name"] == "thread_name" for e in events)
    assert {e["ph"] for e in events} <= {"M", "X"}
    lanes: dict[str, list[Event]] = {name: [] for name in names.values()}
    for lane, name in names.items():
        around: list[Event] = []
        mine = [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == lane]
        for e in sorted(mine, key=lambda e: (e["ts"], -e["dur"])):
            start, end = e["ts"], e["ts"] + e["dur"]
            while around and around[-1].end <= start + _ROUNDING_US:
                around.pop()
            assert not around or end <= around[-1].end + _ROUNDING_US, (name, e, around[-1])
            event = Event(e["name"], start, end, tuple(o.name for o in around), e.get("args", {}))
            lanes[name].append(event)
            around.append(event)
    assert sum(map(len, lanes.values())) == sum(e["ph"] == "X" for e in events)
    return lanes

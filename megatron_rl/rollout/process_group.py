"""The processes of one group as /proc shows them; nothing where there is no /proc."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

_PROC = Path("/proc")
_STOPPED = "T"


def members(group: int) -> Iterator[Path]:
    """The directory in /proc of each process of process group `group`."""
    for process in _PROC.glob("[0-9]*"):
        # processes end while we look
        with contextlib.suppress(OSError):
            if _fields(process)[2] == str(group):
                yield process


def stopped_members(group: int) -> list[int]:
    """Process ids of those that a signal (SIGSTOP) has stopped."""
    return sorted(int(process.name) for process in members(group) if is_stopped(int(process.name)))


def is_stopped(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return _fields(_PROC / str(pid))[0] == _STOPPED
    return False


def _fields(process: Path) -> list[str]:
    """State, parent, group and what follows: the name before stands in parentheses and may hold anything."""
    return (process / "stat").read_text().rpartition(")")[2].split()

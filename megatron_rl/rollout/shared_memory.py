"""Shared memory that engine processes leave in /dev/shm: found while they live, removed when they end.

vLLM's CPU workers never remove theirs, and killed ones cannot.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

_PROC, _SHM = Path("/proc"), "/dev/shm/"


def shared_memory_of_group(group: int) -> set[Path]:
    """Files in /dev/shm that processes of process group `group` have mapped; nothing where there is no /proc."""
    found = set()
    for process in _PROC.glob("[0-9]*"):
        # processes end while we look
        with contextlib.suppress(OSError):
            if _group_of(process) == group:
                found |= _mapped_files(process)
    return found


def remove_shared_memory(files: Iterable[Path]) -> None:
    """Remove what is still there; processes that have it mapped keep their memory."""
    for file in files:
        with contextlib.suppress(OSError):
            file.unlink()


def _group_of(process: Path) -> int:
    # the name stands in parentheses and may hold anything; then come state, parent and group
    return int((process / "stat").read_text().rpartition(")")[2].split()[2])


def _mapped_files(process: Path) -> set[Path]:
    files = set()
    for line in (process / "maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith(_SHM) and not fields[5].endswith(" (deleted)"):
            files.add(Path(fields[5]))
    return files

"""Processes as /proc shows them, for whoever has to leave none behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Collection

_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_LIBC = ctypes.CDLL(None, use_errno=True)
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def become_subreaper() -> None:
    """Orphans among our descendants become our children, so that we can reap them. Raises OSError."""
    if _LIBC.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def die_with_parent() -> None:
    """In a child between fork and exec: it gets SIGKILL when the thread that started it ends."""
    _LIBC.prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def children() -> set[int]:
    """Process ids of our own children, adopted ones and zombies included."""
    found: set[int] = set()
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/children", "rb") as stream:
            found.update(map(int, stream.read().split()))
    return found


def processes_of(uids: Collection[int]) -> dict[int, int]:
    """Process id to uid of every process of these uids, zombies included."""
    found = {}
    with os.scandir("/proc") as entries:
        for entry in entries:
            if entry.name.isdigit():
                # they end while we look
                with contextlib.suppress(OSError):
                    uid = entry.stat().st_uid
                    if uid in uids:
                        found[int(entry.name)] = uid
    return found


def tree_usage(pid: int) -> tuple[int, int]:
    """(processes, bytes of memory that they do not share with files) of a process and all below it."""
    count = memory = 0
    open_pids = [pid]
    while open_pids:
        pid = open_pids.pop()
        with contextlib.suppress(OSError, ValueError):
            with open(f"/proc/{pid}/statm", "rb") as stream:
                _, resident, shared, *_ = map(int, stream.read().split())
            count += 1
            memory += (resident - shared) * _PAGE_BYTES
            for thread in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{thread}/children", "rb") as stream:
                    open_pids += map(int, stream.read().split())
    return count, memory


def is_sandbox(pid: int, bubblewrap: str) -> bool:
    """Whether it is a bubblewrap that a supervisor started, and not yet the program inside."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as stream:
        words = stream.read().split(b"\0")
        return words[0] == bubblewrap.encode() and b"--json-status-fd" in words
    return False


def exists(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)

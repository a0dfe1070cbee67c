"""Shared memory that engine processes leave in /dev/shm: found while they live, removed when they end.

vLLM's CPU workers never remove theirs, and killed ones cannot.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from megatron_rl.rollout.process_group import members

SHM = Path("/dev/shm")


def shared_memory_of_group(group: int) -> set[Path]:
    """Files in /dev/shm that processes of process group `group` have mapped; nothing where there is no /proc."""
    inodes: set[int] = set()
    for process in members(group):
        # processes end while we look
        with contextlib.suppress(OSError):
            inodes.update(_mapped_inodes(process))
    return {file for file in SHM.glob("*") if _inode(file) in inodes}


def remove_shared_memory(files: Iterable[Path]) -> None:
    """Remove what is still there; processes that have it mapped keep their memory."""
    for file in files:
        with contextlib.suppress(OSError):
            file.unlink()


def _mapped_inodes(process: Path) -> Iterator[int]:
    for line in (process / "maps").read_text().splitlines():
        # address, permissions, offset, device, inode, path. The path may be an earlier name of the file: whoever makes
        # a semaphore maps it before it gets its own
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith(f"{SHM}/"):
            yield int(fields[4])


def _inode(file: Path) -> int | None:
    try:
        return file.stat().st_ino
    except OSError:
        return None

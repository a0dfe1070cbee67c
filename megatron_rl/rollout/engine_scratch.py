"""The directory for temporary files of one engine process, and what is left of those that nobody ended in order.

Where trainer and engine are killed at once, neither cleans up: the next engine that starts on the machine does.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from megatron_rl.rollout.shared_memory import SHM, remove_shared_memory

_PREFIX = "megatron_rl_engine_"
_LOCK, _SHARED = "owner", "shared_memory"  # files in it: locked as long as the owner lives; names in /dev/shm


class EngineScratch:
    """Held by the owner of the engine, with whose end, however that comes, the lock on it ends."""

    def __init__(self) -> None:
        remove_abandoned()
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        unlocked = self.path / f".{_LOCK}"
        self._lock = unlocked.open("w", encoding="utf-8")
        # a file system without locks: nobody takes it for abandoned
        with suppress(OSError):
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            unlocked.rename(self.path / _LOCK)

    def note_shared_memory(self, files: Iterable[Path]) -> None:
        """Files in /dev/shm that go with the engine."""
        (self.path / _SHARED).write_text("".join(f"{file.name}\n" for file in files), encoding="utf-8")

    def remove(self) -> None:
        """Safe to call twice."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def remove_abandoned() -> None:
    """Remove the directories of this user whose owner is gone, and the shared memory that they name."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        # in use, or removed by somebody else meanwhile
        with suppress(OSError):
            if path.stat().st_uid == os.getuid():
                _remove_if_abandoned(path)


def _remove_if_abandoned(path: Path) -> None:
    with (path / _LOCK).open("r+", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if (path / _SHARED).is_file():
            names = (path / _SHARED).read_text(encoding="utf-8").split("\n")
            remove_shared_memory(SHM / Path(name).name for name in names if name)
        shutil.rmtree(path)

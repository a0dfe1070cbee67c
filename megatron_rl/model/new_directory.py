"""A directory that appears under its name only when everything in it is complete and on the disk."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

from megatron_rl.errors import ModelError


class NewDirectory:
    """`path` is written beside it, as the hidden directory `partial`, until `publish` renames that."""

    def __init__(self, path: Path) -> None:
        """Raises ModelError when `path` holds anything, OSError when nothing can be written beside it."""
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise ModelError(f"{path}: exists already; choose another directory or remove it")
        self.path = path
        self.partial = path.parent / f".{path.name}.partial"
        # of a process that was killed
        shutil.rmtree(self.partial, ignore_errors=True)
        self.partial.mkdir(parents=True)

    def publish(self) -> None:
        for path in sorted(self.partial.rglob("*")):
            sync(path)
        sync(self.partial)
        # replaces an empty directory too
        self.partial.rename(self.path)
        sync(self.path.parent)

    def discard(self) -> None:
        with suppress(OSError):
            shutil.rmtree(self.partial)


def sync(path: Path) -> None:
    """Wait until a file's bytes, or a directory's entries, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

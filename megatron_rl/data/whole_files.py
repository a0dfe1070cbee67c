"""Several files that appear when all of them are complete."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import IO


class WholeFiles:
    """Files of `out` under temporary names; `keep` gives them their own, one after the other at the end.

    Each is whole or as it was. Only a kill within `keep` can leave old and new ones side by side.
    """

    def __init__(self, out: Path) -> None:
        self._out = out
        # what a process that was killed had not finished
        for path in out.glob(".*.tmp"):
            path.unlink(missing_ok=True)
        self._names: list[str] = []

    def path(self, name: str) -> Path:
        return self._out / f".{name}.{os.getpid()}.tmp"

    def open(self, name: str) -> IO[str]:
        self._names.append(name)
        return self.path(name).open("w", encoding="utf-8", errors="backslashreplace", newline="\n")

    def text(self, name: str, content: str) -> None:
        with self.open(name) as stream:
            stream.write(content)

    def keep(self, *discarded: str) -> None:
        for name in self._names:
            if name not in discarded:
                self.path(name).replace(self._out / name)

    def discard(self) -> None:
        for name in self._names:
            self.path(name).unlink(missing_ok=True)
        # a directory that nothing was written to
        with suppress(OSError):
            self._out.rmdir()

"""A run without bubblewrap, for programs that somebody vouches for: an unprivileged uid and rlimits, nothing else.

It sees the host's files, processes and network as that uid does. Needs root: without a uid of its own a program
could end everything of ours.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_rl.rewards.sandbox.bubblewrap import BOX, PYTHON_FLAGS
from megatron_rl.rewards.sandbox.interpreter import Interpreter


class PlainFolder:
    """The files of one run, which would stand in a sandbox's /box, and its work folder."""

    def __init__(self, files: Mapping[str, bytes], uid: int) -> None:
        self._root = Path(tempfile.mkdtemp(prefix="megatron_rl_plain_"))
        self._root.chmod(0o755)
        for path, content in files.items():
            if path.startswith(BOX):
                place = Path(self._inside(path))
                place.write_bytes(content)
                place.chmod(0o644)
        self.work = self._root / "work"
        self.work.mkdir(mode=0o700)
        os.chown(self.work, uid, uid)

    def command(self, interpreter: Interpreter, arguments: Sequence[str]) -> list[str]:
        return [interpreter.program, *PYTHON_FLAGS, *map(self._inside, arguments)]

    def remove(self) -> None:
        """Also what the program made there. Safe to call twice."""
        shutil.rmtree(self._root, ignore_errors=True)

    def _inside(self, argument: str) -> str:
        return argument.replace(BOX, str(self._root), 1) if argument.startswith(BOX) else argument

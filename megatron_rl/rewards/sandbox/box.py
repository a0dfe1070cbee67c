"""The process of one sandbox: what it says of itself, and how all of it ends."""

from __future__ import annotations

import contextlib
import json
import subprocess

from megatron_rl.rewards.sandbox.plain import PlainFolder
from megatron_rl.rewards.sandbox.processes import exists, kill, processes_of


class Box:
    """One bubblewrap process. `init` is the first process of its namespace, once known.

    With a `folder` it is the program itself instead, without a namespace: then all processes of `uid` are its.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], *, folder: PlainFolder | None, uid: int | None
    ) -> None:
        self.process, self._folder, self._uid = process, folder, uid
        self.is_reaped = False
        self.init: int | None = None
        self.exit_code: int | None = None
        self._text = b""

    def hear(self, data: bytes) -> None:
        """Take in what the status descriptor says: two JSON documents, one a line."""
        self._text += data
        for line in self._text.splitlines():
            with contextlib.suppress(ValueError):
                said = json.loads(line)
                self.init = said.get("child-pid", self.init)
                self.exit_code = said.get("exit-code", self.exit_code)

    def reap(self, code: int) -> None:
        """Its process ended with `code`, negative for a signal."""
        self.is_reaped, self.process.returncode = True, code
        if self._folder is not None:
            self.exit_code = code if code >= 0 else 128 - code

    def kill(self) -> None:
        for pid in self._loose():
            kill(pid)
        # with its first process a namespace ends as a whole
        if self.init is not None:
            kill(self.init)
        if not self.is_reaped:
            kill(self.process.pid)

    def is_gone(self) -> bool:
        if not self.is_reaped or (self.init is not None and exists(self.init)) or self._loose():
            return False
        if self._folder is not None:
            self._folder.remove()
        return True

    def _loose(self) -> dict[int, int]:
        return processes_of({self._uid}) if self._folder is not None and self._uid is not None else {}

"""What the kernel says of a process of this machine."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_NAMES = {
    "R": "running (state R)",
    "S": "asleep (state S)",
    "D": "waiting for a disk or a device (state D)",
    "T": "stopped (state T): by SIGSTOP or Ctrl-Z",
    "t": "stopped (state t): by a debugger",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessState:
    """`letter` as in ps; CPU seconds of all threads so far."""

    letter: str
    cpu_s: float

    @property
    def is_stopped(self) -> bool:
        return self.letter in "Tt"

    def __str__(self) -> str:
        return _NAMES.get(self.letter, "gone")


def process_state(pid: int) -> ProcessState:
    """State X for a process that is not there."""
    try:
        # the name before the last bracket may hold anything
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ProcessState(letter="X", cpu_s=0.0)
    return ProcessState(
        letter=fields[0], cpu_s=(int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    )

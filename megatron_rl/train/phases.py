"""What a rank is doing now, in a small file that others can read: `logs/rank_N.phase` of the run directory.

A launcher, another rank or a person reads it when the rank itself cannot answer any more. Readable without torch.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from megatron_rl.platform.spans import Spans
from megatron_rl.train.files import writing
from megatron_rl.train.run_dir import LOGS

START = "start"
PHASES = (
    START,  # imports, the meeting of the ranks
    "load",  # weights, optimizer state
    "data",
    "engines",  # their start
    "restart",  # of a lost engine
    "rescore",  # of the prompts of a stage, before its first iteration
    "generate",
    "reward",
    "sleep",  # engines that give their memory back
    "logprob",
    "train",
    "wait",  # for rollouts of the next iteration, see train/ahead.py
    "sync",  # weight transfer and parity
    "eval",
    "save",
    "export",
    "stop",
)

# every record is padded to it, so that a write in place always covers the one before
_RECORD_BYTES = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """Where one rank is: `phase` of step `step` (the first is 1; 0: before it) of a stage, `since` a Unix time."""

    stage: str = ""
    step: int = 0
    phase: str = START
    since: float
    pid: int
    host: str

    def __str__(self) -> str:
        place = f"{self.stage} step {self.step}, " if self.stage else ""
        return f"{place}phase {self.phase} for {max(0.0, time.time() - self.since):.1f} s"


def phase_name(rank: int) -> str:
    return f"rank_{rank}.phase"


def phase_path(run_dir: Path, rank: int) -> Path:
    return run_dir / LOGS / phase_name(rank)


class PhaseFile:
    """The phase of this process; every change is written at once, by one write in place.

    While a profile is made, steps and phases are `spans` as well.
    """

    def __init__(self, run_dir: Path, rank: int) -> None:
        self.spans = Spans()
        path = phase_path(run_dir, rank)
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            # not truncated: a reader finds the record of an earlier start or this one, never nothing
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._set(Phase(since=time.time(), pid=os.getpid(), host=socket.gethostname()))

    @property
    def current(self) -> Phase:
        return self._current

    def enter(self, phase: str) -> None:
        """From now on this rank is in `phase`, one of PHASES."""
        assert phase in PHASES, phase
        self.spans.enter(phase)
        if phase != self._current.phase:
            self._set(replace(self._current, phase=phase, since=time.time()))

    def begin_step(self, stage: str, step: int, phase: str) -> None:
        """From now on this rank works on step `step` of `stage`, and is in `phase`."""
        assert phase in PHASES, phase
        self.spans.begin_step(f"{stage} step {step}", step=step)
        self.spans.enter(phase)
        self._set(replace(self._current, stage=stage, step=step, phase=phase, since=time.time()))

    def _set(self, current: Phase) -> None:
        self._current = current
        os.pwrite(self._fd, _record(asdict(current)), 0)


def _record(values: Mapping[str, object]) -> bytes:
    return json.dumps(values).encode()[: _RECORD_BYTES - 1].ljust(_RECORD_BYTES - 1) + b"\n"


def read_phase(run_dir: Path, rank: int) -> Phase | None:
    """What the rank wrote last; None when it wrote nothing that can be read."""
    return read_phase_file(phase_path(run_dir, rank))


def read_phase_file(path: Path) -> Phase | None:
    try:
        return Phase(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def others_are(rank: int, phases: Mapping[int, Phase | None]) -> str:
    """One line on the ranks that are not where `rank` is: behind if they came to their phase before it did."""
    own = phases[rank]
    assert own is not None, "a rank has a phase of its own"
    lines = [f"rank {rank} is in {own}"]
    for other, phase in phases.items():
        if phase is None:
            lines.append(f"nothing is known of rank {other}")
        elif (phase.stage, phase.step, phase.phase) != (own.stage, own.step, own.phase):
            where = "behind" if phase.since < own.since else "elsewhere"
            lines.append(f"rank {other} (pid {phase.pid} on {phase.host}) is {where}: {phase}")
    return "; ".join(lines) if len(lines) > 1 else f"{lines[0]}, and so are all others"

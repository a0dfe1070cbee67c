"""Runs of the command line that are ended by SIGKILL at chosen moments, with every process that they started."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.errors import MegatronRLError
from megatron_rl.recipe.schema import Recipe
from megatron_rl.train.phases import Phase, read_phase
from megatron_rl.train.progress import stage_label, stage_length

_MARK = "MEGATRON_RL_VERIFIED_RUN"
_POLL_S = 0.005
_LATEST_S = 0.2  # from the first sight of a phase to the kill, at most
_GONE_S = 20.0  # for killed processes to be gone
_SHOWN_LINES = 15
# by kind of stage; the first ones belong to no step
_SETUP = ("load", "data", "engines")
_ENDING = ("export", "stop")
_PHASES = {
    "sft": ("load", "data", "train", "save"),
    "rl": ("engines", "generate", "reward", "logprob", "train", "sync", "save"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """Where a run is to be killed: in `phase` of step `step` (the first is 1) of stage number `stage`."""

    stage: int
    step: int
    phase: str
    delay_s: float  # after the phase was seen


def draw_moments(recipe: Recipe, *, kills: int, seed: int) -> list[Moment]:
    """`kills` moments in the order of the run, spread over its stages, the last stage first."""
    draw = random.Random(seed)
    every = recipe.checkpoint.every_steps if recipe.checkpoint else 1
    # each phase once before any comes again
    left: dict[str, list[str]] = {kind: [] for kind in _PHASES}
    moments = []
    for number in range(kills):
        index = (len(recipe.stages) - 1 - number) % len(recipe.stages)
        stage = recipe.stages[index]
        if not left[stage.kind]:
            left[stage.kind] = draw.sample(_PHASES[stage.kind], len(_PHASES[stage.kind]))
        phase, length = left[stage.kind].pop(), stage_length(stage)
        moments.append(
            Moment(
                stage=index,
                step=_step_with(phase, draw.randint(1, length), length=length, every=every),
                phase=phase,
                # many phases are over within milliseconds
                delay_s=draw.choice((0.0, draw.uniform(0.0, _LATEST_S))),
            )
        )
    return sorted(moments, key=lambda moment: (moment.stage, moment.step, moment.phase not in _SETUP))


def _step_with(phase: str, step: int, *, length: int, every: int) -> int:
    """`step`, or the next one that ends with a checkpoint."""
    return min(length, -(-step // every) * every) if phase == "save" else step


def is_due(moment: Moment, phase: Phase, labels: Sequence[str]) -> bool:
    """Whether a run that is in `phase` has come to the moment, or is past it."""
    if moment.phase in _SETUP and phase.phase == moment.phase:
        return True
    if phase.stage not in labels:
        return False
    place = (labels.index(phase.stage), phase.step)
    if phase.phase in _ENDING:
        # of the last step, whose phases may all be over before they are seen
        return place >= (moment.stage, moment.step)
    wanted = (moment.stage, moment.step)
    return place > wanted or (place == wanted and phase.phase == moment.phase)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How one start ended: killed where `phase` says, or by itself with `exit_code`."""

    exit_code: int
    phase: Phase | None = None

    @property
    def was_killed(self) -> bool:
        return self.phase is not None


class KillableRun:
    """`megatron-rl train` on one recipe file into one run directory, as often as it is started."""

    def __init__(self, recipe: Recipe, recipe_file: Path, run_dir: Path, *, nproc: int) -> None:
        self._labels = [stage_label(recipe.stages, index) for index in range(len(recipe.stages))]
        self.recipe_file, self.nproc, self.run_dir = recipe_file, nproc, run_dir
        self.log = run_dir.with_suffix(".log")

    def start(self, *, moment: Moment | None = None) -> Outcome:
        """Start it, resuming what is there, and wait for its end, or for `moment` to kill it.

        Whatever happens, none of its processes is left.
        """
        began = time.time()
        with self.log.open("ab") as output:
            process = subprocess.Popen(
                self._command(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            while process.poll() is None:
                phase = read_phase(self.run_dir, 0)
                # the file of the start before this one is still there
                if moment and phase and phase.since >= began and is_due(moment, phase, self._labels):
                    time.sleep(moment.delay_s)
                    break
                time.sleep(_POLL_S)
            if (code := process.poll()) is not None:
                return Outcome(exit_code=code)
            self._kill(process)
            return Outcome(exit_code=-signal.SIGKILL, phase=read_phase(self.run_dir, 0))
        finally:
            self._kill(process)

    def last_words(self) -> str:
        """The end of what it printed."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join("  " + line for line in lines[-_SHOWN_LINES:])

    def _command(self) -> list[str]:
        resume = ["--resume"] if self.run_dir.is_dir() else []
        return [
            *("env", f"{_MARK}={self.run_dir}"),
            *(sys.executable, "-m", "megatron_rl", "train", str(self.recipe_file)),
            *("--run-dir", str(self.run_dir), "--nproc", str(self.nproc)),
            *resume,
        ]

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        """Every process that carries the mark, until there is none."""
        deadline = time.monotonic() + _GONE_S
        while pids := processes_of(self.run_dir):
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            # reaped, the launcher is gone for good
            process.poll()
            if time.monotonic() > deadline:
                raise MegatronRLError(
                    f"processes {pids} of {self.run_dir} are still there {_GONE_S:g} s after SIGKILL"
                )
            time.sleep(0.01)
        process.wait()


def processes_of(run_dir: Path) -> list[int]:
    """Processes of the run, whatever group or session they made for themselves; not those that wait to be reaped."""
    mark, found = f"{_MARK}={run_dir}".encode(), []
    for entry in Path("/proc").glob("[0-9]*"):
        # gone in the meantime, or of another user
        with suppress(OSError):
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found

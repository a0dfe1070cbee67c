"""Kill a run with SIGKILL at a chosen moment of its life, as often as a plan says, and take it up again each time."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from megatron_rl.model.checkpoint_files import find_latest
from megatron_rl.train.phases import Phase, read_phase
from tests.helpers.processes import ended, processes_of, stop, wait_for
from tests.helpers.quickstart import RECIPE, ROOT, start

_PAUSES = Path(__file__).parent / "pauses"
_TIMEOUT_S = 600.0  # from a start to the moment of the kill; seconds on a machine that has nothing else to do

# moments that are one file operation of rank 0: audit event and path, of a rename the new one; the kill comes before it
OPERATIONS = {
    "data": ("open", "small/*.jsonl"),  # a phase of milliseconds, which a look from outside may miss
    "step recorded, save not begun": ("os.mkdir", ".tmp-stage_*"),
    "save: before the state": ("open", ".tmp-stage_*/state.json"),
    "save: before the rename": ("os.rename", "checkpoints/stage_*"),
    "save: renamed, not yet latest": ("os.rename", "checkpoints/latest"),
    "save: before an old one goes": ("os.rename", ".old-stage_*"),
    "rollouts half recorded": ("os.rename", "rollouts/iter_*.jsonl"),
    "export: before the rename": ("os.rename", "model"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Kill:
    """A moment: a phase of `logs/rank_0.phase`, or one of OPERATIONS."""

    moment: str
    stage: str = ""  # label of the stage that the phase has to be in; any where empty
    after: int = 0  # steps beyond the checkpoint that the run has to finish first
    options: tuple[str, ...] = ()  # of the attempt that it ends

    def __str__(self) -> str:
        options = f" with {' '.join(self.options)}" if self.options else ""
        return f"{self.stage or 'run'}: {self.moment!r} after {self.after} step(s){options}"


@dataclass(frozen=True, slots=True)
class Attempt:
    """One start that was ended: where it began, when it was killed and what it had printed."""

    kill: Kill
    began_at: int  # step of the checkpoint
    killed_at: int  # steps recorded
    output: str
    shared_memory: frozenset[str] = field(default_factory=frozenset)

    def __str__(self) -> str:
        return f"{self.kill}: began after step {self.began_at}, killed after {self.killed_at}"


def kill_and_resume(
    place: Path,
    run_dir: Path,
    kills: Sequence[Kill],
    *options: str,
    steps_before: dict[int, int],
    recipe: Path = RECIPE,
) -> Iterator[Attempt]:
    """Start the run or resume it, kill it as the plan says, and again for the next kill; yields each attempt.

    `steps_before` holds, by number of the stage, the steps of the stages before it. Every kill is checked: the run
    was alive and at the moment of the plan; afterwards no process is left, and no shared memory that it used.
    """
    for kill in kills:
        saved = find_latest(run_dir / "checkpoints")
        began_at = 0 if saved is None else steps_before[saved.progress["stage"]] + saved.progress["step"]
        resume = ("--resume",) if run_dir.exists() else ()
        since = time.time()
        with _running(place, run_dir, kill, *options, *kill.options, *resume, recipe=recipe) as process:
            _wait_until(kill, process, run_dir, since=since, steps=began_at + kill.after)
            shared = shared_memory_of(run_dir)
            _kill_all(process, run_dir)
            code, output, errors = ended(process)
        assert code == -signal.SIGKILL, f"{kill}: exit code {code}: {errors[-3000:]}"
        wait_for(lambda: not processes_of(run_dir), f"{kill}: the end of every process", timeout_s=30.0)
        yield Attempt(kill, began_at, num_steps(run_dir), output, shared)


@contextmanager
def _running(
    place: Path, run_dir: Path, kill: Kill, *options: str, recipe: Path
) -> Iterator[subprocess.Popen[str]]:
    environment = {}
    if kill.moment in OPERATIONS:
        event, pattern = OPERATIONS[kill.moment]
        _pause_file(run_dir).unlink(missing_ok=True)
        paths = (str(_PAUSES), str(ROOT), str(ROOT / "kernels"))
        environment = {
            "PYTHONPATH": os.pathsep.join(paths),
            "MEGATRON_RL_TEST_PAUSE": f"{event}|{pattern}|{kill.after}|{_pause_file(run_dir)}",
        }
    process = start(place, run_dir, *options, recipe=recipe, environment=environment)
    try:
        yield process
    finally:
        _kill_all(process, run_dir)


def _wait_until(
    kill: Kill, process: subprocess.Popen[str], run_dir: Path, *, since: float, steps: int
) -> None:
    """Return with rank 0 standing still at the moment."""
    deadline = time.monotonic() + _TIMEOUT_S
    while True:
        if process.poll() is not None:
            _, output, errors = ended(process)
            raise AssertionError(f"{kill}: the run ended before: {output[-2000:]}{errors[-3000:]}")
        assert time.monotonic() < deadline, f"{kill}: did not come, the run is in: {read_phase(run_dir, 0)}"
        if kill.moment in OPERATIONS:
            is_there = _pause_file(run_dir).exists()
        else:
            is_there = num_steps(run_dir) >= steps and _stands_still(kill, run_dir, since=since)
        if is_there:
            return
        # looking often takes the processor from what takes seconds; elsewhere a phase may be over in milliseconds
        time.sleep(0.02 if kill.moment in OPERATIONS or _is_in_no_hurry(run_dir, since=since) else 0.001)


def _is_in_no_hurry(run_dir: Path, *, since: float) -> bool:
    """Whether rank 0 imports its libraries or waits for engines; an earlier attempt left its last phase behind."""
    seen = read_phase(run_dir, 0)
    return seen is None or seen.since < since or seen.phase in ("start", "engines")


def _stands_still(kill: Kill, run_dir: Path, *, since: float) -> bool:
    """Stop rank 0 when it is in the phase, and see whether it still is; if it was faster, let it go on."""
    seen = read_phase(run_dir, 0)
    if seen is None or not _is_at(kill, seen, since=since):
        return False
    pid = seen.pid
    stop(pid)
    seen = read_phase(run_dir, 0)
    if seen is not None and _is_at(kill, seen, since=since):
        return True
    os.kill(pid, signal.SIGCONT)
    return False


def _is_at(kill: Kill, seen: Phase, *, since: float) -> bool:
    # an earlier attempt left its last phase behind
    return seen.since >= since and seen.phase == kill.moment and kill.stage in ("", seen.stage)


def num_steps(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def shared_memory_of(run_dir: Path) -> frozenset[str]:
    """Files below /dev/shm that a process of the run has mapped."""
    found = set()
    for pid in processes_of(run_dir):
        with suppress(OSError):
            maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
            found |= {line.split(maxsplit=5)[5] for line in maps if "/dev/shm/" in line}
    return frozenset(path for path in found if not path.endswith(" (deleted)"))


def _kill_all(process: subprocess.Popen[str], run_dir: Path) -> None:
    """What a machine does that loses its power: no process of the run gets to do anything more."""
    for pid in processes_of(run_dir):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _pause_file(run_dir: Path) -> Path:
    return run_dir.with_name(f"{run_dir.name}.paused")

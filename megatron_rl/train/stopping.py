"""Stopping on request: a signal or a file ends a run at the next step border, with a checkpoint to go on from.

SIGTERM and SIGUSR1 to any rank, or a file `stop` in the run directory. Before the first step of a stage, while there is
nothing to save, the run ends where it stands. What is left of a stopped run is `stopped.json` and exit code 75.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from megatron_rl.train.files import to_json, write_atomically
from megatron_rl.train.phases import START, PhaseFile

STOPPED = 75  # EX_TEMPFAIL: not done, to be started again with --resume
TERMINATED = 128 + signal.SIGTERM
NOTHING_SAVED = "without `checkpoint:` in the recipe nothing is saved to resume from"
STOP_FILE, STOPPED_FILE = "stop", "stopped.json"

# what asked for a stop, as a number that ranks can agree on: the largest one is named
REASONS = ("", "SIGTERM", "SIGUSR1", "the stop file")

# nothing has begun that a checkpoint could hold: a request need not wait
_INTERRUPTIBLE = (START, "load", "data", "engines")
_POLL_S = 0.5
# interrupts whatever the main thread waits for, so that it runs its handlers; means nothing otherwise
_NUDGE = signal.SIGURG
# one request may arrive twice, from a batch system and from what started the ranks
_SAME_REQUEST_S = 2.0


class Stopped(SystemExit):
    """The end of a run on request; not a failure, so no `except Exception` catches it."""

    def __init__(self, message: str, *, exit_code: int = STOPPED) -> None:
        super().__init__(exit_code)
        self.exit_code, self.message = exit_code, message

    def __str__(self) -> str:
        return self.message


class _End(Protocol):
    def __call__(self, message: str, *, exit_code: int) -> None: ...


class StopRequest:
    """Whether a stop was asked for. Signals are noticed at once, also while the main thread is inside a C call."""

    def __init__(
        self,
        run_dir: Path,
        phases: PhaseFile,
        *,
        grace_s: float | None,
        watches_file: bool,
        end: _End,
        leave: Callable[[Stopped], None] | None = None,
    ) -> None:
        """`end` ends the process from another thread; `grace_s` seconds after a request it has to.

        None: the run saves nothing, so that a request ends it where it stands. `leave` ends the process on its main
        thread during imports; None: by the exception there too.
        """
        self._run_dir, self._phases, self._grace_s = run_dir, phases, grace_s
        self._watches_file, self._end, self._leave = watches_file, end, leave
        self._asked_at = 0.0
        self._closing = False
        self.reason = 0  # position in REASONS

    def watch(self) -> None:
        """Take over both signals. On the main thread."""
        self._main_thread = threading.get_ident()
        self._read_fd, write_fd = os.pipe()
        os.set_blocking(write_fd, False)
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._on_signal)
        signal.signal(_NUDGE, pass_over)
        # written to by the C handler, which does not wait for the interpreter
        signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, name="stop-requests", daemon=True).start()

    def close(self) -> None:
        """From now on requests change nothing: the run is over anyway."""
        self._closing = True
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, pass_over)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        """On the main thread, as soon as it is back in Python."""
        self._ask(signal.Signals(number).name)
        self._leave_if_nothing_began()

    def _leave_if_nothing_began(self) -> None:
        if self._closing:
            return
        phase = self._phases.current
        if self._grace_s is None:
            stopped = Stopped(NOTHING_SAVED, exit_code=TERMINATED)
        elif phase.phase in _INTERRUPTIBLE:
            stopped = Stopped(f"on {REASONS[self.reason]} before the first step ({phase})")
        else:
            return
        self._closing = True
        if phase.phase == START and self._leave is not None:
            # libraries that are being imported would pass the exception over, or make another of it
            self._leave(stopped)
        raise stopped

    def _ask(self, reason: str) -> None:
        if not self.reason:
            self._asked_at = time.monotonic()
            self.reason = REASONS.index(reason)

    def _watch(self) -> None:
        while not self._closing:
            ready, _, _ = select.select([self._read_fd], [], [], _POLL_S)
            arrived = os.read(self._read_fd, 4096) if ready else b""
            if any(number != _NUDGE for number in arrived):
                # the kernel may have given the signal to another thread, which leaves the main one asleep in its call
                signal.pthread_kill(self._main_thread, _NUDGE)
            for number in arrived:
                if number in (signal.SIGTERM, signal.SIGUSR1):
                    self._arrived(signal.Signals(number).name)
            if self._watches_file and not self.reason and (self._run_dir / STOP_FILE).exists():
                self._ask("the stop file")
                # the main thread then acts on it as on a signal
                os.kill(os.getpid(), signal.SIGUSR1)
            grace_s = self._grace_s
            if self.reason and grace_s is not None and time.monotonic() - self._asked_at > grace_s:
                self._give_up(f"within run.stop_grace_s = {grace_s:g} s")

    def _arrived(self, name: str) -> None:
        if self.reason and time.monotonic() - self._asked_at > _SAME_REQUEST_S:
            self._give_up(f"before a second signal ({name})")
        self._ask(name)

    def _give_up(self, when: str) -> None:
        if self._closing:
            return
        self._end(
            f"asked to stop by {REASONS[self.reason]}, and no step border was reached {when} "
            f"({self._phases.current}); --resume continues from the last checkpoint",
            exit_code=TERMINATED,
        )


def pass_over(number: int, _: FrameType | None) -> None:
    """A handler that does nothing. Unlike SIG_IGN it is not inherited, and Python does not complain of it."""


def write_stopped(run_dir: Path, *, reason: str, stage: str, step: int, checkpoint: str | None) -> None:
    """Say why the run stopped and where: `step` steps of `stage` are done, and in `checkpoint`."""
    record: dict[str, Any] = {"reason": reason, "stage": stage, "step": step, "checkpoint": checkpoint}
    write_atomically(run_dir / STOPPED_FILE, to_json(record) + b"\n")


def forget_requests(run_dir: Path, *, stale: str | None) -> None:
    """Remove what an earlier start was asked and left; this one is to run.

    `stale` is what launch/stopping.sh says of the `stop` that it found, empty for none: one made since then is meant
    for this start. None: no script started this.
    """
    with suppress(FileNotFoundError):
        (run_dir / STOPPED_FILE).unlink()
    stop = run_dir / STOP_FILE
    with suppress(FileNotFoundError):
        if stale is None or stale == _mark(stop.stat()):
            stop.unlink()


def _mark(found: os.stat_result) -> str:
    """As `stat -c '%i %.9Y'`."""
    seconds, rest = divmod(found.st_mtime_ns, 10**9)
    return f"{found.st_ino} {seconds}.{rest:09d}"

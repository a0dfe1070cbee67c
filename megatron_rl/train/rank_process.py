"""One rank as a process: its place in the run, its signals, its way out, and its report to the launcher.

Signals: SIGTERM and SIGUSR1 ask for a stop (see `stopping`), SIGHUP ends at once, SIGUSR2 writes the stacks of all
threads to `logs/stacks_rank_N.txt`, Ctrl-C is Python's own. Works without torch, so that it comes before its import.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from megatron_rl.errors import MegatronRLError
from megatron_rl.platform.parent import wake_with_parent
from megatron_rl.train.phases import PhaseFile
from megatron_rl.train.run_dir import LOGS, take_run_dir
from megatron_rl.train.stopping import Stopped, StopRequest, pass_over

STOP_GRACE_S = 5.0  # from being told to end to being killed

_PARENT_FD = "MEGATRON_RL_PARENT_FD"
_STALE_STOP = "MEGATRON_RL_STALE_STOP"
_FAILURE_FD = "MEGATRON_RL_FAILURE_FD"
_REPORT_END = b"\n"
_reporting = threading.Lock()


@dataclass(frozen=True, kw_only=True, slots=True)
class RankEnvironment:
    """This process among the processes of the run."""

    rank: int
    local_rank: int
    world_size: int


def rank_environment() -> RankEnvironment | None:
    """What torchrun or `launch_local` says of this process; None when it was started by hand.

    Raises MegatronRLError for what neither of them would say.
    """
    said = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name in os.environ}
    if "RANK" not in said or "WORLD_SIZE" not in said:
        return None
    numbers = {name: int(text) for name, text in said.items() if text.isdecimal()}
    is_alone = numbers.get("WORLD_SIZE") == 1
    meeting = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not is_alone and not os.environ.get(name)]
    if numbers.keys() != said.keys() or numbers["RANK"] >= numbers["WORLD_SIZE"] or meeting:
        got = ", ".join(f"{name}={text}" for name, text in said.items())
        raise MegatronRLError(
            f"got {got} in the environment, must be numbers with RANK below WORLD_SIZE and, with several ranks, "
            "MASTER_ADDR and MASTER_PORT, as torchrun sets them; unset RANK to have ranks started here (--nproc)"
        )
    return RankEnvironment(
        rank=numbers["RANK"],
        local_rank=numbers.get("LOCAL_RANK", numbers["RANK"]),
        world_size=numbers["WORLD_SIZE"],
    )


def stale_stop() -> str | None:
    """What a launch script says of the `stop` that an earlier start left; see `stopping.forget_requests`."""
    return os.environ.get(_STALE_STOP)


def is_launched() -> bool:
    """Whether `launch_local` started this process and will report for it."""
    return _FAILURE_FD in os.environ


class FailureReport:
    """Where a rank leaves why it failed: memory without a name, so that nothing of it outlives both processes."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("failure")

    def read(self) -> dict[str, Any]:
        """What the rank reported; empty: nothing yet."""
        written = os.pread(self.descriptor, os.fstat(self.descriptor).st_size, 0)
        # complete with its last byte
        return dict(json.loads(written)) if written.endswith(_REPORT_END) else {}

    def close(self) -> None:
        os.close(self.descriptor)


def launch_variables(parent_fd: int, report: FailureReport) -> dict[str, str]:
    """What `launch_local` tells a rank about itself."""
    return {_PARENT_FD: str(parent_fd), _FAILURE_FD: str(report.descriptor)}


def report_failure(message: str, *, exit_code: int, is_consequence: bool = False) -> bool:
    """Leave the message for the launcher to print; False when there is none and the caller must print it.

    The first report of a rank stays. A consequence of another rank's end is printed only if nothing else is.
    """
    if not is_launched():
        return False
    descriptor = int(os.environ[_FAILURE_FD])
    with _reporting:
        if os.fstat(descriptor).st_size == 0:
            report = {"message": message, "exit_code": exit_code, "is_consequence": is_consequence}
            os.pwrite(descriptor, json.dumps({**report, "time": time.time()}).encode() + _REPORT_END, 0)
    # rank 0 shares the terminal with the launcher, the others have a log of their own
    if os.environ.get("RANK") != "0":
        print(message, file=sys.stderr, flush=True)
    return True


class StackFile:
    """`logs/stacks_rank_N.txt`: the stacks of all threads, on SIGUSR2 and when this process asks for them.

    On the signal they are written even while the interpreter is held by a C call, or right after a SIGCONT.
    """

    def __init__(self, log_dir: Path, rank: int) -> None:
        self.path = log_dir / f"stacks_rank_{rank}.txt"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a", encoding="utf-8")
        faulthandler.register(signal.SIGUSR2, file=self._file, all_threads=True)

    def dump(self, title: str) -> None:
        self._file.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S %z')} {title}\n")
        self._file.flush()
        faulthandler.dump_traceback(self._file, all_threads=True)

    def close(self) -> None:
        """A file that nothing was written to goes."""
        faulthandler.unregister(signal.SIGUSR2)
        # what comes from now on has nowhere to go, and must not end the process
        signal.signal(signal.SIGUSR2, pass_over)
        if os.fstat(self._file.fileno()).st_size == 0:
            self.path.unlink(missing_ok=True)
        self._file.close()


def enter_rank() -> None:
    """The rank of a tool, which saves nothing: it ends in order on SIGTERM and SIGHUP, and with its launcher."""

    def end(number: int, _: FrameType | None) -> None:
        _pass_over_ends()
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end)
    _follow_launcher()


class RankProcess:
    """This process as a rank of a run. Made once, on the main thread, before anything slow is imported."""

    def __init__(
        self,
        run_dir: Path,
        *,
        stop_grace_s: float | None,
        leave: Callable[[RankProcess, Stopped], NoReturn] | None = None,
    ) -> None:
        """`stop_grace_s`, `leave`: see StopRequest. Raises MegatronRLError while another process uses the directory."""
        self.place = rank_environment() or RankEnvironment(rank=0, local_rank=0, world_size=1)
        self.run_dir, self.log_dir = run_dir, run_dir / LOGS
        self._lock = take_run_dir(run_dir) if self.place.rank == 0 else None
        self.stacks = StackFile(self.log_dir, self.place.rank)
        self._exit_code = 128 + signal.SIGHUP
        signal.signal(signal.SIGHUP, self._end_now)
        _follow_launcher()
        # the launcher may send signals from here on: it looks for this file
        self.phases = PhaseFile(run_dir, self.place.rank)
        self.stop = StopRequest(
            run_dir,
            self.phases,
            grace_s=stop_grace_s,
            watches_file=self.place.rank == 0,
            end=self.end,
            leave=None if leave is None else partial(leave, self),
        )
        self.stop.watch()

    def end(self, message: str, *, exit_code: int, is_consequence: bool = False) -> None:
        """End this process from another thread than the main one, whatever that is doing. Does not return.

        The main thread gets a SystemExit; where it is held in a C call, the process ends without it.
        """
        if message and not report_failure(message, exit_code=exit_code, is_consequence=is_consequence):
            print(f"error: {message}", file=sys.stderr, flush=True)
        self._exit_code = exit_code
        os.kill(os.getpid(), signal.SIGHUP)
        time.sleep(STOP_GRACE_S)
        os._exit(exit_code)

    def _end_now(self, number: int, _: FrameType | None) -> None:
        _pass_over_ends()
        raise SystemExit(self._exit_code)

    def close(self) -> None:
        """After the last thing worth watching."""
        self.stop.close()
        self.stacks.close()
        if self._lock is not None:
            self._lock.close()


def _pass_over_ends() -> None:
    # a second signal must not break into the clean-up that the first began
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, pass_over)


def _follow_launcher() -> None:
    # a shell that starts us in the background leaves Ctrl-C ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if _PARENT_FD in os.environ:
        fd = int(os.environ[_PARENT_FD])
        # stopped, this rank could not see that
        wake_with_parent()
        threading.Thread(target=_watch_parent, args=(fd,), name="watch-parent", daemon=True).start()


def _watch_parent(fd: int) -> None:
    """End this rank's group when the launcher's end of the pipe closes, however the launcher died."""
    while os.read(fd, 1):
        pass
    os.kill(os.getpid(), signal.SIGHUP)
    # the group is ours alone when the launcher made it
    end = os.killpg if os.getpgrp() == os.getpid() else os.kill
    end(os.getpid(), signal.SIGTERM)
    time.sleep(STOP_GRACE_S)
    end(os.getpid(), signal.SIGKILL)

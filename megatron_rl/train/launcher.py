"""Local rank processes: started together, watched, ended together, with one error for all of them.

The parent side is `launch_local`; the rank side is `rank_environment`, `enter_rank` and `report_failure`.
torchrun may stand in for the parent: then ranks find its variables and no parent to report to.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Any

POLL_S = 0.05
FAILURE_GRACE_S = 1.0  # from the first failure to SIGTERM: ranks that fail with it get to say why
STOP_GRACE_S = 5.0  # from SIGTERM to SIGKILL
INTERRUPT_GRACE_S = 15.0  # from a forwarded Ctrl-C to SIGTERM: engines are stopped, checkpoints finished
TAIL_LINES = 20

_PARENT_FD = "MEGATRON_RL_PARENT_FD"
_FAILURE_FILE = "MEGATRON_RL_FAILURE_FILE"


@dataclass(frozen=True, kw_only=True, slots=True)
class RankEnvironment:
    """This process among the processes of the run."""

    rank: int
    local_rank: int
    world_size: int


def rank_environment() -> RankEnvironment | None:
    """What torchrun or `launch_local` says of this process; None when it was started by hand."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    rank = int(os.environ["RANK"])
    return RankEnvironment(
        rank=rank,
        local_rank=int(os.environ.get("LOCAL_RANK", rank)),
        world_size=int(os.environ["WORLD_SIZE"]),
    )


def is_launched() -> bool:
    """Whether `launch_local` started this process and will report for it."""
    return _FAILURE_FILE in os.environ


def enter_rank() -> None:
    """Make this process end cleanly: on SIGTERM by SystemExit, and by itself when its launcher is gone."""
    signal.signal(signal.SIGTERM, _terminate)
    # a shell that starts us in the background leaves Ctrl-C ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if _PARENT_FD in os.environ:
        fd = int(os.environ[_PARENT_FD])
        threading.Thread(target=_watch_parent, args=(fd,), name="watch-parent", daemon=True).start()


def report_failure(message: str, *, exit_code: int) -> bool:
    """Leave the message for the launcher to print; False when there is none and the caller must print it."""
    if not is_launched():
        return False
    path = Path(os.environ[_FAILURE_FILE])
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({"message": message, "exit_code": exit_code, "time": time.time()}))
    partial.rename(path)
    # rank 0 shares the terminal with the launcher, the others have a log of their own
    if os.environ.get("RANK") != "0":
        print(message, file=sys.stderr, flush=True)
    return True


def launch_local(command: Sequence[str], *, nproc: int, log_dir: Path) -> int:
    """Run `command` as `nproc` ranks on this machine and return the exit code of the run.

    Rank 0 writes to the terminal, the others to `log_dir/rank_N.log`. The first rank that fails ends all: one
    error block names it, and its exit code is returned (128 + signal for a rank that was killed). Ctrl-C and
    SIGTERM are passed on once; a second Ctrl-C kills. No process of any rank's group is left behind.
    """
    log_dir.mkdir(parents=True, exist_ok=True)
    alive_end, own_end = os.pipe()
    with tempfile.TemporaryDirectory(prefix="megatron_rl_") as scratch, _caught_signals() as caught:
        ranks: list[_Rank] = []
        try:
            port = free_port()
            for rank in range(nproc):
                variables = _variables(rank, nproc, port) | {_PARENT_FD: str(alive_end)}
                ranks.append(_Rank.start(command, rank, variables, alive_end, log_dir, Path(scratch)))
            _wait(ranks, caught)
        finally:
            for started in ranks:
                started.clean_up()
            os.close(own_end)
            os.close(alive_end)
        return _conclude(ranks, caught)


@dataclass(slots=True)
class _Rank:
    """One rank process and how it ended."""

    rank: int
    process: subprocess.Popen[bytes]
    failure_file: Path
    log: Path | None
    log_start: int
    ended_at: float | None = None
    failure: dict[str, Any] = field(default_factory=dict)
    was_stopped: bool = False  # a signal of ours came before its end

    @classmethod
    def start(
        cls,
        command: Sequence[str],
        rank: int,
        variables: Mapping[str, str],
        fd: int,
        log_dir: Path,
        scratch: Path,
    ) -> _Rank:
        failure_file = scratch / f"rank_{rank}.json"
        log = log_dir / f"rank_{rank}.log" if rank else None
        output: IO[bytes] | None = log.open("ab") if log else None
        try:
            process = subprocess.Popen(
                command,
                env=os.environ | variables | {_FAILURE_FILE: str(failure_file)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(fd,),
                # its own group: Ctrl-C reaches the launcher alone, and all that a rank started ends with it
                start_new_session=True,
            )
            return cls(rank, process, failure_file, log, output.tell() if output else 0)
        finally:
            if output:
                output.close()

    def poll(self) -> None:
        """Notice the end of the process, or a failure that it reported before ending."""
        if self.ended_at is None and self.process.poll() is not None:
            self.ended_at = time.time()
        if not self.failure and self.failure_file.exists():
            self.failure = json.loads(self.failure_file.read_text())

    @property
    def has_failed(self) -> bool:
        return bool(self.failure) or (not self.was_stopped and bool(self.process.returncode))

    @property
    def exit_code(self) -> int:
        code = self.failure.get("exit_code", self.process.returncode) or 0
        return 128 - code if code < 0 else code

    def blame(self) -> tuple[bool, float]:
        """Smallest for the rank to name: a user error or a kill from outside comes before a lost peer."""
        was_killed = (self.process.returncode or 0) < 0 and not self.was_stopped
        explains = self.failure.get("exit_code") == 2 or was_killed
        return not explains, self.failure.get("time", self.ended_at or time.time())

    def send(self, number: int, *, group: bool) -> None:
        if self.ended_at is None:
            self.was_stopped = True
        with suppress(ProcessLookupError, PermissionError):
            if group:
                os.killpg(self.process.pid, number)
            elif self.ended_at is None:
                self.process.send_signal(number)

    def clean_up(self) -> None:
        """End what is left of the group: helpers that outlived their rank, or all if we failed ourselves."""
        deadline = time.monotonic() + (FAILURE_GRACE_S if self.process.poll() is not None else 0.0)
        while time.monotonic() < deadline and _group_exists(self.process.pid):
            time.sleep(POLL_S)
        self.send(signal.SIGKILL, group=True)
        self.process.wait()

    def last_words(self) -> str:
        """The reported message, else the end of this run's part of the log."""
        if self.failure:
            return str(self.failure["message"]).rstrip()
        if self.log is None:
            return "its output stands above"
        with self.log.open("rb") as stream:
            stream.seek(self.log_start)
            lines = stream.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-TAIL_LINES:]) or "it printed nothing"


@dataclass(slots=True)
class _Caught:
    """Signals that reached the launcher, in order."""

    numbers: list[int] = field(default_factory=list)

    def handle(self, number: int, _: FrameType | None) -> None:
        self.numbers.append(number)


@contextmanager
def _caught_signals() -> Iterator[_Caught]:
    """Collect Ctrl-C, SIGTERM and SIGHUP instead of letting them interrupt the bookkeeping."""
    caught = _Caught()
    before = {n: signal.signal(n, caught.handle) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(ranks: Sequence[_Rank], caught: _Caught) -> None:
    """Until every rank has ended, by itself or by the steps of `_ending`."""
    began: float | None = None
    steps: list[tuple[float, int, bool]] = []
    while True:
        for rank in ranks:
            rank.poll()
        if all(rank.ended_at is not None for rank in ranks):
            return
        now = time.monotonic()
        if began is None and (caught.numbers or any(rank.has_failed for rank in ranks)):
            began, steps = now, _ending(caught)
        if len(caught.numbers) > 1:
            steps = [(0.0, signal.SIGKILL, True)]
        while began is not None and steps and now - began >= steps[0][0]:
            _, number, group = steps.pop(0)
            for rank in ranks:
                rank.send(number, group=group)
        time.sleep(POLL_S)


def _ending(caught: _Caught) -> list[tuple[float, int, bool]]:
    """(seconds from now, signal, to the whole group), gentle first."""
    if not caught.numbers:
        return [
            (FAILURE_GRACE_S, signal.SIGTERM, True),
            (FAILURE_GRACE_S + STOP_GRACE_S, signal.SIGKILL, True),
        ]
    grace = INTERRUPT_GRACE_S if caught.numbers[0] == signal.SIGINT else STOP_GRACE_S
    # to the rank alone: it stops its own engines in order
    return [
        (0.0, caught.numbers[0], False),
        (grace, signal.SIGTERM, True),
        (grace + STOP_GRACE_S, signal.SIGKILL, True),
    ]


def _conclude(ranks: Sequence[_Rank], caught: _Caught) -> int:
    """Print what went wrong, once, and return the exit code."""
    if caught.numbers:
        name = "interrupted" if caught.numbers[0] == signal.SIGINT else "terminated"
        print(f"{name}: all {len(ranks)} ranks have ended", file=sys.stderr)
        return 128 + caught.numbers[0]
    failed = [rank for rank in ranks if rank.has_failed]
    if not failed:
        return 0
    first = min(failed, key=_Rank.blame)
    how = f"exit code {first.exit_code}"
    if (first.process.returncode or 0) < 0 and not first.failure:
        how = f"killed by {signal.Signals(-first.process.returncode).name}"
    words = "\n".join("  " + line for line in first.last_words().splitlines())
    where = f"\nlog: {first.log}" if first.log else ""
    title = f"error: rank {first.rank} of {len(ranks)} failed first ({how})"
    print(f"{title}\n{words}{where}", file=sys.stderr, flush=True)
    return first.exit_code


def _variables(rank: int, nproc: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }


def free_port() -> int:
    """A port of this machine that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _group_exists(pgid: int) -> bool:
    try:
        os.killpg(pgid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _terminate(number: int, _: FrameType | None) -> None:
    # once: a second SIGTERM must not break into the clean-up that the first began
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(128 + number)


def _watch_parent(fd: int) -> None:
    """End this rank's group when the launcher's end of the pipe closes, however the launcher died."""
    while os.read(fd, 1):
        pass
    # the group is ours alone when the launcher made it
    end = os.killpg if os.getpgrp() == os.getpid() else os.kill
    end(os.getpid(), signal.SIGTERM)
    time.sleep(STOP_GRACE_S)
    end(os.getpid(), signal.SIGKILL)

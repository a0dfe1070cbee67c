"""Local rank processes: started together, watched, ended together, with one error for all of them.

The rank's own side is `rank_process`. torchrun may stand in for `launch_local`: then ranks find its variables and no
parent to report to.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import IO, Any

from megatron_rl.train.phases import phase_name, read_phase_file
from megatron_rl.train.rank_process import STOP_GRACE_S, FailureReport, launch_variables
from megatron_rl.train.stopping import NOTHING_SAVED, STOPPED, TERMINATED

POLL_S = 0.05
FAILURE_GRACE_S = 1.0  # from the first failure to the end of all: ranks that fail with it get to say why
INTERRUPT_GRACE_S = 15.0  # from a forwarded Ctrl-C to the same: engines are stopped, checkpoints finished
TOGETHER_S = 10.0  # from the first rank that stopped on request: the others agreed to stop with it
TAIL_LINES = 20


def launch_local(
    command: Sequence[str], *, nproc: int, log_dir: Path, stop_grace_s: float | None = None
) -> int:
    """Run `command` as `nproc` ranks on this machine and return the exit code of the run.

    Rank 0 writes to the terminal, the others to `log_dir/rank_N.log`. The first rank that fails ends all: one error
    block names it, and its exit code is returned (128 + signal for a rank that was killed). Ctrl-C, SIGTERM and
    SIGUSR1 are passed on once; the latter two give the ranks `stop_grace_s` seconds to save and stop (exit code 75),
    or none when it is None: they save nothing. A second signal ends them at once. No process of any rank's group is
    left behind.
    """
    log_dir.mkdir(parents=True, exist_ok=True)
    alive_end, own_end = os.pipe()
    with _caught_signals() as caught, held_port() as port:
        ranks: list[_Rank] = []
        try:
            for rank in range(nproc):
                variables = _variables(rank, nproc, port)
                ranks.append(_Rank.start(command, rank, variables, alive_end, log_dir))
            _Course(ranks, caught, stop_grace_s=stop_grace_s).run()
        finally:
            for started in ranks:
                started.clean_up()
            os.close(own_end)
            os.close(alive_end)
        return _conclude(ranks, caught, log_dir, saves=stop_grace_s is not None)


@dataclass(slots=True)
class _Rank:
    """One rank process and how it ended."""

    rank: int
    process: subprocess.Popen[bytes]
    report: FailureReport
    log: Path | None
    log_start: int
    ended_at: float | None = None
    failure: dict[str, Any] = field(default_factory=dict)
    was_ended: bool = False  # a signal of ours that ends came before its end
    was_asked: bool = False  # one that asks for a stop did; before a rank can listen, it ends by it

    @classmethod
    def start(
        cls,
        command: Sequence[str],
        rank: int,
        variables: Mapping[str, str],
        fd: int,
        log_dir: Path,
    ) -> _Rank:
        report = FailureReport()
        log = log_dir / f"rank_{rank}.log" if rank else None
        output: IO[bytes] | None = log.open("ab") if log else None
        try:
            process = subprocess.Popen(
                command,
                env=os.environ | variables | launch_variables(fd, report),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(fd, report.descriptor),
                # its own group: Ctrl-C reaches the launcher alone, and all that a rank started ends with it
                start_new_session=True,
            )
            return cls(rank, process, report, log, output.tell() if output else 0)
        finally:
            if output:
                output.close()

    def poll(self) -> None:
        """Notice the end of the process, or a failure that it reported before ending."""
        if self.ended_at is None and self.process.poll() is not None:
            self.ended_at = time.time()
        if not self.failure:
            self.failure = self.report.read()

    @property
    def has_stopped(self) -> bool:
        """Whether it ended on request."""
        asked = (-signal.SIGTERM, -signal.SIGUSR1) if self.was_asked else ()
        return self.process.returncode in (STOPPED, *asked)

    @property
    def has_failed(self) -> bool:
        if self.has_stopped:
            return False
        return bool(self.failure) or (not self.was_ended and bool(self.process.returncode))

    @property
    def exit_code(self) -> int:
        code = self.failure.get("exit_code", self.process.returncode) or 0
        return 128 - code if code < 0 else code

    def blame(self) -> tuple[bool, bool, float]:
        """Smallest for the rank to name: a user error or a kill from outside comes before a lost peer."""
        was_killed = (self.process.returncode or 0) < 0 and not self.was_ended
        explains = self.failure.get("exit_code") == 2 or was_killed
        is_consequence = bool(self.failure.get("is_consequence"))
        return not explains, is_consequence, self.failure.get("time", self.ended_at or time.time())

    def ask(self, number: int) -> None:
        """Pass on a request to stop, to the rank alone: it ends what it started in order."""
        self.was_asked = True
        if self.ended_at is None:
            self._send(number)

    def interrupt(self) -> None:
        self.was_ended = self.was_ended or self.ended_at is None
        self._send(signal.SIGINT)

    def end(self) -> None:
        """SIGHUP, which ends a rank at once but in order, then SIGTERM to what else is in its group."""
        self.was_ended = self.was_ended or self.ended_at is None
        self._send(signal.SIGHUP)
        self._send_group(signal.SIGTERM)

    def kill(self) -> None:
        self.was_ended = self.was_ended or self.ended_at is None
        self._send_group(signal.SIGKILL)

    def _send(self, number: int) -> None:
        with suppress(ProcessLookupError):
            self.process.send_signal(number)

    def _send_group(self, number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def clean_up(self) -> None:
        """End what is left of the group: helpers that outlived their rank, or all if we failed ourselves."""
        deadline = time.monotonic() + (FAILURE_GRACE_S if self.process.poll() is not None else 0.0)
        while time.monotonic() < deadline and _group_exists(self.process.pid):
            time.sleep(POLL_S)
        self.kill()
        self.process.wait()
        self.poll()
        self.report.close()

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
    """Collect the signals that end a run instead of letting them interrupt the bookkeeping."""
    caught = _Caught()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    before = {n: signal.signal(n, caught.handle) for n in numbers}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Course:
    """How the ranks are brought to their end: by themselves, on request, or because one of them failed."""

    def __init__(self, ranks: Sequence[_Rank], caught: _Caught, *, stop_grace_s: float | None) -> None:
        self._ranks, self._caught, self._stop_grace_s = ranks, caught, stop_grace_s
        self._state = "running"
        self._began = 0.0
        self._steps: list[tuple[float, Callable[[_Rank], None]]] = []

    def run(self) -> None:
        """Until every rank has ended."""
        while True:
            for rank in self._ranks:
                rank.poll()
            if all(rank.ended_at is not None for rank in self._ranks):
                return
            self._decide()
            while self._steps and time.monotonic() - self._began >= self._steps[0][0]:
                _, action = self._steps.pop(0)
                for rank in self._ranks:
                    action(rank)
            time.sleep(POLL_S)

    def _decide(self) -> None:
        numbers = self._caught.numbers
        if len(numbers) > 1:
            if self._state != "second signal":
                # whoever presses Ctrl-C again has waited long enough
                self._begin("second signal", 0.0, kills=numbers[1] == signal.SIGINT)
            elif len(numbers) > 2:
                self._steps = [(0.0, _Rank.kill)]
        elif self._state in ("running", "stopping") and _failures(self._ranks):
            self._begin("failure", FAILURE_GRACE_S)
        elif self._state == "running" and numbers:
            self._pass_on(numbers[0])
        elif self._state == "running" and any(rank.has_stopped for rank in self._ranks):
            self._begin("stopping", TOGETHER_S, partial(_Rank.ask, number=signal.SIGTERM))

    def _pass_on(self, number: int) -> None:
        if number == signal.SIGINT:
            self._begin("interrupt", INTERRUPT_GRACE_S, _Rank.interrupt)
        elif number == signal.SIGHUP or self._stop_grace_s is None:
            self._begin("end", 0.0)
        else:
            self._begin("stopping", self._stop_grace_s, partial(_Rank.ask, number=number))

    def _begin(
        self, state: str, grace_s: float, first: Callable[[_Rank], None] | None = None, *, kills: bool = False
    ) -> None:
        """From now on: `first` at once, after `grace_s` seconds the end of all, then the end by force."""
        self._state, self._began = state, time.monotonic()
        self._steps = [(0.0, first)] if first else []
        self._steps += [(grace_s, _Rank.end)] * (not kills)
        self._steps += [(grace_s + STOP_GRACE_S * (not kills), _Rank.kill)]


def _conclude(ranks: Sequence[_Rank], caught: _Caught, log_dir: Path, *, saves: bool) -> int:
    """Print what went wrong, once, and return the exit code."""
    number = caught.numbers[0] if caught.numbers else None
    if number == signal.SIGINT:
        print(f"interrupted: all {len(ranks)} ranks have ended", file=sys.stderr)
        return 128 + number
    failed = _failures(ranks)
    was_asked = number is not None or any(rank.has_stopped for rank in ranks)
    # that a rank gave up after a request in vain is told of all of them
    if was_asked and all(rank.exit_code == TERMINATED for rank in failed):
        if not failed and not any(rank.was_ended for rank in ranks):
            print(f"stopped: all {len(ranks)} ranks have ended", file=sys.stderr)
            return STOPPED
        print(_terminated(ranks, caught, log_dir, saves=saves), file=sys.stderr)
        return 128 + number if number == signal.SIGHUP else TERMINATED
    if not failed:
        return 0
    first = min(failed, key=_Rank.blame)
    how = f"exit code {first.exit_code}"
    if (first.process.returncode or 0) < 0 and not first.failure:
        how = f"killed by {signal.Signals(-first.process.returncode).name}"
        if (
            phase := read_phase_file(log_dir / phase_name(first.rank))
        ) is not None and phase.pid == first.process.pid:
            how += f" in {phase}"
    words = "\n".join("  " + line for line in first.last_words().splitlines())
    where = f"\nlog: {first.log}" if first.log else ""
    title = f"error: rank {first.rank} of {len(ranks)} failed first ({how})"
    print(f"{title}\n{words}{where}", file=sys.stderr, flush=True)
    return first.exit_code


def _failures(ranks: Sequence[_Rank]) -> list[_Rank]:
    """Ranks that failed, but not those that only lost one that stopped on request."""
    has_stopped = any(rank.has_stopped for rank in ranks)
    return [r for r in ranks if r.has_failed and not (has_stopped and r.failure.get("is_consequence"))]


def _terminated(ranks: Sequence[_Rank], caught: _Caught, log_dir: Path, *, saves: bool) -> str:
    """Why ranks that were asked to stop ended without a checkpoint of their own."""
    text = f"terminated: all {len(ranks)} ranks have ended"
    if not saves:
        return f"{text}; {NOTHING_SAVED}"
    if signal.SIGHUP in caught.numbers[:1]:
        return text
    why = "a second signal came" if len(caught.numbers) > 1 else "run.stop_grace_s was over"
    phase = read_phase_file(log_dir / phase_name(0))
    return f"{text}; {why} before the next step border ({phase}); --resume continues from the last checkpoint"


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


@contextmanager
def held_port() -> Iterator[int]:
    """A port of this machine that until the end only those get who ask for it by its number.

    For a process that is only being started: till it listens there, seconds later, others would be given the port.
    """
    with socket.socket() as holder:
        # it never listens; Linux then lets others listen who set the same, as torch does
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])


def free_port() -> int:
    """A port of this machine that nothing listens on now, for this process at once; see `held_port`."""
    with held_port() as port:
        return port


def _group_exists(pgid: int) -> bool:
    try:
        os.killpg(pgid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True

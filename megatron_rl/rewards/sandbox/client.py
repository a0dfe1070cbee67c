"""The supervisor as the process that grades sees it: start it, hand it jobs, replace it when it is lost."""

from __future__ import annotations

import json
import select
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import megatron_rl
from megatron_rl.errors import RewardError
from megatron_rl.rewards.sandbox.jobs import Job, Outcome, Status, Unpacker, pack_job, unpack_outcome

_MODULE = "megatron_rl.rewards.sandbox.supervisor"
_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 10.0
_ATTEMPTS = 3  # at a job that the sandbox failed


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What a supervisor is started with. `python` None: the system's own.

    One that says nothing for `silence_s` beyond the wall time of a job is lost. A slot whose uid still has processes
    `vacate_s` after its run gets another. `allow_weak`: go on without bubblewrap where there is none.
    """

    slots: int = 2
    first_uid: int = 60800
    num_uids: int = 384
    python: str | None = None
    silence_s: float = 30.0
    vacate_s: float = 5.0
    allow_weak: bool = False


class _Lost(Exception):
    """The supervisor ended, fell silent or talks nonsense."""


class Sandbox:
    """`run` from any thread; one batch goes at a time. The supervisor starts with the first batch, or `start`."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._supervisor: _Supervisor | None = None
        self._is_closed = False
        self._num_restarts = 0

    def start(self) -> dict[str, Any]:
        """What the supervisor says of itself; starts it where it does not run. Raises RewardError if it refuses."""
        with self._lock:
            return self._ready().described

    def run(self, jobs: Sequence[Job]) -> list[Outcome]:
        """One outcome per job, in order; SANDBOX_ERROR only after three attempts. Raises RewardError if none starts."""
        with self._lock:
            outcomes: dict[int, Outcome] = {}
            attempts = dict.fromkeys(range(len(jobs)), 0)
            left = deque(attempts)
            while left:
                batch, left = list(left), deque()
                self._run_once(jobs, batch, outcomes)
                for index in batch:
                    attempts[index] += 1
                    outcome = outcomes[index]
                    if outcome.status is Status.SANDBOX_ERROR and attempts[index] < _ATTEMPTS:
                        left.append(index)
            return [replace(outcomes[index], id=job.id) for index, job in enumerate(jobs)]

    def close(self) -> None:
        """End the supervisor and with it every sandbox; safe to call twice."""
        self._is_closed = True
        supervisor = self._supervisor
        if supervisor is not None:
            # from here on a batch that still runs hears that it is gone
            supervisor.hang_up()
        with self._lock:
            if self._supervisor is not None:
                self._supervisor.end()
            self._supervisor = None

    @property
    def pid(self) -> int | None:
        """Of the supervisor, where one runs."""
        supervisor = self._supervisor
        return supervisor.process.pid if supervisor is not None else None

    @property
    def num_restarts(self) -> int:
        """Supervisors that were lost and replaced."""
        return self._num_restarts

    def _run_once(self, jobs: Sequence[Job], batch: Sequence[int], outcomes: dict[int, Outcome]) -> None:
        """An outcome for each of the batch; jobs that a lost supervisor held get another, twice at most."""
        waiting, held = deque(batch), dict.fromkeys(batch, 0)
        flying: dict[int, Job] = {}
        while waiting or flying:
            try:
                supervisor = self._ready()
                while waiting and len(flying) < 2 * self._settings.slots:
                    index = waiting.popleft()
                    flying[index] = replace(jobs[index], id=index)
                    supervisor.send(pack_job(flying[index]))
                patience_s = self._settings.silence_s + max(job.limits.wall_s for job in flying.values())
                for outcome in supervisor.receive(patience_s):
                    del flying[outcome.id]
                    outcomes[outcome.id] = outcome
            except _Lost as loss:
                self._discard()
                if self._is_closed:
                    raise RewardError("sandbox: closed while it was grading") from None
                self._num_restarts += 1
                for index in sorted(flying, reverse=True):
                    held[index] += 1
                    if held[index] < _ATTEMPTS:
                        waiting.appendleft(index)
                    else:
                        outcomes[index] = Outcome(
                            id=index, status=Status.SANDBOX_ERROR, detail=f"supervisor lost: {loss}"
                        )
                flying.clear()

    def _ready(self) -> _Supervisor:
        if self._is_closed:
            raise RewardError("sandbox: used after close")
        if self._supervisor is None:
            self._supervisor = _Supervisor(self._settings)
        return self._supervisor

    def _discard(self) -> None:
        if self._supervisor is not None:
            self._supervisor.end()
        self._supervisor = None


class _Supervisor:
    """One process and our end of its socket. Raises RewardError if it does not come up."""

    def __init__(self, settings: Settings) -> None:
        self._silence_s = settings.silence_s
        self._socket, theirs = socket.socketpair()
        self._unpacker = Unpacker()
        values = asdict(settings)
        del values["silence_s"]
        with theirs:
            # the folder that holds the package as working directory: `-m` finds it from wherever we were started
            self.process = subprocess.Popen(
                [sys.executable, "-m", _MODULE, str(theirs.fileno()), json.dumps(values)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                cwd=Path(megatron_rl.__file__).resolve().parent.parent,
                start_new_session=True,
            )
        try:
            head, _ = self._messages(_START_TIMEOUT_S)[0]
        except _Lost as loss:
            self.end()
            raise RewardError(
                f"sandbox: its supervisor did not start ({loss}); run `{sys.executable} -m {_MODULE} 0 '{{}}'` by hand"
            ) from None
        if "refused" in head:
            self.end()
            raise RewardError(f"sandbox: {head['refused']}")
        self.described: dict[str, Any] = head["ready"]

    def send(self, message: bytes) -> None:
        try:
            # it always reads: what it cannot run yet waits in its own memory
            self._socket.settimeout(self._silence_s)
            self._socket.sendall(message)
        except OSError as error:
            raise _Lost(f"cannot be written to: {error}") from None

    def receive(self, timeout_s: float) -> list[Outcome]:
        """At least one outcome. Raises _Lost."""
        return [unpack_outcome(head, blob) for head, blob in self._messages(timeout_s)]

    def hang_up(self) -> None:
        """Let it know that nobody wants anything any more. From any thread."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def end(self) -> None:
        """Wait for it to end its sandboxes and itself; kill it if it does not, which ends them too."""
        self.hang_up()
        try:
            self.process.wait(min(_STOP_TIMEOUT_S, self._silence_s))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._socket.close()

    def _messages(self, timeout_s: float) -> list[tuple[dict[str, Any], bytes]]:
        deadline = time.monotonic() + timeout_s
        found: list[tuple[dict[str, Any], bytes]] = []
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        while not found:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not poll.poll(left_s * 1000):
                raise _Lost(f"said nothing for {timeout_s:g} s")
            try:
                data = self._socket.recv(1 << 20)
                found = self._unpacker.feed(data)
            except (OSError, ValueError) as error:
                raise _Lost(f"cannot be read: {error}") from None
            if not data:
                raise _Lost(f"exit code {self.process.poll()}")
        return found

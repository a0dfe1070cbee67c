"""The process that runs sandboxes: N slots, each with its own uid, jobs in and outcomes out over one socket.

Small and of one thread: candidates die with the thread that started them. It is a sub-reaper, and gives a slot its
next job only when nothing of the one before is left. It ends when its socket does, or the process that started it.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import select
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_rl.errors import RewardError
from megatron_rl.rewards.sandbox.bubblewrap import Bubblewrap, find_bubblewrap
from megatron_rl.rewards.sandbox.interpreter import find_interpreter
from megatron_rl.rewards.sandbox.jobs import (
    Job,
    Status,
    Unpacker,
    pack,
    pack_outcome,
    unpack_job,
)
from megatron_rl.rewards.sandbox.processes import (
    become_subreaper,
    children,
    is_sandbox,
    kill,
    processes_of,
)
from megatron_rl.rewards.sandbox.run import Launch, Run
from megatron_rl.rewards.sandbox.seccomp import build_filter

_TICK_S = 0.1
_IDLE_S = 1.0  # between two looks at whether whoever started us still lives
_STOP_WITHIN_S = 5.0


class Uids:
    """Unprivileged uids of this supervisor alone, out of a range that all supervisors of the machine share.

    A sandbox that was killed together with its supervisor in the middle of its own start can stay behind, asleep and
    empty. Its uid is nobody's then: whoever claims it next ends it.
    """

    def __init__(self, first: int, count: int, bubblewrap: str) -> None:
        self._bubblewrap = bubblewrap
        self._free = deque(range(first, first + count))
        self._place = f"uids {first} to {first + count - 1}"
        self._claims: list[socket.socket] = []

    def take(self) -> int:
        """A uid with no process, no name and no other supervisor. Raises RewardError when none is left."""
        while self._free:
            uid = self._free.popleft()
            if not _has_name(uid) and self._claim(uid) and self._is_empty(uid):
                return uid
        raise RewardError(
            f"sandbox.first_uid: none of the {self._place} is free; set it to the start of a range of user ids "
            f"that nothing on this machine uses"
        )

    def _is_empty(self, uid: int) -> bool:
        left = processes_of({uid})
        for pid in left:
            if is_sandbox(pid, self._bubblewrap):
                kill(pid)
        # what was killed just now is gone when the next one looks
        return not left

    def _claim(self, uid: int) -> bool:
        # an abstract address: the kernel frees it when we end, however we do
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            claim.bind(f"\0megatron_rl-sandbox-uid-{uid}")
        except OSError:
            claim.close()
            return False
        self._claims.append(claim)
        return True


def _has_name(uid: int) -> bool:
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True


@dataclass(slots=True)
class Slot:
    uid: int | None
    run: Run | None = None
    leaving_since: float | None = None  # its run is over, but its uid still has processes


class Supervisor:
    """Serves one socket. Raises RewardError at the start for what keeps it from running anything."""

    def __init__(
        self,
        control: socket.socket,
        *,
        slots: int,
        first_uid: int,
        num_uids: int,
        python: str | None,
        vacate_s: float,
        allow_weak: bool,
    ) -> None:
        is_root = os.geteuid() == 0
        bubblewrap = _bubblewrap(allow_weak=allow_weak, is_root=is_root)
        interpreter = find_interpreter(python)
        self._launch = Launch(
            bubblewrap=bubblewrap,
            interpreter=interpreter,
            seccomp=build_filter(),
            processes_before=0 if is_root else len(processes_of({os.geteuid()})) + slots * 64,
        )
        self._texts = self._launch.texts()
        self._uids = Uids(first_uid, num_uids, bubblewrap.path if bubblewrap else "") if is_root else None
        self._slots = [Slot(uid=self._uids.take() if self._uids else None) for _ in range(slots)]
        self._vacate_s = vacate_s
        self._control, self._unpacker = control, Unpacker()
        self._waiting: deque[Job] = deque()
        self._replies = bytearray()
        self._parent = os.getppid()
        self._is_open = True
        become_subreaper()
        self._wakeup, wakeup = os.pipe()
        for end in (self._wakeup, wakeup):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._stop)
        control.setblocking(False)
        self._send(pack({"ready": self.describe()}))

    def describe(self) -> dict[str, object]:
        """What isolates, for whoever started us."""
        return {
            "pid": os.getpid(),
            "bubblewrap": self._launch.bubblewrap.version if self._launch.bubblewrap else None,
            "python": self._launch.interpreter.version,
            "uids": [slot.uid for slot in self._slots if slot.uid is not None],
            "seccomp": self._launch.seccomp is not None and self._launch.bubblewrap is not None,
        }

    def serve(self) -> None:
        """Until the other end is gone or a signal says so; nothing is left behind then."""
        try:
            while self._is_open and os.getppid() == self._parent:
                self._fill()
                self._wait()
                self._reap()
                self._advance()
        finally:
            self._shut_down()

    def _stop(self, *_: object) -> None:
        self._is_open = False

    def _fill(self) -> None:
        for slot in self._slots:
            if slot.run is None and slot.leaving_since is None and self._waiting:
                slot.run = Run(self._waiting.popleft(), self._launch, self._texts, slot.uid)
                slot.run.start()

    def _wait(self) -> None:
        """Until something happens, then hand out what was read."""
        poll = select.poll()
        poll.register(self._control, select.POLLIN | (select.POLLOUT if self._replies else 0))
        poll.register(self._wakeup, select.POLLIN)
        readers = {fd: slot.run for slot in self._slots if slot.run for fd in slot.run.descriptors}
        for descriptor in readers:
            poll.register(descriptor, select.POLLIN)
        runs = [slot.run for slot in self._slots if slot.run]
        is_busy = runs or any(slot.leaving_since is not None for slot in self._slots)
        next_end = min((run.deadline - time.monotonic() for run in runs), default=_IDLE_S)
        timeout_s = max(0.001, min(next_end, _TICK_S)) if is_busy else _IDLE_S
        for descriptor, event in poll.poll(timeout_s * 1000):
            if descriptor == self._wakeup:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wakeup, 4096)
            elif descriptor == self._control.fileno():
                self._talk(event)
            else:
                readers[descriptor].read(descriptor)

    def _talk(self, event: int) -> None:
        try:
            if event & select.POLLOUT:
                self._flush()
            if event & (select.POLLIN | select.POLLHUP | select.POLLERR):
                data = self._control.recv(1 << 20)
                if not data:
                    self._is_open = False
                for head, blob in self._unpacker.feed(data):
                    self._waiting.append(unpack_job(head, blob))
        except BlockingIOError:
            pass
        except OSError:
            self._is_open = False

    def _send(self, message: bytes) -> None:
        self._replies += message
        try:
            self._flush()
        except BlockingIOError:
            pass
        except OSError:
            self._is_open = False

    def _flush(self) -> None:
        while self._replies:
            del self._replies[: self._control.send(self._replies)]

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            code = os.waitstatus_to_exitcode(status)
            for slot in self._slots:
                if slot.run is not None and slot.run.reaped(pid, code):
                    break

    def _advance(self) -> None:
        now = time.monotonic()
        for slot in self._slots:
            if slot.run is not None:
                if not slot.run.is_ending or not slot.run.is_over():
                    slot.run.tick(now)
                if slot.run.is_over():
                    self._end_orphans()
                    self._send(pack_outcome(slot.run.outcome()))
                    slot.run, slot.leaving_since = None, now
            if slot.leaving_since is not None:
                self._vacate(slot, now)

    def _end_orphans(self) -> None:
        """A sandbox killed in the middle of its start leaves a process that nobody told us of: now our child."""
        known = {pid for slot in self._slots if slot.run for pid in slot.run.pids}
        for pid in children() - known:
            kill(pid)

    def _vacate(self, slot: Slot, now: float) -> None:
        """Free the slot once its uid has no process; take another uid if that does not come to pass."""
        left = processes_of({slot.uid}) if slot.uid is not None else {}
        if not left:
            slot.leaving_since = None
            return
        for pid in left:
            kill(pid)
        assert slot.leaving_since is not None
        if now - slot.leaving_since > self._vacate_s:
            assert self._uids is not None
            with contextlib.suppress(RewardError):
                slot.uid, slot.leaving_since = self._uids.take(), None

    def _shut_down(self) -> None:
        self._waiting.clear()
        deadline = time.monotonic() + _STOP_WITHIN_S
        for slot in self._slots:
            if slot.run is not None:
                slot.run.end(Status.SANDBOX_ERROR, "stopped")
        while time.monotonic() < deadline and any(
            slot.run and not slot.run.is_over() for slot in self._slots
        ):
            self._reap()
            time.sleep(0.005)
        while time.monotonic() < deadline and children():
            self._end_orphans()
            self._reap()
            time.sleep(0.005)


def _bubblewrap(*, allow_weak: bool, is_root: bool) -> Bubblewrap | None:
    """None where there is none and somebody asked to go on by name. Raises RewardError."""
    found = find_bubblewrap()
    if isinstance(found, Bubblewrap):
        return found
    if allow_weak and is_root:
        return None
    advice = "install it, such as: apt-get install bubblewrap"
    if not allow_weak:
        advice += "; or, only for programs that you trust, set sandbox.allow_weak: true"
    elif not is_root:
        advice += "; sandbox.allow_weak needs root, since a program could end all processes of our own uid"
    raise RewardError(f"{found}, without which programs of a policy are not run; {advice}")


def main(arguments: Sequence[str]) -> int:
    """`DESCRIPTOR SETTINGS`: the socket to serve, and the rest as JSON."""
    control = socket.socket(fileno=int(arguments[0]))
    settings = json.loads(arguments[1])
    # a terminal's interrupt is for whoever started us, who then closes the socket
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        supervisor = Supervisor(control, **settings)
    except RewardError as error:
        control.setblocking(True)
        with contextlib.suppress(OSError):
            control.sendall(pack({"refused": str(error)}))
        return 1
    supervisor.serve()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

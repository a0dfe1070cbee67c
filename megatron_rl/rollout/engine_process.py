"""One engine process seen from its owner: start, ask, notice its death, stop. Does not import vLLM."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_rl.errors import EngineError, LostEngineError, ReshardError
from megatron_rl.rollout.channel import STARTING, Channel, setting_behind
from megatron_rl.rollout.devices import node_id
from megatron_rl.rollout.engine_scratch import EngineScratch
from megatron_rl.rollout.process_group import is_stopped, members, stopped_members
from megatron_rl.rollout.shared_memory import remove_shared_memory, shared_memory_of_group
from megatron_rl.rollout.wire import Message, WireClosed, WireTimeout

_LOG_TAIL_LINES = 12
_MAX_SLICE_S = 1.0
STOP_GRACE_S = 5.0


class EngineProcess:
    """Owns the process group of one replica. Commands go one at a time; every wait is bounded.

    `devices` are positions among the GPUs that this process is shown, None without one. `host` is how the
    trainer calls this machine, for messages that it will read elsewhere.
    """

    def __init__(
        self, replica: int, log_path: Path, *, devices: Sequence[int] | None = None, host: str | None = None
    ) -> None:
        self.replica, self.log_path, self.host = replica, log_path, host
        self.devices = None if devices is None else tuple(devices)
        self.node = node_id()
        self._shared_memory: set[Path] = set()
        # vLLM leaves files behind when it is killed
        self._scratch = EngineScratch()
        ours, theirs = socket.socketpair()
        self._channel = Channel(ours, self._explain)
        self._life, their_life = socket.socketpair()
        self._silence: str | None = None
        self._is_ready = False
        log_path.parent.mkdir(parents=True, exist_ok=True)
        fds = (theirs.fileno(), their_life.fileno())
        with open(log_path, "ab") as log, theirs, their_life:
            self._log_start = log.tell()  # what stands before is of earlier processes
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "megatron_rl.rollout.vllm_worker",
                    "--fd",
                    str(fds[0]),
                    "--life-fd",
                    str(fds[1]),
                    "--scratch",
                    str(self._scratch.path),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=fds,
                start_new_session=True,  # its process group is its own: nobody else dies with it
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def name(self) -> str:
        return f"engine replica {self.replica}{f' on {self.host}' if self.host else ''} (pid {self.pid})"

    @property
    def lost(self) -> str | None:
        """Why it has to be replaced; None as long as it answers."""
        return self._channel.lost

    def start(self, message: Message, *, timeout_s: float) -> None:
        """Send the start message and wait until it is ready. Raises EngineError with the end of the log.

        From then on its process has to give a sign of life every `heartbeat_timeout_s` of the message, or is killed:
        before, importing and compiling may keep it from that.
        """
        self._exchange({**message, "devices": self.devices}, timeout_s=timeout_s, doing=STARTING)
        self._is_ready = True
        self._shared_memory = shared_memory_of_group(self.pid)
        self._scratch.note_shared_memory(self._shared_memory)
        # vLLM's workers among them: their leader alone gives signs of life
        pids = [int(process.name) for process in members(self.pid)]
        threading.Thread(
            target=self._watch, args=(pids, float(message["heartbeat_timeout_s"])), daemon=True
        ).start()

    def ask(self, cmd: str, *, timeout_s: float, **fields: Any) -> Any:
        """One command and its result. Raises what the engine says, and LostEngineError if it is lost."""
        return self._exchange({"cmd": cmd, **fields}, timeout_s=timeout_s, doing=cmd)["result"]

    def give_up(self, reason: str) -> LostEngineError:
        """It cannot be relied on any more: `lost` from now on."""
        return self._channel.give_up(reason)

    def close(self) -> None:
        """Shutdown, then SIGTERM, then SIGKILL of its own process group; the last at once for one that is lost or not
        ready yet, which would hear nothing before it is.

        Safe to call twice.
        """
        if not self._is_ready:
            self.kill()
        if self._process.poll() is None and self._channel.is_open:
            with contextlib.suppress(EngineError, ReshardError):
                self._exchange({"cmd": "shutdown"}, timeout_s=STOP_GRACE_S, doing="shutdown")
                self._wait(STOP_GRACE_S)
        if self._process.poll() is None and self.lost is None:
            self._signal(signal.SIGTERM)
            self._signal(signal.SIGCONT)  # a stopped process hears nothing until it goes on
            self._wait(STOP_GRACE_S)
        self.kill()

    def kill(self) -> None:
        """SIGKILL of its own process group, whose workers may have outlived their leader. Safe to call twice."""
        # also after the end of the leader, whose workers may still be there
        self._shared_memory |= shared_memory_of_group(self.pid)
        self._signal(signal.SIGKILL)
        self._wait(STOP_GRACE_S)
        remove_shared_memory(self._shared_memory)
        self._scratch.remove()
        self._channel.close()
        # wakes the thread that listens there
        with contextlib.suppress(OSError):
            self._life.shutdown(socket.SHUT_RDWR)
        self._life.close()

    def _watch(self, pids: Sequence[int], limit_s: float) -> None:
        """Kill the process group once it was silent, or a process of it stopped, for `limit_s`.

        Whoever waits for its answer hears of it then.
        """
        slice_s, silent_s = min(_MAX_SLICE_S, limit_s / 4), 0.0
        try:
            self._life.settimeout(slice_s)
            while silent_s < limit_s:
                try:
                    if not self._life.recv(4096):
                        return
                    silent_s = silent_s + slice_s if any(map(is_stopped, pids)) else 0.0
                except TimeoutError:
                    # slice by slice: while we are stopped ourselves no time passes for it
                    silent_s += slice_s
        except OSError:
            return  # it was closed
        stopped = stopped_members(self.pid)
        state = f"process {stopped[0]} stopped (state T)" if stopped else "gave no sign of life"
        self._silence = f"{state} for {limit_s:g} s (engine.heartbeat_timeout_s)"
        self._signal(signal.SIGKILL)

    def _exchange(self, message: Message, *, timeout_s: float, doing: str) -> Message:
        answer = self._channel.exchange(message, name=self.name, timeout_s=timeout_s, doing=doing)
        if error := answer.get("error"):
            if error["kind"] == "reshard":
                raise ReshardError(f"{self.name}: {error['message']}")
            tail = self._log_tail() if error["kind"] == "start" else f"log {self.log_path}"
            text = f"{self.name}: {doing} failed: {error['message']}; {tail}"
            raise self._channel.give_up(text) if error["kind"] == "crash" else EngineError(text)
        return answer

    def _explain(self, error: EngineError, timeout_s: float, doing: str) -> str:
        if isinstance(error, WireTimeout):
            stopped = stopped_members(self.pid)
            why = (
                f"its process {stopped[0]} is stopped (state T)"
                if stopped
                else f"raise {setting_behind(doing)} if it needs longer"
            )
            return (
                f"{self.name}: did not answer within {timeout_s:g} s while {doing}; {why}; {self._log_tail()}"
            )
        if isinstance(error, WireClosed):
            self._wait(2.0)
            if self._silence is not None:
                return f"{self.name}: {self._silence} while {doing}, so it was killed; {self._log_tail()}"
            return f"{self.name}: died ({self._exit_status()}) while {doing}; {self._log_tail()}"
        return f"{self.name}: answered what is no answer while {doing} ({error}); {self._log_tail()}"

    def _exit_status(self) -> str:
        code = self._process.poll()
        if code is None:
            return "connection closed, process still running"
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def _log_tail(self) -> str:
        try:
            with open(self.log_path, "rb") as log:
                log.seek(self._log_start)
                lines = log.read().decode(errors="replace").splitlines()
        except OSError as error:
            return f"log {self.log_path} cannot be read: {error}"
        tail = "\n".join("    " + line[:300] for line in lines[-_LOG_TAIL_LINES:])
        return f"log {self.log_path} ends with\n{tail}"

    def _signal(self, number: signal.Signals) -> None:
        # the group may outlive its leader but never its last member
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def _wait(self, seconds: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

"""What `megatron-rl engine` runs: starts engine processes on this machine for the trainer of one run at a time.

Each connection carries one replica: what it asks goes to an `EngineProcess`, what that says goes back, and the
process group ends with the connection, however that ended. `rollout.remote_engine` is the other end.
"""

from __future__ import annotations

import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.errors import EngineError, LostEngineError, MegatronRLError, ReshardError
from megatron_rl.recipe.hosts import HostPort
from megatron_rl.rollout.devices import node_id, versions
from megatron_rl.rollout.engine_process import EngineProcess
from megatron_rl.rollout.handshake import HANDSHAKE_S, MAX_HANDSHAKE_BYTES, admit, read_secret
from megatron_rl.rollout.model_dir import check_model
from megatron_rl.rollout.wire import (
    DEAD_AFTER_S,
    Message,
    WireClosed,
    keep_alive,
    recv_message,
    send_message,
)

TURN_S = 5.0  # how long a new run waits for the engines of the last one to end
_END_S = 30.0


def run_engine_host(address: HostPort, *, secret_file: Path | None, log_dir: Path) -> None:
    """Serve until Ctrl-C or SIGTERM; then no process of ours is left. Raises EngineError if it cannot begin."""
    if versions()["vllm"] is None:
        raise EngineError("engine host: vLLM is not installed here; see launch/setup.sh")
    secret = read_secret(secret_file) if secret_file is not None else None
    stop = threading.Event()
    with listen(address, has_secret=secret is not None) as listener:
        host = EngineHost(listener, secret=secret, log_dir=log_dir, gpus=_num_gpus(), say=_say)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # for good: this process ends with it, and a second one must not break into the end
            signal.signal(number, lambda *_: stop.set())
        host.serve(stop)
    _say("stopped")


def listen(address: HostPort, *, has_secret: bool) -> socket.socket:
    """A listening socket. Raises EngineError if it is taken, or if others could use it without a secret."""
    if not has_secret and not address.is_loopback():
        raise EngineError(
            f"--listen: {address} can be reached from other machines, and whoever reaches it can start processes here; "
            f"give --secret-file FILE, and engine.secret_file in the recipe, or listen on 127.0.0.1"
        )
    try:
        family, kind, *_, where = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind)
        try:
            # connections of the last run that linger must not keep the port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(where)
            listener.listen()
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise EngineError(
            f"--listen: cannot listen on {address} ({error.strerror}); it must be an address of this machine "
            f"with a port that is free"
        ) from error
    return listener


@dataclass(slots=True)
class _Run:
    """Whose engines these are: `id` is the trainer's, `label` is for people; `connections` are one per replica."""

    id: str
    label: str
    since: str
    connections: int = 0


class EngineHost:
    """Attends to each connection on a thread of its own. `say` gets one line about whatever happens."""

    def __init__(
        self,
        listener: socket.socket,
        *,
        secret: bytes | None,
        log_dir: Path,
        gpus: int = 0,
        say: Callable[[str], None],
    ) -> None:
        self._listener, self._secret, self._log_dir, self._say = listener, secret, log_dir, say
        self._facts: dict[str, Any] = {
            "node": node_id(),
            "gpus": gpus,
            "versions": versions(),
        }
        self._run: _Run | None = None
        self._connections: dict[threading.Thread, socket.socket] = {}
        self._is_ending = False
        self._changed = threading.Condition()

    def serve(self, stop: threading.Event) -> None:
        """Accept connections until `stop`, then end everything that was started for them."""
        host, port, *_ = self._listener.getsockname()
        installed = ", ".join(f"{name} {version}" for name, version in self._facts["versions"].items())
        self._say(
            f"listening on {HostPort(host, port)} with {installed}, {self._facts['gpus']} GPUs; logs in {self._log_dir}"
        )
        self._listener.settimeout(0.2)
        try:
            while not stop.is_set():
                with suppress(TimeoutError):
                    sock, peer = self._listener.accept()
                    self._attend_apart(sock, HostPort(*peer[:2]))
        finally:
            self._end_all()

    def _attend_apart(self, sock: socket.socket, peer: HostPort) -> None:
        thread = threading.Thread(target=self._attend, args=(sock, peer), name=f"trainer {peer}", daemon=True)
        with self._changed:
            self._connections[thread] = sock
        thread.start()

    def _end_all(self) -> None:
        with self._changed:
            self._is_ending = True
            connections = dict(self._connections)
            self._changed.notify_all()
        for sock in connections.values():
            # its thread sees the end of the stream and ends what it started
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        deadline = time.monotonic() + _END_S
        for thread in connections:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _attend(self, sock: socket.socket, peer: HostPort) -> None:
        try:
            with sock:
                keep_alive(sock)
                admit(sock, self._secret, self._facts)
                self._answer_first(sock, peer)
        except EngineError as error:
            self._say(f"{peer}: {error}")
        finally:
            with self._changed:
                del self._connections[threading.current_thread()]

    def _answer_first(self, sock: socket.socket, peer: HostPort) -> None:
        """A trainer opens a replica, or only asks whether it could."""
        try:
            message = recv_message(sock, timeout_s=HANDSHAKE_S, max_bytes=MAX_HANDSHAKE_BYTES)
        except WireClosed:
            return  # it only wanted to know who we are
        try:
            check_model(message["model"])
            if message["cmd"] == "check":
                send_message(sock, {"result": None}, timeout_s=DEAD_AFTER_S)
                return
            with self._part_of(message["run"], f"{message['label']} from {peer}"):
                self._open(sock, message)
        except EngineError as error:
            send_message(sock, {"error": {"kind": "refused", "message": str(error)}}, timeout_s=DEAD_AFTER_S)

    @contextmanager
    def _part_of(self, run: str, label: str) -> Iterator[None]:
        """Hold the host for `run`. Raises EngineError, naming the other, while it belongs to another run."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_ending or self._run is None or self._run.id == run, timeout=TURN_S
            )
            if self._is_ending:
                raise EngineError("is being stopped")
            if self._run is None:
                self._run = _Run(id=run, label=label, since=time.strftime("%Y-%m-%d %H:%M:%S %z"))
                self._say(f"run {label} began")
            elif self._run.id != run:
                raise EngineError(
                    f"busy with run {self._run.label} since {self._run.since}; wait for its end, or start another "
                    f"`megatron-rl engine` on another port. A trainer that is gone is noticed within {DEAD_AFTER_S:g} s"
                )
            self._run.connections += 1
        try:
            yield
        finally:
            with self._changed:
                assert self._run is not None
                self._run.connections -= 1
                if self._run.connections == 0:
                    self._say(f"run {self._run.label} ended; waiting for the next")
                    self._run = None
                    self._changed.notify_all()

    def _open(self, sock: socket.socket, message: Message) -> None:
        replica, devices = message["replica"], message["devices"]
        log = self._log_dir / f"engine_{replica}.log"
        try:
            process = EngineProcess(replica, log, devices=devices, host=message["host"])
        except OSError as error:
            raise EngineError(f"cannot start an engine process ({error}); see --log-dir") from error
        try:
            self._say(f"{process.name} started, log {log}")
            send_message(sock, {"result": {"pid": process.pid, "log": str(log.absolute())}})
            ending = _relay(sock, process)
        finally:
            process.kill()
        self._say(f"{process.name} ended: {ending}")


def _relay(sock: socket.socket, process: EngineProcess) -> str:
    """Pass on what the trainer asks until it is done or gone; returns which.

    The socket is read while a command runs, so that the end of the trainer ends the command.
    """
    answering = ThreadPoolExecutor(max_workers=1, thread_name_prefix=process.name)
    try:
        while True:
            message = recv_message(sock)
            if message["cmd"] == "close":
                process.close()
                send_message(sock, {"result": None})
                return "the trainer closed it"
            answering.submit(_answer, sock, process, message)
    except EngineError as error:
        return f"the trainer is gone ({error})"
    finally:
        process.kill()
        answering.shutdown()


def _answer(sock: socket.socket, process: EngineProcess, message: Message) -> None:
    answer: dict[str, Any]
    try:
        if message["cmd"] == "start":
            process.start(message["message"], timeout_s=message["timeout_s"])
            answer = {"result": None}
        else:
            answer = {
                "result": process.ask(message["name"], timeout_s=message["timeout_s"], **message["fields"])
            }
    except ReshardError as error:
        answer = {"error": {"kind": "reshard", "message": str(error)}}
    except LostEngineError as error:
        answer = {"error": {"kind": "lost", "message": str(error)}}
    except MegatronRLError as error:
        answer = {"error": {"kind": "engine", "message": str(error)}}
    except Exception as error:  # a bug of ours must not leave the trainer waiting
        traceback.print_exc()
        answer = {"error": {"kind": "engine", "message": f"{process.name}: {type(error).__name__}: {error}"}}
    # who does not take it is gone: the reader of this socket notices and ends the engine
    with suppress(EngineError):
        send_message(sock, answer)


def _num_gpus() -> int:
    import torch  # takes seconds, and only the command itself needs to know

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _say(line: str) -> None:
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}", flush=True)

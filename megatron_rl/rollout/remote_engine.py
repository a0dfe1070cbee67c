"""Replicas on other hosts as the trainer sees them; `megatron-rl engine` (`rollout.engine_host`) runs there."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.errors import EngineError, LostEngineError, ReshardError
from megatron_rl.recipe.hosts import HostPort
from megatron_rl.rollout.channel import STARTING, Channel, setting_behind
from megatron_rl.rollout.devices import versions
from megatron_rl.rollout.engine_process import STOP_GRACE_S
from megatron_rl.rollout.handshake import HANDSHAKE_S, SecretRefused, enter
from megatron_rl.rollout.wire import Message, WireTimeout, keep_alive, recv_message, send_message

CONNECT_S = 20.0  # an engine host that was started together with the trainer may come up a little later
_RETRY_S = 0.5
_SLACK_S = 10.0  # beyond a command's own time-out, for the answer that it ran out to travel back
_TURN_S = 1.0
_CLOSE_S = 3 * STOP_GRACE_S + _SLACK_S


@dataclass(frozen=True, kw_only=True, slots=True)
class HostFacts:
    """What an engine host says of itself."""

    node: str  # see devices.node_id
    gpus: int
    versions: Mapping[str, str | None]  # see devices.versions


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineAddress:
    """One entry of `engine.hosts`; `key` is its dotted path."""

    key: str
    at: HostPort
    secret: bytes | None

    def __str__(self) -> str:
        return f"{self.key}: {self.at}"


def check_host(address: EngineAddress, model: Message) -> HostFacts:
    """Ask whether the host could run our engines; starts nothing there. `model` is from `describe_model`.

    Raises EngineError naming the key: not reachable, another secret, other versions, no such model.
    """
    sock, facts = _enter(address)
    with sock:
        _ask_first(sock, address, {"cmd": "check", "model": model})
    ours = versions()
    for package, theirs in facts.versions.items():
        # a trainer may do without vLLM
        if ours.get(package) not in (None, theirs):
            raise EngineError(
                f"{address} has {package} {theirs}, this machine {ours[package]}; install the same on both"
            )
    return facts


class RemoteEngine:
    """One replica on another host, over a connection of its own: with the connection its processes end.

    `run` tells the engine host which replicas belong together: `run` (an id) and `label`. `model` is
    from `describe_model`. `note_path` gets a line that says where the replica's log is. Raises
    EngineError when the host does not let us in or serves another run.
    """

    def __init__(
        self,
        replica: int,
        address: EngineAddress,
        *,
        devices: Sequence[int] | None,
        run: Message,
        model: Message,
        note_path: Path,
    ) -> None:
        self.replica, self.host = replica, str(address.at)
        self.devices = None if devices is None else tuple(devices)
        self._sock, facts = _enter(address)
        self._channel = Channel(self._sock, self._explain)
        self._lost: str | None = None
        self.node = facts.node
        opening = {
            "cmd": "open",
            **run,
            "model": model,
            "replica": replica,
            "devices": self.devices,
            "host": self.host,
        }
        try:
            opened = _ask_first(self._sock, address, opening)
        except BaseException:
            self._sock.close()
            raise
        self.pid: int = opened["pid"]
        self.local_address = str(self._sock.getsockname()[0])
        note_path.parent.mkdir(parents=True, exist_ok=True)
        with open(note_path, "a") as note:
            note.write(f"--- {self.name} writes its log there, to {opened['log']}\n")

    @property
    def name(self) -> str:
        return f"engine replica {self.replica} on {self.host} (pid {self.pid})"

    @property
    def lost(self) -> str | None:
        """Why it has to be replaced: what its host says, or that the way there is gone; None as long as it answers."""
        return self._lost or self._channel.lost

    def start(self, message: Message, *, timeout_s: float) -> None:
        """Send the start message and wait until it is ready. Raises EngineError with the end of the log."""
        self._exchange(
            {"cmd": "start", "message": message, "timeout_s": timeout_s}, timeout_s=timeout_s, doing=STARTING
        )

    def ask(self, cmd: str, *, timeout_s: float, **fields: Any) -> Any:
        """One command and its result. Raises what the engine says, LostEngineError if it or the way there is gone."""
        message = {"cmd": "ask", "name": cmd, "timeout_s": timeout_s, "fields": fields}
        return self._exchange(message, timeout_s=timeout_s, doing=cmd)["result"]

    def give_up(self, reason: str) -> LostEngineError:
        """It cannot be relied on any more: `lost` from now on."""
        return self._channel.give_up(reason)

    def close(self) -> None:
        """Let the host stop its process group; without an answer the end of the connection does. Safe to call twice."""
        if self._channel.is_open:
            with contextlib.suppress(EngineError):
                self._channel.exchange(
                    {"cmd": "close"}, name=self.name, timeout_s=_CLOSE_S, doing="close", turn_s=_TURN_S
                )
        # wakes whoever still waits for an answer
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._channel.close()

    def _exchange(self, message: Message, *, timeout_s: float, doing: str) -> Message:
        answer = self._channel.exchange(
            message, name=self.name, timeout_s=timeout_s + _SLACK_S, doing=doing, turn_s=timeout_s
        )
        if error := answer.get("error"):
            # it names the replica and the host already
            if error["kind"] == "lost":
                self._lost = error["message"]
                raise LostEngineError(self._lost)
            raise (ReshardError if error["kind"] == "reshard" else EngineError)(error["message"])
        return answer

    def _explain(self, error: EngineError, timeout_s: float, doing: str) -> str:
        if isinstance(error, WireTimeout):
            return (
                f"{self.name}: its host did not answer within {timeout_s:g} s while {doing}; see what "
                f"`megatron-rl engine` says there, or raise {setting_behind(doing)} if it needs longer"
            )
        return (
            f"{self.name}: lost while {doing} ({error}); its host, the network, or `megatron-rl engine` "
            f"there stopped, and with it this replica"
        )


def _enter(address: EngineAddress) -> tuple[socket.socket, HostFacts]:
    sock = _connect(address)
    try:
        keep_alive(sock)
        facts = enter(sock, address.secret)
        return sock, HostFacts(node=facts["node"], gpus=facts["gpus"], versions=facts["versions"])
    except SecretRefused as error:
        sock.close()
        raise EngineError(f"engine.secret_file: {address} does not let us in: {error}") from error
    except EngineError as error:
        sock.close()
        raise EngineError(f"{address} does not answer as `megatron-rl engine` does ({error})") from error
    except BaseException:
        sock.close()
        raise


def _connect(address: EngineAddress) -> socket.socket:
    deadline = time.monotonic() + CONNECT_S
    while True:
        try:
            left = max(_RETRY_S, deadline - time.monotonic())
            return socket.create_connection((address.at.host, address.at.port), timeout=left)
        except OSError as error:
            # refused: the host is there, but nothing listens yet
            if isinstance(error, ConnectionRefusedError) and time.monotonic() + _RETRY_S < deadline:
                time.sleep(_RETRY_S)
                continue
            raise EngineError(
                f"{address} cannot be reached ({error.strerror or error}); run `megatron-rl engine --listen "
                f"{address.at}` there, or correct the address"
            ) from error


def _ask_first(sock: socket.socket, address: EngineAddress, message: Message) -> Any:
    try:
        send_message(sock, message, timeout_s=HANDSHAKE_S)
        answer = recv_message(sock, timeout_s=HANDSHAKE_S + _SLACK_S)
    except EngineError as error:
        raise EngineError(f"{address} went away ({error})") from error
    if refusal := answer.get("error"):
        raise EngineError(f"{address}: {refusal['message']}")
    return answer["result"]

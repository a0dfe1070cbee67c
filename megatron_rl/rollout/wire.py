"""Messages between a trainer, an engine host and an engine process: length-prefixed JSON over one socket.

JSON because both ends can be read in a log; Python writes floats so that they read back exactly.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from typing import Any

from megatron_rl.errors import EngineError

_LENGTH = struct.Struct("<Q")
MAX_MESSAGE_BYTES = 1 << 30
DEAD_AFTER_S = 15.0  # a peer whose kernel is silent, or that takes no bytes, for so long is gone
_PROBE_EVERY_S = 5

Message = dict[str, Any]


class WireClosed(EngineError):
    """The other end is gone."""


class WireTimeout(EngineError):
    """The other end did not finish a message in time; the connection cannot be used again."""


def keep_alive(sock: socket.socket) -> None:
    """Let the kernel find out, within `DEAD_AFTER_S`, that the other machine or the way to it is gone.

    The kernels of both ends do it among themselves, however busy the processes are.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_EVERY_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_EVERY_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, int(DEAD_AFTER_S) // _PROBE_EVERY_S - 1)
    # probes stop while bytes are under way; this bounds those
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(DEAD_AFTER_S * 1000))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def send_message(sock: socket.socket, message: Message, *, timeout_s: float | None = None) -> None:
    """Send all of `message`; `timeout_s` bounds all of it, None waits for ever.

    Raises WireClosed when the other end is gone, WireTimeout when it does not read, and EngineError, with
    nothing sent, when the message is larger than the other end accepts.
    """
    payload = json.dumps(message, separators=(",", ":")).encode()
    if len(payload) > MAX_MESSAGE_BYTES:
        raise EngineError(
            f"wire: a message of {len(payload)} bytes cannot be sent, at most {MAX_MESSAGE_BYTES} are allowed; "
            f"send fewer requests at once"
        )
    try:
        if timeout_s is not None and timeout_s <= 0:
            raise TimeoutError
        sock.settimeout(timeout_s)
        sock.sendall(_LENGTH.pack(len(payload)) + payload)
    except OSError as error:
        if _is_ours(error):
            raise WireTimeout(f"wire: {len(payload)} bytes were not taken in time") from error
        raise WireClosed(f"wire: connection lost while sending: {error}") from error
    finally:
        sock.settimeout(None)


def recv_message(
    sock: socket.socket, *, timeout_s: float | None = None, max_bytes: int | None = None
) -> Message:
    """The next whole message; `timeout_s` bounds all of it, None waits for ever.

    Raises WireClosed at the end of the stream, WireTimeout, or EngineError when it is not a message of ours or
    has more than `max_bytes` (None: what any message may have).
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    (size,) = _LENGTH.unpack(_read(sock, _LENGTH.size, deadline))
    limit = MAX_MESSAGE_BYTES if max_bytes is None else max_bytes
    if size > limit:
        raise EngineError(f"wire: a message of {size} bytes announced, at most {limit} allowed")
    payload = _read(sock, size, deadline)
    try:
        message = json.loads(payload)
    except ValueError as error:
        raise EngineError(f"wire: {size} bytes are not JSON: {error}") from error
    if not isinstance(message, dict):
        raise EngineError(f"wire: expected a JSON object, got {type(message).__name__}")
    return message


def _read(sock: socket.socket, size: int, deadline: float | None) -> bytes:
    chunks, missing = [], size
    while missing:
        left = None if deadline is None else deadline - time.monotonic()
        try:
            if left is not None and left <= 0:
                raise TimeoutError
            sock.settimeout(left)
            chunk = sock.recv(min(missing, 1 << 20))
        except OSError as error:
            if _is_ours(error):
                raise WireTimeout(f"wire: {size - missing} of {size} bytes arrived in time") from error
            raise WireClosed(f"wire: connection lost while receiving: {error}") from error
        finally:
            sock.settimeout(None)
        if not chunk:
            raise WireClosed(f"wire: closed by the other end after {size - missing} of {size} bytes")
        chunks.append(chunk)
        missing -= len(chunk)
    return b"".join(chunks)


def _is_ours(error: OSError) -> bool:
    """Whether our own time ran out. That the kernel gave the peer up is a TimeoutError too, with a number."""
    return isinstance(error, TimeoutError) and error.errno is None

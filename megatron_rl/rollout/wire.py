"""Messages between the trainer and an engine process: length-prefixed JSON over one socket.

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

Message = dict[str, Any]


class WireClosed(EngineError):
    """The other end is gone."""


class WireTimeout(EngineError):
    """The other end did not finish a message in time; the connection cannot be used again."""


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
    except TimeoutError as error:
        raise WireTimeout(f"wire: {len(payload)} bytes were not taken in time") from error
    except OSError as error:
        raise WireClosed(f"wire: connection lost while sending: {error}") from error
    finally:
        sock.settimeout(None)


def recv_message(sock: socket.socket, *, timeout_s: float | None = None) -> Message:
    """The next whole message; `timeout_s` bounds all of it, None waits for ever.

    Raises WireClosed at the end of the stream, WireTimeout, or EngineError when it is not a message of ours.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    (size,) = _LENGTH.unpack(_read(sock, _LENGTH.size, deadline))
    if size > MAX_MESSAGE_BYTES:
        raise EngineError(f"wire: a message of {size} bytes announced, at most {MAX_MESSAGE_BYTES} allowed")
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
        except TimeoutError as error:
            raise WireTimeout(f"wire: {size - missing} of {size} bytes arrived in time") from error
        except OSError as error:
            raise WireClosed(f"wire: connection lost while receiving: {error}") from error
        finally:
            sock.settimeout(None)
        if not chunk:
            raise WireClosed(f"wire: closed by the other end after {size - missing} of {size} bytes")
        chunks.append(chunk)
        missing -= len(chunk)
    return b"".join(chunks)

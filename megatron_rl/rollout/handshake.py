"""Trainer and engine host make sure of each other: both prove a shared secret, which never travels.

It keeps strangers who reach the port from starting processes. What follows is neither encrypted nor signed, so the
network between the two has to be one's own.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
from pathlib import Path
from typing import Any

from megatron_rl.errors import EngineError
from megatron_rl.rollout.wire import Message, recv_message, send_message

HANDSHAKE_S = 10.0
MAX_HANDSHAKE_BYTES = 1 << 14  # of what is read before the other end is known
_SERVICE = "megatron-rl engine"
_MIN_SECRET_BYTES = 16


class SecretRefused(EngineError):
    """The two ends do not have the same secret."""


def read_secret(path: str | Path) -> bytes:
    """The content of `path` without surrounding white space. Raises EngineError when it is missing or short."""
    how = f"make one with: openssl rand -hex 32 > {path}"
    try:
        secret = Path(path).read_bytes().strip()
    except OSError as error:
        raise EngineError(f"secret file {path} cannot be read ({error.strerror}); {how}") from error
    if len(secret) < _MIN_SECRET_BYTES:
        raise EngineError(
            f"secret file {path} holds {len(secret)} bytes, at least {_MIN_SECRET_BYTES} are needed; {how}"
        )
    return secret


def admit(sock: socket.socket, secret: bytes | None, facts: Message) -> None:
    """The engine host's side: let the trainer prove itself, then prove ourselves and tell `facts`.

    Raises SecretRefused, after telling the other end, and EngineError for one who does not speak in time.
    """
    ours = secrets.token_hex(32)
    send_message(
        sock,
        {"service": _SERVICE, "nonce": ours, "has_secret": secret is not None},
        timeout_s=HANDSHAKE_S,
    )
    answer = recv_message(sock, timeout_s=HANDSHAKE_S, max_bytes=MAX_HANDSHAKE_BYTES)
    theirs = _text(answer, "nonce")
    if not hmac.compare_digest(_proof(secret, "trainer", ours, theirs), _text(answer, "proof")):
        send_message(sock, {"refused": True}, timeout_s=HANDSHAKE_S)
        raise SecretRefused("refused: it does not have the secret of this engine host")
    send_message(
        sock, {"proof": _proof(secret, "engine host", ours, theirs), "facts": facts}, timeout_s=HANDSHAKE_S
    )


def enter(sock: socket.socket, secret: bytes | None) -> Message:
    """The trainer's side; returns what the engine host tells of itself.

    Raises SecretRefused when the secrets differ, and EngineError when the other end is something else.
    """
    greeting = recv_message(sock, timeout_s=HANDSHAKE_S, max_bytes=MAX_HANDSHAKE_BYTES)
    if greeting.get("service") != _SERVICE:
        raise EngineError("it is not an engine host")
    if greeting.get("has_secret") is not (secret is not None):
        raise SecretRefused(
            "it asks for a secret: set engine.secret_file to what it was given as --secret-file"
            if secret is None
            else "it was started without --secret-file, but engine.secret_file is set: start it with that file"
        )
    theirs, ours = _text(greeting, "nonce"), secrets.token_hex(32)
    send_message(
        sock, {"nonce": ours, "proof": _proof(secret, "trainer", theirs, ours)}, timeout_s=HANDSHAKE_S
    )
    answer = recv_message(sock, timeout_s=HANDSHAKE_S, max_bytes=MAX_HANDSHAKE_BYTES)
    expected = _proof(secret, "engine host", theirs, ours)
    if "refused" in answer or not hmac.compare_digest(expected, _text(answer, "proof")):
        raise SecretRefused("its secret is another one: give both the same file")
    facts: Message = answer["facts"]
    return facts


def _proof(secret: bytes | None, role: str, host_nonce: str, trainer_nonce: str) -> str:
    """Without a secret anyone can compute it. The role keeps one end's proof from passing for the other's."""
    words = "\n".join((_SERVICE, role, host_nonce, trainer_nonce))
    return hmac.new(secret or b"", words.encode(), hashlib.sha256).hexdigest()


def _text(message: Message, key: str) -> str:
    """A field of a message from somebody not known yet; compared as ASCII, so nothing else is let through."""
    value: Any = message.get(key)
    return value if isinstance(value, str) and value.isascii() else ""

"""Commands and answers over one socket, one pair at a time, every wait bounded. Knows nothing of what they mean."""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable

from megatron_rl.errors import EngineError, LostEngineError
from megatron_rl.rollout.wire import Message, recv_message, send_message

STARTING = "starting"
_LAST_TURN_S = 5.0


class Channel:
    """`explain(error, timeout_s, doing)` says what a lost or silent other end means; after it nothing is sent."""

    def __init__(self, sock: socket.socket, explain: Callable[[EngineError, float, str], str]) -> None:
        self._sock, self._explain = sock, explain
        self._lock = _Turns()
        self._lost: str | None = None
        self._is_closed = False

    @property
    def is_open(self) -> bool:
        """Whether another message may be sent."""
        return self._lost is None and not self._is_closed

    @property
    def lost(self) -> str | None:
        """Why the other end cannot be used any more; None as long as it can."""
        return self._lost

    def give_up(self, reason: str) -> LostEngineError:
        """Nothing is sent from now on: the other end answers, but cannot be relied on."""
        self._lost = self._lost or reason
        return LostEngineError(self._lost)

    def exchange(
        self, message: Message, *, name: str, timeout_s: float, doing: str, turn_s: float | None = None
    ) -> Message:
        """The answer to `message`, whatever it says. `turn_s` (None: `timeout_s`) bounds the wait for earlier ones.

        Raises LostEngineError, for ever after the other end was lost or did not answer in time, and EngineError
        when the message was not sent.
        """
        deadline = time.monotonic() + timeout_s
        patience = timeout_s if turn_s is None else turn_s
        if not self._lock.acquire(timeout=patience):
            raise EngineError(f"{name}: still busy with another command after {patience:g} s ({doing})")
        try:
            if self._lost is not None:
                raise LostEngineError(self._lost)
            if self._is_closed:
                raise EngineError(f"{name}: was closed before {doing}")
            return self._round_trip(message, deadline=deadline, timeout_s=timeout_s, doing=doing)
        finally:
            self._lock.release()

    def close(self) -> None:
        """Close our end; the other end is gone already, so that whoever still waits for it is about to notice."""
        had_turn = self._lock.acquire(timeout=_LAST_TURN_S)
        self._is_closed = True
        self._sock.close()
        if had_turn:
            self._lock.release()

    def _round_trip(self, message: Message, *, deadline: float, timeout_s: float, doing: str) -> Message:
        sent = False
        try:
            send_message(self._sock, message, timeout_s=max(0.0, deadline - time.monotonic()))
            sent = True
            return recv_message(self._sock, timeout_s=max(0.0, deadline - time.monotonic()))
        except EngineError as error:
            if not sent and type(error) is EngineError:
                raise  # too large to send: not a byte left, so the next one may
            raise self.give_up(self._explain(error, timeout_s, doing)) from error


class _Turns:
    """A lock that goes to whoever waits longest: one thread that asks again and again does not keep others from it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()
        self._is_held = False

    def acquire(self, *, timeout: float) -> bool:
        turn = object()
        with self._changed:
            self._waiting.append(turn)
            try:
                has_turn = self._changed.wait_for(
                    lambda: not self._is_held and self._waiting[0] is turn, timeout=timeout
                )
                self._is_held = self._is_held or has_turn
            finally:
                self._waiting.remove(turn)
                self._changed.notify_all()
            return has_turn

    def release(self) -> None:
        with self._changed:
            self._is_held = False
            self._changed.notify_all()


def setting_behind(doing: str) -> str:
    """The recipe key whose time ran out."""
    return "engine.start_timeout_s" if doing == STARTING else "engine.request_timeout_s"

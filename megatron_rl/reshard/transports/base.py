"""What an executor asks of a transport, whatever carries the bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megatron_rl.errors import ReshardError

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True, slots=True)
class Membership:
    """One member of the transfer group: trainer ranks are 0 .. num_trainers - 1, engine workers come after.

    The members meet at `host:port`, where trainer rank 0 keeps a store. `timeout_s` bounds every wait.
    """

    rank: int
    num_trainers: int
    num_workers: int
    host: str
    port: int
    timeout_s: float

    @property
    def world(self) -> int:
        return self.num_trainers + self.num_workers

    @property
    def name(self) -> str:
        return self.name_of(self.rank)

    def name_of(self, member: int) -> str:
        """The member as messages call it."""
        if member < self.num_trainers:
            return f"trainer rank {member}"
        return f"engine worker {member - self.num_trainers}"


class Outbox(Protocol):
    """Two buffers of one sender, in turn: one is filled while what was sent from the other is under way."""

    def slot(self) -> Tensor:
        """The next buffer (uint8), as soon as everything that was sent from it before has been taken.

        Raises ReshardError naming the member that died or did not take its message in time.
        """
        ...

    def send(self, parts: Sequence[tuple[Tensor, int]]) -> None:
        """Start sending views of the current buffer, each to the member that stands beside it."""
        ...

    def flush(self) -> None:
        """Return when everything has been taken. Raises like `slot`."""
        ...

    def rest(self) -> None:
        """Give device memory back until the next update; host memory stays, for touching new pages is slow."""
        ...


class Inbox(Protocol):
    """Batches of messages of one receiver, two at most under way; each is posted, waited for and released."""

    def post(self, parts: Sequence[tuple[int, int]]) -> None:
        """Expect the next batch: (bytes, sending member) of each message."""
        ...

    def wait(self) -> list[Tensor]:
        """The messages of the oldest batch not waited for, in the order in which they were posted.

        Their memory is the caller's until `release`. Raises ReshardError naming the member that died or did
        not send in time.
        """
        ...

    def release(self) -> None:
        """Nobody reads the oldest batch any more: its memory may be overwritten."""
        ...

    def rest(self) -> None:
        """See `Outbox.rest`."""
        ...


class Transport(Protocol):
    """One way for the members of a group, or some of them, to send bytes to each other."""

    @property
    def kind(self) -> str:
        """local, shared, gloo or nccl."""
        ...

    def outbox(self, num_bytes: int, peers: Sequence[int]) -> Outbox:
        """Buffers of `num_bytes`, from which messages go to `peers`."""
        ...

    def inbox(self, num_bytes: int, peers: Sequence[int]) -> Inbox:
        """For batches of at most `num_bytes` from `peers`."""
        ...

    def together(self) -> AbstractContextManager[None]:
        """What is posted and sent inside starts as one, so that the order of sends and receives is no matter."""
        ...

    def close(self) -> None:
        """Leave; members that still wait for this one fail at once. Safe to call twice."""
        ...


def wait_until(is_done: Callable[[], bool], *, timeout_s: float, what: str) -> None:
    """Poll, ever more slowly up to 2 ms. Raises ReshardError with `what` after `timeout_s`."""
    deadline, pause = time.monotonic() + timeout_s, 2e-5
    while not is_done():
        if time.monotonic() > deadline:
            raise ReshardError(f"weight transfer: {what} did not finish within {timeout_s:g} s")
        time.sleep(pause)
        pause = min(2e-3, pause * 1.5)


def first_line(error: BaseException) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0]

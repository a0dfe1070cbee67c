"""Transports that copy: bytes leave from a buffer of the sender and arrive in one of the receiver."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

_ALIGNMENT = 64  # of every message inside a buffer


class Operation(NamedTuple):
    """One message to send or to receive."""

    is_send: bool
    buffer: Tensor
    peer: int


class Started(ABC):
    """Operations under way."""

    @abstractmethod
    def wait(self) -> None:
        """Return when all are done. Raises ReshardError naming the peer of one that failed."""


class StagedTransport(ABC):
    """`base.Transport`, given a way to start operations and memory that they can use."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._gathered: list[tuple[list[Operation], _Later]] | None = None

    @abstractmethod
    def start(self, operations: Sequence[Operation]) -> Started:
        """Start all of them, as one where the backend can."""

    @abstractmethod
    def allocate(self, num_bytes: int) -> Tensor:
        """Memory (uint8) for messages."""

    @property
    def gives_back(self) -> bool:
        """Whether buffers are freed between updates."""
        return self.device.type != "cpu"

    def outbox(self, num_bytes: int, peers: Sequence[int]) -> StagedOutbox:
        return StagedOutbox(self, num_bytes)

    def inbox(self, num_bytes: int, peers: Sequence[int]) -> StagedInbox:
        return StagedInbox(self, num_bytes)

    @contextmanager
    def together(self) -> Iterator[None]:
        self._gathered = []
        try:
            yield
            operations = [operation for group, _ in self._gathered for operation in group]
            started = self.start(operations) if operations else None
            for _, later in self._gathered:
                later.started = started
        finally:
            self._gathered = None

    def submit(self, operations: list[Operation]) -> Started:
        """`start`, or at the end of the `together` block that this is called in."""
        if self._gathered is None:
            return self.start(operations)
        later = _Later()
        self._gathered.append((operations, later))
        return later


class _Later(Started):
    """What `together` starts at its end."""

    started: Started | None = None

    def wait(self) -> None:
        assert self.started is not None, "waited for inside the block that starts it"
        self.started.wait()


class _Slots:
    """Two buffers in turn, made when they are first needed."""

    def __init__(self, transport: StagedTransport, num_bytes: int) -> None:
        self._transport, self._num_bytes = transport, num_bytes
        self._buffers: list[Tensor | None] = [None, None]

    def get(self, index: int) -> Tensor:
        buffer = self._buffers[index]
        if buffer is None:
            buffer = self._buffers[index] = self._transport.allocate(self._num_bytes)
        return buffer

    def rest(self) -> None:
        if self._transport.gives_back:
            self._buffers = [None, None]


class StagedOutbox:
    """`base.Outbox`."""

    def __init__(self, transport: StagedTransport, num_bytes: int) -> None:
        self._transport, self._slots = transport, _Slots(transport, num_bytes)
        self._under_way: list[Started | None] = [None, None]
        self._current = 1

    def slot(self) -> Tensor:
        self._current = 1 - self._current
        self._finish(self._current)
        return self._slots.get(self._current)

    def send(self, parts: Sequence[tuple[Tensor, int]]) -> None:
        operations = [Operation(True, buffer, peer) for buffer, peer in parts]
        self._under_way[self._current] = self._transport.submit(operations)

    def flush(self) -> None:
        for index in (1 - self._current, self._current):
            self._finish(index)

    def rest(self) -> None:
        self._slots.rest()

    def _finish(self, index: int) -> None:
        if (started := self._under_way[index]) is not None:
            started.wait()
            self._under_way[index] = None


class StagedInbox:
    """`base.Inbox`."""

    def __init__(self, transport: StagedTransport, num_bytes: int) -> None:
        self._transport, self._slots = transport, _Slots(transport, num_bytes)
        self._posted: deque[tuple[Started, list[Tensor]]] = deque()
        self._next = 0
        self._unreleased = 0

    def post(self, parts: Sequence[tuple[int, int]]) -> None:
        assert self._unreleased < 2, "a batch must be released before the second next is posted"
        buffers = cut(self._slots.get(self._next), [size for size, _ in parts])
        operations = [
            Operation(False, buffer, peer) for buffer, (_, peer) in zip(buffers, parts, strict=True)
        ]
        self._posted.append((self._transport.submit(operations), buffers))
        self._next, self._unreleased = 1 - self._next, self._unreleased + 1

    def wait(self) -> list[Tensor]:
        started, buffers = self._posted.popleft()
        started.wait()
        return buffers

    def release(self) -> None:
        self._unreleased -= 1

    def rest(self) -> None:
        self._slots.rest()


def aligned(num_bytes: int) -> int:
    """What a message of `num_bytes` takes of a buffer."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def cut(slot: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Views of `sizes` bytes, one after the other, each aligned."""
    views, offset = [], 0
    for size in sizes:
        views.append(slot[offset : offset + size])
        offset += aligned(size)
    return views

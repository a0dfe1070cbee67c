"""Transports that share: the receiver reads a message where the sender packed it, and then says that it did.

A sender has two buffers. Over one line per peer it tells of a buffer before it first uses it (`open`), and of
each message in it (`ready`); the peer answers once it no longer reads that message (`done`). A buffer is
filled again only when every message in it was answered. What differs is the line and how memory is shared:
`local` and `shared` provide them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from megatron_rl.errors import ReshardError


@dataclass(frozen=True, slots=True)
class Note:
    """One word over a line: `open`, `ready` or `done`, with its numbers, and the memory that `open` opens."""

    word: str
    numbers: tuple[int, ...]
    memory: Any = None


class Line(Protocol):
    """Notes in order, both ways, between the sender and the receiver of messages; bounded in time."""

    @property
    def peer(self) -> str:
        """The other member, as messages call it."""
        ...

    def tell(self, note: Note) -> None:
        """Raises ReshardError naming the peer when it is gone."""
        ...

    def hear(self) -> Note:
        """The next note. Raises ReshardError naming the peer when it is gone or silent for too long."""
        ...

    def close(self) -> None: ...


class Memory(Protocol):
    """How a buffer comes to be in two members at once."""

    @property
    def gives_back(self) -> bool:
        """Whether buffers are freed between updates."""
        ...

    def create(self, num_bytes: int) -> tuple[Tensor, Any]:
        """A new buffer (uint8), and what a line carries to the peer for `map`."""
        ...

    def map(self, memory: Any) -> Tensor:
        """The same buffer in the receiver."""
        ...

    def settle(self) -> None:
        """Return when all that was written to or read from a buffer so far has happened."""
        ...


class HandoffTransport:
    """`base.Transport` over lines to and from other members, one for each direction."""

    def __init__(
        self,
        kind: str,
        *,
        memory: Memory,
        to_peer: Mapping[int, Line],
        from_peer: Mapping[int, Line],
    ) -> None:
        self.kind, self._memory = kind, memory
        self._to, self._from = dict(to_peer), dict(from_peer)

    def outbox(self, num_bytes: int, peers: Sequence[int]) -> HandoffOutbox:
        return HandoffOutbox(self._memory, num_bytes, {peer: self._to[peer] for peer in peers})

    def inbox(self, num_bytes: int, peers: Sequence[int]) -> HandoffInbox:
        return HandoffInbox(self._memory, {peer: self._from[peer] for peer in peers})

    @contextmanager
    def together(self) -> Iterator[None]:
        """Nothing to do: neither posting nor sending waits here."""
        yield

    def close(self) -> None:
        for line in (*self._to.values(), *self._from.values()):
            line.close()


@dataclass
class _Slot:
    buffer: Tensor
    memory: Any
    known_to: set[int] = field(default_factory=set)
    unanswered: list[tuple[int, int]] = field(default_factory=list)  # (peer, number of the message)


class HandoffOutbox:
    """`base.Outbox`."""

    def __init__(self, memory: Memory, num_bytes: int, lines: Mapping[int, Line]) -> None:
        self._memory, self._num_bytes, self._lines = memory, num_bytes, lines
        self._slots: list[_Slot | None] = [None, None]
        self._current = 1
        self._sent = dict.fromkeys(lines, 0)  # messages per peer

    def slot(self) -> Tensor:
        self._current = 1 - self._current
        slot = self._slots[self._current]
        if slot is None:
            slot = self._slots[self._current] = _Slot(*self._memory.create(self._num_bytes))
        self._await_answers(slot)
        return slot.buffer

    def send(self, parts: Sequence[tuple[Tensor, int]]) -> None:
        slot = self._slots[self._current]
        assert slot is not None, "a slot is asked for before anything is sent from it"
        self._memory.settle()
        for buffer, peer in parts:
            line = self._lines[peer]
            if peer not in slot.known_to:
                line.tell(Note("open", (self._current,), slot.memory))
                slot.known_to.add(peer)
            offset = int(buffer.storage_offset() - slot.buffer.storage_offset())
            line.tell(Note("ready", (self._sent[peer], self._current, offset, buffer.numel())))
            slot.unanswered.append((peer, self._sent[peer]))
            self._sent[peer] += 1

    def flush(self) -> None:
        for index in (1 - self._current, self._current):
            if (slot := self._slots[index]) is not None:
                self._await_answers(slot)

    def rest(self) -> None:
        if self._memory.gives_back:
            self._slots = [None, None]

    def _await_answers(self, slot: _Slot) -> None:
        for peer, number in slot.unanswered:
            line = self._lines[peer]
            note = line.hear()
            if (note.word, note.numbers) != ("done", (number,)):
                raise ReshardError(
                    f"weight transfer: {line.peer} answered {note.word} {note.numbers} to message {number}"
                )
        slot.unanswered = []


class HandoffInbox:
    """`base.Inbox`; posting costs no memory."""

    def __init__(self, memory: Memory, lines: Mapping[int, Line]) -> None:
        self._memory, self._lines = memory, lines
        self._mapped: dict[tuple[int, int], Tensor] = {}  # (peer, slot)
        self._posted: deque[Sequence[tuple[int, int]]] = deque()
        self._read: deque[list[tuple[int, int]]] = deque()  # (peer, number of the message), per batch

    def post(self, parts: Sequence[tuple[int, int]]) -> None:
        self._posted.append(parts)

    def wait(self) -> list[Tensor]:
        messages, numbers = [], []
        for size, peer in self._posted.popleft():
            number, view = self._next_from(peer, size)
            messages.append(view)
            numbers.append((peer, number))
        self._read.append(numbers)
        return messages

    def release(self) -> None:
        # not before the last read of these buffers is over: the sender writes to them at once
        self._memory.settle()
        for peer, number in self._read.popleft():
            self._lines[peer].tell(Note("done", (number,)))

    def rest(self) -> None:
        if self._memory.gives_back:
            self._mapped = {}

    def _next_from(self, peer: int, size: int) -> tuple[int, Tensor]:
        line = self._lines[peer]
        while (note := line.hear()).word == "open":
            self._mapped[peer, note.numbers[0]] = self._memory.map(note.memory)
        if note.word != "ready" or note.numbers[3] != size:
            raise ReshardError(
                f"weight transfer: {line.peer} announced {note.word} {note.numbers}, expected {size} bytes"
            )
        number, slot, offset, _ = note.numbers
        return number, self._mapped[peer, slot][offset : offset + size]

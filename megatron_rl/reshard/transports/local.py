"""Members of one process: what one packs the other reads, without a copy in between."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from megatron_rl.errors import ReshardError
from megatron_rl.reshard.transports.base import Membership
from megatron_rl.reshard.transports.handoff import HandoffTransport, Note


class LocalHub:
    """Where members of one process find each other; all of them are given the same one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queues: dict[tuple[int, int], tuple[queue.SimpleQueue[Any], queue.SimpleQueue[Any]]] = {}

    def queues(self, sender: int, receiver: int) -> tuple[queue.SimpleQueue[Any], queue.SimpleQueue[Any]]:
        """Notes from the sender of messages to their receiver, and answers."""
        with self._lock:
            fresh: tuple[queue.SimpleQueue[Any], queue.SimpleQueue[Any]] = (
                queue.SimpleQueue(), queue.SimpleQueue()
            )  # fmt: skip
            return self._queues.setdefault((sender, receiver), fresh)


class LocalTransport(HandoffTransport):
    """Each member runs in its own thread, for a sender waits until its receiver has read."""

    def __init__(
        self, member: Membership, hub: LocalHub, *, receivers: Iterable[int], senders: Iterable[int],
        device: torch.device,
    ) -> None:  # fmt: skip
        super().__init__(
            "local",
            memory=_PrivateMemory(device),
            to_peer={peer: _QueueLine(member, peer, *hub.queues(member.rank, peer)) for peer in receivers},
            from_peer={
                peer: _QueueLine(member, peer, *reversed(hub.queues(peer, member.rank))) for peer in senders
            },
        )


class _PrivateMemory:
    gives_back = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def create(self, num_bytes: int) -> tuple[Tensor, Tensor]:
        buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        return buffer, buffer

    def map(self, memory: Tensor) -> Tensor:
        return memory

    def settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


class _QueueLine:
    def __init__(
        self, member: Membership, peer: int, out: queue.SimpleQueue[Any], back: queue.SimpleQueue[Any]
    ) -> None:
        self.peer = member.name_of(peer)
        self._member, self._out, self._back = member, out, back

    def tell(self, note: Note) -> None:
        self._out.put(note)

    def hear(self) -> Note:
        try:
            note = self._back.get(timeout=self._member.timeout_s)
        except queue.Empty:
            note = f"silent for {self._member.timeout_s:g} s"
        if not isinstance(note, Note):
            raise ReshardError(f"weight transfer: {self._member.name} lost {self.peer}: {note}")
        return note

    def close(self) -> None:
        self._out.put("it left")

"""The static half of a weight transfer: what is in each sealed message, known from the plan alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.errors import ReshardError
from megatron_rl.reshard.plan import Message, ReshardPlan, Transfer
from megatron_rl.reshard.seal import message_key, sealed_bytes
from megatron_rl.reshard.transports.staged import aligned


@dataclass(frozen=True, slots=True)
class Parcel:
    """One payload of one sender in one bucket, for each member that receives exactly these intervals.

    The payload is the intervals in order, in the wire's dtype, without gaps.
    """

    sender: int
    receivers: tuple[int, ...]
    transfers: tuple[Transfer, ...]
    shapes: tuple[tuple[int, ...], ...]  # of the intervals
    payload_bytes: int
    key: bytes  # see `seal.message_key`

    @property
    def sealed_bytes(self) -> int:
        return sealed_bytes(self.payload_bytes)

    def views(self, payload: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
        """Each interval of a uint8 payload."""
        flat, offset = payload.view(dtype), 0
        for transfer, shape in zip(self.transfers, self.shapes, strict=True):
            count = transfer.bytes // dtype.itemsize
            yield flat[offset : offset + count].view(shape)
            offset += count


def merge(plan: ReshardPlan, messages: Iterable[Message]) -> list[Parcel]:
    """Messages of one sender in one bucket: replicas that need the same get the same bytes, packed once."""
    groups: dict[tuple[Transfer, ...], list[Message]] = defaultdict(list)
    for message in messages:
        groups[message.transfers].append(message)
    return [_parcel(plan, group) for group in groups.values()]


def batches(parcels: Iterable[Parcel], limit: int | None) -> Iterator[list[Parcel]]:
    """Consecutive parcels of at most about `limit` bytes together, at least one; None: all."""
    batch: list[Parcel] = []
    for parcel in parcels:
        if limit is not None and batch and sum(p.payload_bytes for p in (*batch, parcel)) > limit:
            yield batch
            batch = []
        batch.append(parcel)
    if batch:
        yield batch


def batch_bytes(parcels: Iterable[Parcel]) -> int:
    """What the sealed messages take of a buffer."""
    return sum(aligned(parcel.sealed_bytes) for parcel in parcels)


def check_wire_dtype(plan: ReshardPlan, dtype: torch.dtype) -> None:
    """Raises ReshardError when the plan was made for elements of another width."""
    if dtype.itemsize != plan.element_bytes:
        raise ReshardError(
            f"weight transfer: {dtype} has {dtype.itemsize} bytes, the plan {plan.element_bytes}"
        )


def _parcel(plan: ReshardPlan, messages: Sequence[Message]) -> Parcel:
    first = messages[0]
    return Parcel(
        sender=first.sender,
        receivers=tuple(message.receiver for message in messages),
        transfers=first.transfers,
        shapes=tuple(plan.piece_shape(transfer) for transfer in first.transfers),
        payload_bytes=first.bytes,
        key=message_key(plan, first),
    )

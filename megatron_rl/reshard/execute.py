"""The sending half of a weight transfer: pack, seal and send bucket by bucket, two under way at a time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import Store

from megatron_rl.errors import ReshardError
from megatron_rl.platform.spans import Spans
from megatron_rl.reshard.parcels import Parcel, batch_bytes, batches, check_wire_dtype, merge
from megatron_rl.reshard.plan import Message, ReshardPlan, Transfer
from megatron_rl.reshard.seal import write_seal
from megatron_rl.reshard.transports import Membership, Outbox, Router, Transport, TransportKind, connect
from megatron_rl.reshard.transports.staged import cut

Params = Sequence[Mapping[str, Tensor]]  # per model chunk: parameter name -> tensor


def connect_plan(
    plan: ReshardPlan, member: Membership, *, kind: TransportKind = "auto", store: Store | None = None
) -> Router:
    """Join the group of `plan` with transports for every message that this member sends or receives.

    Rank 0 passes the store from `open_store`. Raises ReshardError naming the member that did not come in time.
    """
    return connect(
        member,
        plan.placement,
        receivers=sorted({message.receiver for message in plan.messages_from(member.rank)}),
        senders=sorted({message.sender for message in plan.messages_to(member.rank)}),
        relays=plan.two_tier,
        kind=kind,
        store=store,
    )


class WeightSender:
    """Sends the share of one trainer rank in every update, to whom the plan says."""

    def __init__(
        self, plan: ReshardPlan, router: Router, *, dtype: torch.dtype, spans: Spans | None = None
    ) -> None:
        """`dtype` is that on the wire; `spans` get one for each batch. Raises ReshardError when the plan was made for
        another width."""
        check_wire_dtype(plan, dtype)
        self._rank, self._dtype = router.member.rank, dtype
        self._spans = Spans() if spans is None else spans
        by_bucket = outgoing(plan, router, limit=plan.bucket_bytes)
        self._batches = [batch for group in by_bucket.values() for batch in group]
        self._buckets = [bucket for bucket, group in by_bucket.items() for _ in group]
        self._outboxes = list({id(batch.outbox): batch.outbox for batch in self._batches}.values())

    def send(self, params: Params, *, version: int) -> int:
        """Send everything; returns bytes sent, seals included, when all has left and `params` may change.

        Raises ReshardError, before anything is sent, naming a parameter that is missing or mis-shaped; later,
        naming the peer that died or did not take its message in time.
        """
        pieces = [[list(self._pieces(parcel, params)) for parcel in batch.parcels] for batch in self._batches]
        for bucket, batch, pieces_of_batch in zip(self._buckets, self._batches, pieces, strict=True):
            with self._spans.span("send bucket", bucket=bucket, bytes=batch.sent_bytes):
                buffers = batch.buffers()
                for parcel, buffer, own in zip(batch.parcels, buffers, pieces_of_batch, strict=True):
                    pack(parcel, buffer, own, dtype=self._dtype, version=version)
                batch.send(buffers)
        with self._spans.span("flush buckets"):
            for outbox in self._outboxes:
                outbox.flush()
            for outbox in self._outboxes:
                outbox.rest()
        return sum(batch.sent_bytes for batch in self._batches)

    def _pieces(self, parcel: Parcel, params: Params) -> Iterator[Tensor]:
        for transfer, shape in zip(parcel.transfers, parcel.shapes, strict=True):
            yield _local_piece(transfer, shape, params, self._rank)


@dataclass(frozen=True, slots=True)
class Batch:
    """Parcels that leave together, from one buffer."""

    outbox: Outbox
    parcels: tuple[Parcel, ...]

    @property
    def sent_bytes(self) -> int:
        return sum(len(parcel.receivers) * parcel.sealed_bytes for parcel in self.parcels)

    def buffers(self) -> list[Tensor]:
        """One per parcel; waits until what was sent from there before has been taken."""
        return cut(self.outbox.slot(), [parcel.sealed_bytes for parcel in self.parcels])

    def send(self, buffers: Sequence[Tensor]) -> None:
        self.outbox.send(
            [
                (buffer, receiver)
                for parcel, buffer in zip(self.parcels, buffers, strict=True)
                for receiver in parcel.receivers
            ]
        )


def outgoing(plan: ReshardPlan, router: Router, *, limit: int | None = None) -> dict[int, list[Batch]]:
    """Per bucket what this member sends, as batches of at most about `limit` bytes, an outbox per transport."""
    groups: dict[tuple[int, Transport], list[Message]] = defaultdict(list)
    for message in plan.messages_from(router.member.rank):
        groups[message.bucket, router.to(message.receiver)].append(message)
    planned = [
        (bucket, transport, tuple(batch))
        for (bucket, transport), messages in groups.items()
        for batch in batches(merge(plan, messages), limit)
    ]
    outboxes = {}
    for transport in dict.fromkeys(transport for _, transport, _ in planned):
        parcels = [batch for _, own, batch in planned if own is transport]
        peers = {receiver for batch in parcels for parcel in batch for receiver in parcel.receivers}
        outboxes[transport] = transport.outbox(max(map(batch_bytes, parcels)), sorted(peers))
    found: dict[int, list[Batch]] = defaultdict(list)
    for bucket, transport, batch in planned:
        found[bucket].append(Batch(outboxes[transport], batch))
    return dict(found)


def pack(
    parcel: Parcel, buffer: Tensor, pieces: Sequence[Tensor], *, dtype: torch.dtype, version: int
) -> None:
    """Fill and seal one message: `pieces` in the order of its intervals, cast to `dtype`."""
    views = list(parcel.views(buffer[: parcel.payload_bytes], dtype))
    torch._foreach_copy_(views, list(pieces))
    write_seal(buffer, parcel.payload_bytes, key=parcel.key, version=version)


def _local_piece(transfer: Transfer, shape: tuple[int, ...], params: Params, rank: int) -> Tensor:
    chunk = params[transfer.chunk] if transfer.chunk < len(params) else {}
    param = chunk.get(transfer.param)
    if param is None:
        raise ReshardError(
            f"weight transfer: {transfer.hf_name} is planned from parameter {transfer.param} of model chunk "
            f"{transfer.chunk} on rank {rank}, which does not exist there"
        )
    piece = param.detach()
    if transfer.param_dim is not None:
        dim, start = transfer.param_dim, transfer.param_start
        if piece.dim() > dim and start + transfer.length <= piece.shape[dim]:
            piece = piece.narrow(dim, start, transfer.length)
    if tuple(piece.shape) != shape:
        raise ReshardError(
            f"weight transfer: {transfer.hf_name} needs shape {list(shape)} of {transfer.param} (rank "
            f"{rank}, chunk {transfer.chunk}), whose shape {list(param.shape)} does not hold it"
        )
    return piece

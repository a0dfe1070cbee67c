"""The receiving half of a weight transfer: verified tensors, bucket by bucket, while the next bucket arrives.

Nothing here touches a model. In a two-tier transfer a worker also passes on what others of its node need.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from megatron_rl.errors import ReshardError
from megatron_rl.reshard.execute import outgoing, pack
from megatron_rl.reshard.parcels import Parcel, batch_bytes, check_wire_dtype, merge
from megatron_rl.reshard.plan import Message, ReshardPlan, Transfer
from megatron_rl.reshard.scratch import Scratch
from megatron_rl.reshard.seal import check_seal, write_failure
from megatron_rl.reshard.transports import Inbox, Router, Transport

_AHEAD = 2  # buckets under way or in use at once

Piece = tuple[Transfer, Tensor]


class WeightStream:
    """What one engine worker receives in every update, as full-shape tensors, bucket after bucket."""

    def __init__(
        self, plan: ReshardPlan, router: Router, *, dtype: torch.dtype, device: torch.device, canary: bool
    ) -> None:
        """`dtype` is that of wire and tensors, `device` where tensors are made.

        With `canary` all of a tensor that this worker is not sent is NaN, so that a reader that leaves its
        interval is seen at once; without, it is undefined.
        """
        check_wire_dtype(plan, dtype)
        self._plan, self._router, self._dtype, self._device = plan, router, dtype, device
        messages = plan.messages_to(router.member.rank)
        self._direct = _Incoming(plan, router, [m for m in messages if m.sender < plan.num_trainers])
        self._relayed = _Incoming(plan, router, [m for m in messages if m.sender >= plan.num_trainers])
        self._relays = outgoing(plan, router)
        self._scratch = Scratch(plan, messages, dtype=dtype, device=device, canary=canary)
        self._posted = self._received = self._released = 0
        self._is_broken = False

    def tensors(self, *, version: int) -> Iterator[tuple[str, Tensor]]:
        """Every HF tensor of the model once, with only the interval of this worker filled.

        All messages of a bucket are verified before the first of its tensors is handed out. Raises
        ReshardError naming the member whose message is damaged, of another version or did not come; then, or
        when the caller stops half-way, call `drain`.
        """
        self._posted = self._received = self._released = 0
        self._post()
        unfinished: dict[str, Tensor] = {}
        for bucket in range(self._plan.num_buckets):
            pieces = self._receive(bucket, version)
            for name in self._plan.completes(bucket):
                full = unfinished.pop(name, None)
                if full is None:
                    full = self._scratch.take(name)
                _fill(full, pieces.pop(name, ()))
                yield name, full
                del full
            for name, rest in pieces.items():
                if name not in unfinished:
                    unfinished[name] = self._scratch.take(name)
                _fill(unfinished[name], rest)
            pieces.clear()
            self._release()
        self._rest()

    def drain(self) -> None:
        """Take the rest of an update that failed and use none of it, so that nobody waits for this worker.

        Does nothing, and leaves the group, when another member was lost.
        """
        try:
            if self._received > self._released:
                self._release()
            self._post()
            while self._received < self._plan.num_buckets:
                self._wait(self._received, None)
                self._release()
            self._rest()
        except ReshardError:
            self._router.close()

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """What is done half has lost another member: everything after it is refused."""
        if self._is_broken:
            raise ReshardError("weight transfer: another member was lost before")
        self._is_broken = True
        yield
        self._is_broken = False

    def _post(self) -> None:
        with self._whole():
            while self._posted < min(self._released + _AHEAD, self._plan.num_buckets):
                self._direct.post(self._posted)
                self._posted += 1

    def _release(self) -> None:
        with self._whole():
            self._direct.release(self._released)
            self._relayed.release(self._released)
            self._released += 1
        self._post()

    def _rest(self) -> None:
        with self._whole():
            self._direct.rest()
            self._relayed.rest()
            outboxes = [batch.outbox for group in self._relays.values() for batch in group]
            for outbox in dict.fromkeys(outboxes):
                outbox.flush()
                outbox.rest()

    def _receive(self, bucket: int, version: int) -> dict[str, list[Piece]]:
        """The verified intervals of one bucket by tensor."""
        pieces, failure = self._wait(bucket, version)
        if failure is not None:
            raise failure
        by_name: dict[str, list[Piece]] = defaultdict(list)
        for transfer, piece in pieces:
            by_name[transfer.hf_name].append((transfer, piece))
        return by_name

    def _wait(self, bucket: int, version: int | None) -> tuple[list[Piece], ReshardError | None]:
        """All messages of a bucket, of which others get their share; `version` None: nobody uses them.

        Raises ReshardError only when another member is lost.
        """
        with self._whole():
            pieces, failure = self._check(self._direct.wait(bucket), version)
            self._pass_on(bucket, pieces if failure is None else None, version)
            relayed, late_failure = self._check(self._relayed.wait(bucket), version)
            self._received = bucket + 1
        return pieces + relayed, failure or late_failure

    def _check(
        self, arrived: Sequence[tuple[Parcel, Tensor]], version: int | None
    ) -> tuple[list[Piece], ReshardError | None]:
        if version is None:
            return [], ReshardError("weight transfer: this update failed before")
        pieces: list[Piece] = []
        for parcel, buffer in arrived:
            sender = self._router.member.name_of(parcel.sender)
            try:
                payload = check_seal(
                    buffer, parcel.payload_bytes, key=parcel.key, version=version, sender=sender
                )
            except ReshardError as error:
                return [], error
            pieces += zip(parcel.transfers, parcel.views(payload, self._dtype), strict=True)
        return pieces, None

    def _pass_on(self, bucket: int, pieces: list[Piece] | None, version: int | None) -> None:
        """Exchange intervals with the workers of this node; without `pieces`, tell them that there are none."""
        batches = self._relays.get(bucket, [])
        by_place = {(transfer.hf_name, transfer.hf_start): piece for transfer, piece in pieces or ()}
        receivers = {self._router.to(r) for batch in batches for p in batch.parcels for r in p.receivers}
        with ExitStack() as together:
            # as one: members that all send first would wait for each other
            for transport in receivers | self._relayed.transports(bucket):
                together.enter_context(transport.together())
            self._relayed.post(bucket)
            for batch in batches:
                buffers = batch.buffers()
                for parcel, buffer in zip(batch.parcels, buffers, strict=True):
                    if pieces is None or version is None:
                        write_failure(buffer)
                        continue
                    own = [by_place[transfer.hf_name, transfer.hf_start] for transfer in parcel.transfers]
                    pack(parcel, buffer, own, dtype=self._dtype, version=version)
                batch.send(buffers)


class _Incoming:
    """The messages of one worker from some of its senders: per bucket a batch for each transport."""

    def __init__(self, plan: ReshardPlan, router: Router, messages: Iterable[Message]) -> None:
        groups: dict[tuple[int, Transport], list[Parcel]] = defaultdict(list)
        for message in messages:
            groups[message.bucket, router.to(message.sender)] += merge(plan, [message])
        inboxes: dict[Transport, Inbox] = {}
        for transport in dict.fromkeys(transport for _, transport in groups):
            own = [parcels for (_, other), parcels in groups.items() if other is transport]
            peers = sorted({parcel.sender for parcels in own for parcel in parcels})
            inboxes[transport] = transport.inbox(max(map(batch_bytes, own)), peers)
        self._inboxes = inboxes
        self._batches: dict[int, list[tuple[Transport, list[Parcel]]]] = defaultdict(list)
        for (bucket, transport), parcels in groups.items():
            self._batches[bucket].append((transport, parcels))

    def transports(self, bucket: int) -> set[Transport]:
        return {transport for transport, _ in self._batches.get(bucket, ())}

    def post(self, bucket: int) -> None:
        for transport, parcels in self._batches.get(bucket, ()):
            self._inboxes[transport].post([(parcel.sealed_bytes, parcel.sender) for parcel in parcels])

    def wait(self, bucket: int) -> list[tuple[Parcel, Tensor]]:
        arrived: list[tuple[Parcel, Tensor]] = []
        for transport, parcels in self._batches.get(bucket, ()):
            arrived += zip(parcels, self._inboxes[transport].wait(), strict=True)
        return arrived

    def release(self, bucket: int) -> None:
        for transport, _ in self._batches.get(bucket, ()):
            self._inboxes[transport].release()

    def rest(self) -> None:
        for inbox in self._inboxes.values():
            inbox.rest()


def _fill(full: Tensor, pieces: Iterable[Piece]) -> None:
    for transfer, piece in pieces:
        place = full
        if transfer.hf_dim is not None:
            place = full.narrow(transfer.hf_dim, transfer.hf_start, transfer.length)
        place.copy_(piece)

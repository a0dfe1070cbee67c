"""Which transport carries what: chosen per pair of members from where they run, and set up by all together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

import torch
from torch.distributed import Store

from megatron_rl.errors import ReshardError
from megatron_rl.reshard.placement import Placement
from megatron_rl.reshard.transports.base import Membership, Transport
from megatron_rl.reshard.transports.gloo import GlooTransport
from megatron_rl.reshard.transports.handoff import Memory
from megatron_rl.reshard.transports.local import LocalHub, LocalTransport
from megatron_rl.reshard.transports.nccl import NcclTransport, lane_of, nccl_lanes
from megatron_rl.reshard.transports.rendezvous import join_store
from megatron_rl.reshard.transports.shared import CudaMemory, FileMemory, SharedTransport

TransportKind = Literal["auto", "gloo", "nccl", "shared"]


class Router:
    """The transports of one member, found by the other end."""

    def __init__(
        self, member: Membership, by_peer: Mapping[int, Transport], *, joined: Sequence[Transport],
        store: Store | None = None,
    ) -> None:  # fmt: skip
        """`joined` are all that this member takes part in, those without messages for it too."""
        self._member, self._by_peer, self._joined = member, by_peer, list(joined)
        self._store = store  # the last reference to the store of rank 0 ends it

    @property
    def member(self) -> Membership:
        return self._member

    def to(self, peer: int) -> Transport:
        return self._by_peer[peer]

    def close(self) -> None:
        """Leave the group: members that wait for this one fail at once. Safe to call twice."""
        for transport in self._joined:
            transport.close()
        self._joined = []


def choose_kind(placement: Placement, sender: int, receiver: int, *, kind: TransportKind) -> str:
    """`shared`, `nccl` or `gloo` for what `sender` sends to `receiver`.

    `auto`: shared on one device or, without devices, on one node; NCCL between devices; else gloo.
    Raises ReshardError when these two cannot use the `kind` that is asked for.
    """
    devices = placement.device(sender), placement.device(receiver)
    same_node = placement.node(sender) == placement.node(receiver)
    is_shared = placement.share_device(sender, receiver) or (same_node and devices == (None, None))
    if kind == "gloo" or (kind == "shared" and is_shared):
        return kind
    if kind == "shared":
        raise ReshardError(
            f"engine.transport: got shared, but member {sender} and member {receiver} of the transfer are on different "
            f"{'devices' if same_node else 'nodes'}; use auto"
        )
    if kind == "nccl" and (None in devices or is_shared):
        raise ReshardError(
            f"engine.transport: got nccl, but member {sender} and member {receiver} of the transfer "
            f"{'share a GPU' if is_shared and None not in devices else 'do not both have a GPU'}; use auto"
        )
    if is_shared:
        return "shared"
    return "gloo" if None in devices else "nccl"


def connect(
    member: Membership,
    placement: Placement,
    *,
    receivers: Sequence[int],
    senders: Sequence[int],
    relays: bool,
    kind: TransportKind = "auto",
    store: Store | None = None,
) -> Router:
    """Join the group that meets at `member.host:port`; returns when those that this member needs did.

    `receivers` and `senders` are the members that this one has messages for and from; `relays`: some workers
    anywhere send to others. Rank 0 passes the store
    from `open_store`. Raises ReshardError naming the member that did not come in time.
    """
    store = store if store is not None else join_store(member)
    kinds = {
        (sender, receiver): choose_kind(placement, sender, receiver, kind=kind)
        for sender, receiver in _pairs(member, receivers, senders)
    }
    by_peer: dict[int, Transport] = {}
    joined: list[Transport] = []

    def use(transport: Transport, peers: Iterable[int]) -> None:
        joined.append(transport)
        by_peer.update(dict.fromkeys(peers, transport))

    # every member takes part in what is collective, whether or not it has messages that go there
    used = _kinds_in(placement, member, kind, relays=relays)
    if "gloo" in used:
        use(GlooTransport(member, store), _peers(member, kinds, "gloo"))
    if "nccl" in used:
        peers = _peers(member, kinds, "nccl")
        lanes = nccl_lanes(placement, relays=relays)
        for index, lane in enumerate(lanes):
            if member.rank in lane and len(lane) > 1:
                transport = NcclTransport(member, store, members=lane, name=str(index))
                use(
                    transport,
                    [p for p in peers if lane_of(placement, lanes, *sorted((member.rank, p))) == index],
                )
    if shared := _peers(member, kinds, "shared"):
        memory = _memory(placement, member.rank)
        use(
            SharedTransport(
                member,
                store,
                receivers=[peer for peer in receivers if peer in shared],
                senders=[peer for peer in senders if peer in shared],
                memory=memory,
            ),
            shared,
        )
    return Router(member, by_peer, joined=joined, store=store)


def connect_in_process(
    member: Membership,
    hub: LocalHub,
    *,
    receivers: Sequence[int],
    senders: Sequence[int],
    device: torch.device,
) -> Router:
    """The same for members that are threads of one process and share `hub`."""
    transport = LocalTransport(member, hub, receivers=receivers, senders=senders, device=device)
    return Router(member, dict.fromkeys({*receivers, *senders}, transport), joined=[transport])


def _pairs(member: Membership, receivers: Sequence[int], senders: Sequence[int]) -> Iterator[tuple[int, int]]:
    yield from ((member.rank, receiver) for receiver in receivers)
    yield from ((sender, member.rank) for sender in senders)


def _peers(member: Membership, kinds: dict[tuple[int, int], str], kind: str) -> list[int]:
    return sorted({peer for pair, found in kinds.items() if found == kind for peer in pair} - {member.rank})


def _kinds_in(placement: Placement, member: Membership, kind: TransportKind, *, relays: bool) -> set[str]:
    """Of all pairs that could have messages; every member finds the same."""
    if kind != "auto":
        return {kind}
    # one member of each place stands for all there
    trainers = {(placement.node(m), placement.device(m)): m for m in range(member.num_trainers)}
    workers = {(placement.node(m), placement.device(m)): m for m in range(member.num_trainers, member.world)}
    return {
        choose_kind(placement, sender, receiver, kind=kind)
        for sender in (*trainers.values(), *(workers.values() if relays else ()))
        for receiver in workers.values()
    }


def _memory(placement: Placement, rank: int) -> Memory:
    if placement.device(rank) is None:
        return FileMemory()
    return CudaMemory(torch.device("cuda", torch.cuda.current_device()))

"""A plan in numbers: what moves, how evenly, and how far it is from the least that could move."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import groupby, pairwise
from math import prod
from operator import add, ne
from typing import TYPE_CHECKING, Any

from megatron_rl.reshard.buckets import need_bytes

if TYPE_CHECKING:
    from megatron_rl.reshard.plan import ReshardPlan


def summarise(plan: ReshardPlan) -> dict[str, Any]:
    """Sizes in bytes, counts and ratios; plain JSON types.

    `bytes_moved` is what arrives at all workers: `local_bytes` by a copy on one device, the rest on wires,
    inside nodes or between them; what members send and receive is that on wires. `minimum_bytes` is the least
    that wires must carry for every worker to have all that it needs, `cross_node_minimum_bytes` the least that
    must enter nodes when one copy for a node is enough. `broadcast_bytes`: whole tensors to every worker. The
    peaks are what the busiest member has in two consecutive buckets, copies included.
    """
    traffic = _traffic(plan)
    on_device, least_entering = _minimum(plan)
    minimum = needed_bytes(plan) - on_device
    on_wires = sum(traffic.received)
    model_bytes = sum(prod(shape) for shape in plan.shapes.values()) * plan.element_bytes
    slices = [interval.bytes for segment in plan.segments for interval in segment.intervals]
    senders, relays = traffic.sent[: plan.num_trainers], traffic.sent[plan.num_trainers :]
    return {
        "source": asdict(plan.source),
        "target": {"tp": plan.target_tp, "replicas": plan.replicas},
        "nodes": plan.placement.num_nodes,
        "two_tier": plan.two_tier,
        "element_bytes": plan.element_bytes,
        "tensors": len(plan.shapes),
        "model_bytes": model_bytes,
        "bytes_moved": on_wires + traffic.local,
        "local_bytes": traffic.local,
        "intra_node_bytes": on_wires - traffic.cross,
        "cross_node_bytes": traffic.cross,
        "minimum_bytes": minimum,
        "ratio_to_minimum": _ratio(on_wires, minimum),
        "cross_node_minimum_bytes": least_entering,
        "cross_node_ratio": _ratio(traffic.cross, least_entering),
        "broadcast_bytes": model_bytes * plan.num_workers,
        "bucket_bytes": plan.bucket_bytes,
        "buckets": plan.num_buckets,
        "messages": traffic.messages,
        "transfers": sum(len(s.intervals) * len(r) for s, r in zip(plan.segments, plan.routes, strict=True)),
        "smallest_slice_bytes": min(slices),
        "largest_slice_bytes": max(slices),
        "sent_bytes": dict(enumerate(senders)),
        "send_imbalance": _imbalance(senders),
        "received_bytes": dict(enumerate(traffic.received)),
        "receive_imbalance": _imbalance(traffic.received),
        "relayed_bytes": dict(enumerate(relays)) if plan.two_tier else {},
        "peak_send_bytes": traffic.peak_send,
        "peak_receive_bytes": traffic.peak_receive,
    }


def needed_bytes(plan: ReshardPlan) -> int:
    """Bytes of everything that workers need, from the needs alone."""
    return plan.replicas * sum(
        need_bytes(plan.shapes[name], need, plan.element_bytes)
        for table in plan.needs
        for name, need in table.items()
    )


@dataclass(frozen=True, slots=True)
class _Traffic:
    """Bytes on wires per member and per worker, and what `summarise` says of all."""

    sent: list[int]
    received: list[int]
    local: int
    cross: int
    messages: int
    peak_send: int
    peak_receive: int


def _traffic(plan: ReshardPlan) -> _Traffic:
    wires = _Wires(plan)
    sent, received = [0] * wires.num_members, [0] * plan.num_workers
    packed, unpacked = [], []  # per bucket: of every member, of every tp rank
    cross = messages = 0
    routes = zip(plan.segments, plan.routes, strict=True)
    for _, bucket in groupby(routes, key=lambda route: route[0].bucket):
        out, into = [0] * wires.num_members, [0] * plan.target_tp
        pairs: set[int] = set()
        for segment, senders in bucket:
            workers = plan.workers_of(segment)
            for sender, count in Counter(senders).items():
                out[sender] += count * segment.bytes
            for rank in segment.tp_ranks:
                into[rank] += segment.bytes
            for sender, worker in wires.copies(senders, workers):
                sent[sender] -= segment.bytes
                received[worker - plan.num_trainers] -= segment.bytes
            cross += wires.num_crossing(senders, workers) * segment.bytes
            pairs.update(map(add, map(wires.first_pair.__getitem__, senders), workers))
        messages += len(pairs)
        packed.append(out)
        unpacked.append(into)
    local = -sum(received)
    sent = [less + sum(column) for less, column in zip(sent, zip(*packed, strict=True), strict=True)]
    arrived = [sum(column) for column in zip(*unpacked, strict=True)]
    received = [less + arrived[worker % plan.target_tp] for worker, less in enumerate(received)]
    return _Traffic(sent, received, local, cross, messages, _peak(packed), _peak(unpacked))


class _Wires:
    """What lies between members: nothing on one device, a wire inside a node, or one between nodes."""

    def __init__(self, plan: ReshardPlan) -> None:
        place = plan.placement
        self.num_members = plan.num_trainers + plan.num_workers
        members = range(self.num_members)
        self.first_pair = [member * self.num_members for member in members]  # numbers (sender, receiver)
        self._node = [place.node(member) for member in members]
        self._is_one_node = place.num_nodes == 1
        self._device = [place.device(member) for member in members]
        devices = self._device[: plan.num_trainers]
        self._has_copies = bool(({*devices} & {*self._device[plan.num_trainers :]}) - {None})

    def copies(self, senders: Sequence[int], workers: Sequence[int]) -> Iterator[tuple[int, int]]:
        """The pairs that share a device."""
        if self._has_copies:
            for sender, worker in zip(senders, workers, strict=True):
                if self._device[sender] is not None and self._device[sender] == self._device[worker]:
                    yield sender, worker

    def num_crossing(self, senders: Sequence[int], workers: Sequence[int]) -> int:
        """Number of pairs on different nodes."""
        if self._is_one_node:
            return 0
        node_of = self._node.__getitem__
        return sum(map(ne, map(node_of, senders), map(node_of, workers)))


def _minimum(plan: ReshardPlan) -> tuple[int, int]:
    """(bytes that are on the device of their worker already, bytes that must enter some node)."""
    place = plan.placement

    @cache
    def held(holdings: tuple[int, ...]) -> tuple[set[int], set[tuple[int, int] | None]]:
        ranks = [rank for index in holdings for rank in plan.holdings[index].ranks]
        return {place.node(rank) for rank in ranks}, {place.device(rank) for rank in ranks} - {None}

    @cache
    def missing(tp_ranks: tuple[int, ...], holdings: tuple[int, ...]) -> tuple[int, int]:
        nodes, devices = held(holdings)
        workers = plan.members.workers_of(tp_ranks)
        local = sum(place.device(worker) in devices for worker in workers)
        return local, len({place.node(worker) for worker in workers} - nodes)

    local = entering = 0
    for segment in plan.segments:
        num_local, num_nodes = missing(segment.tp_ranks, segment.holdings)
        local += num_local * segment.bytes
        entering += num_nodes * segment.bytes
    return local, entering


def _imbalance(sizes: Sequence[int]) -> float:
    return max(sizes) * len(sizes) / sum(sizes) if any(sizes) else 1.0


def _ratio(got: int, least: int) -> float:
    return got / least if least else 1.0


def _peak(per_bucket: Sequence[Sequence[int]]) -> int:
    """Most bytes of one member in two consecutive buckets."""
    nothing = [0] * len(per_bucket[0])
    return max(max(map(sum, zip(*pair, strict=True))) for pair in pairwise([*per_bucket, nothing]))

"""A plan in numbers: what moves, how evenly, and how far it is from the least that could move."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megatron_rl.reshard.buckets import need_bytes
from megatron_rl.reshard.segments import Segment

if TYPE_CHECKING:
    from megatron_rl.reshard.plan import ReshardPlan

Ints = NDArray[np.int64]


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
    sent, received = traffic.sent.sum(axis=0), traffic.received.sum(axis=0)
    trainers, workers = sent[: plan.num_trainers], received[plan.num_trainers :]
    on_wires = int(received.sum())
    model_bytes = sum(prod(shape) for shape in plan.shapes.values()) * plan.element_bytes
    slices = [interval.bytes for segment in plan.segments for interval in segment.intervals]
    return {
        "source": asdict(plan.source),
        "target": {"tp": plan.target_tp, "replicas": plan.replicas},
        "nodes": plan.placement.num_nodes,
        "two_tier": plan.two_tier,
        "element_bytes": plan.element_bytes,
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
        "transfers": traffic.transfers,
        "smallest_slice_bytes": min(slices),
        "largest_slice_bytes": max(slices),
        "sent_bytes": _table(trainers),
        "send_imbalance": _imbalance(trainers),
        "received_bytes": _table(workers),
        "receive_imbalance": _imbalance(workers),
        "relayed_bytes": _table(sent[plan.num_trainers :]) if plan.two_tier else {},
        "peak_send_bytes": _peak(traffic.packed),
        "peak_receive_bytes": _peak(traffic.unpacked),
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
    """Bytes per bucket and member, on wires and together with copies on one device, and totals."""

    sent: Ints
    received: Ints
    packed: Ints
    unpacked: Ints
    local: int
    cross: int
    messages: int
    transfers: int


def _traffic(plan: ReshardPlan) -> _Traffic:
    members = plan.num_trainers + plan.num_workers
    packed, unpacked, sent, received = np.zeros((4, plan.num_buckets, members), dtype=np.int64)
    node = np.array([plan.placement.node(member) for member in range(members)])
    device = np.array([_device_number(plan, member) for member in range(members)])
    cross = transfers = 0
    pairs: list[set[int]] = [set() for _ in range(plan.num_buckets)]
    for segment, senders, workers in _routes(plan):
        bucket, size = segment.bucket, segment.bytes
        on_wire = device[senders] != device[workers]
        packed[bucket] += np.bincount(senders, minlength=members) * size
        sent[bucket] += np.bincount(senders[on_wire], minlength=members) * size
        unpacked[bucket, workers] += size
        received[bucket, workers[on_wire]] += size
        cross += int(np.count_nonzero(node[senders] != node[workers])) * size
        transfers += len(segment.intervals) * len(workers)
        pairs[bucket].update((senders * members + workers).tolist())
    messages = sum(len(found) for found in pairs)
    local = int(unpacked.sum() - received.sum())
    return _Traffic(sent, received, packed, unpacked, local, cross, messages, transfers)


def _routes(plan: ReshardPlan) -> Iterator[tuple[Segment, Ints, Ints]]:
    """Every segment with its senders and workers, as members."""
    for segment, senders in zip(plan.segments, plan.routes, strict=True):
        yield segment, np.array(senders, dtype=np.int64), plan.workers_of(segment)


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


def _device_number(plan: ReshardPlan, member: int) -> int:
    """Equal for members of one device alone."""
    place = plan.placement.device(member)
    if place is None:
        return -1 - member
    node, device = place
    return node * (1 << 32) + device


def _table(sizes: Ints) -> dict[int, int]:
    return dict(enumerate(sizes.tolist()))


def _imbalance(sizes: Ints) -> float:
    mean = float(sizes.mean())
    return float(sizes.max()) / mean if mean else 1.0


def _ratio(got: int, least: int) -> float:
    return got / least if least else 1.0


def _peak(per_bucket: Ints) -> int:
    """Most bytes of one member in two consecutive buckets."""
    following = np.vstack([per_bucket[1:], np.zeros_like(per_bucket[:1])])
    return int((per_bucket + following).max())

"""Who sends what: one sender for every segment and worker, near before far, loads kept even."""

from __future__ import annotations

import heapq
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from math import gcd, lcm
from typing import NamedTuple

from megatron_rl.reshard.placement import Placement
from megatron_rl.reshard.segments import Holding, Interval, Segment

Routes = array  # of int: the sending member for each worker of a segment, in the order of `workers_of`

_SMALLEST_SHARE = 256  # a segment is not split for balance into shares below 1/256 of a bucket
_MOST_SHARES = 32  # nor into more than this for the balance of both tiers


class Members(NamedTuple):
    """The transfer group: trainer ranks 0 .. trainers - 1, then engine workers, replica by replica."""

    trainers: int
    target_tp: int
    replicas: int

    @property
    def workers(self) -> int:
        return self.target_tp * self.replicas

    def workers_of(self, tp_ranks: Sequence[int]) -> list[int]:
        """The members with one of `tp_ranks` in their engine, lowest first."""
        return [
            self.trainers + replica * self.target_tp + rank
            for replica in range(self.replicas)
            for rank in tp_ranks
        ]

    def column_of(self, tp_ranks: Sequence[int], worker: int) -> int:
        """The position of a member in `workers_of(tp_ranks)`, which must hold it."""
        replica, rank = divmod(worker - self.trainers, self.target_tp)
        return replica * len(tp_ranks) + tp_ranks.index(rank)


def choose_routes(
    segments: Iterable[Segment],
    holdings: Sequence[Holding],
    members: Members,
    placement: Placement,
    *,
    two_tier: bool,
    bucket_bytes: int,
) -> tuple[tuple[Segment, ...], tuple[Routes, ...]]:
    """Segments, split where one sender each would load some ranks more than others, and their routes.

    Preferred is the trainer rank on the worker's own device, then one on its node, then the one that sends
    least in this bucket, then least so far, then the lowest. With `two_tier` a node without a trainer rank
    that holds the segment receives it once; the worker that received it sends it to the others there.
    """
    router = _Router(holdings, members, placement, two_tier=two_tier)
    chosen: list[Segment] = []
    routes: list[Routes] = []
    for group in _by_bucket(segments):
        router.start_bucket()
        for segment in group:
            for share in split(segment, router.num_shares(segment, bucket_bytes // _SMALLEST_SHARE)):
                chosen.append(share)
                routes.append(router.route(share))
    return tuple(chosen), tuple(routes)


def split(segment: Segment, count: int) -> Iterator[Segment]:
    """The segment cut into at most `count` shares of about equal size."""
    edges = [segment.bytes * k // count for k in range(1, count)] + [segment.bytes]
    share: list[Interval] = []
    position = 0
    for interval in segment.intervals:
        while position + interval.bytes > edges[0] and len(edges) > 1:
            head, interval_rest = _cut(interval, edges[0] - position)
            if head is not None:
                share.append(head)
                position += head.bytes
            if share:
                yield _share(segment, share)
                share = []
            edges.pop(0)
            interval = interval_rest
        share.append(interval)
        position += interval.bytes
    if share:
        yield _share(segment, share)


def _cut(interval: Interval, size: int) -> tuple[Interval | None, Interval]:
    """About the first `size` bytes of an interval, and what remains; a whole tensor stays in one."""
    if interval.dim is None:
        return None, interval
    row_bytes = interval.bytes // interval.length
    rows = size // row_bytes
    if rows <= 0:
        return None, interval
    tensor, dim, start, length, _ = interval
    return (
        Interval(tensor, dim, start, rows, rows * row_bytes),
        Interval(tensor, dim, start + rows, length - rows, (length - rows) * row_bytes),
    )


def _share(segment: Segment, intervals: list[Interval]) -> Segment:
    return Segment(
        segment.bucket, segment.tp_ranks, segment.holdings, tuple(intervals), sum(i.bytes for i in intervals)
    )


def _by_bucket(segments: Iterable[Segment]) -> Iterator[list[Segment]]:
    """Segments of each bucket, those with least choice of a sender first, then the largest."""
    buckets: dict[int, list[Segment]] = defaultdict(list)
    for segment in segments:
        buckets[segment.bucket].append(segment)
    for _, group in sorted(buckets.items()):
        yield sorted(group, key=_least_choice_first)


def _least_choice_first(segment: Segment) -> tuple[object, ...]:
    first = segment.intervals[0]
    return len(segment.holdings), -segment.bytes, first.tensor, first.start, segment.tp_ranks


def _ranks_by_device(placement: Placement, members: Members) -> dict[tuple[int, int] | None, list[int]]:
    """Trainer ranks on each device; without devices there are none."""
    ranks: dict[tuple[int, int] | None, list[int]] = defaultdict(list)
    for rank in range(members.trainers):
        if (device := placement.device(rank)) is not None:
            ranks[device].append(rank)
    return dict(ranks)


class _Router:
    """Chooses senders one segment after the other and keeps what every member sends."""

    def __init__(
        self, holdings: Sequence[Holding], members: Members, placement: Placement, *, two_tier: bool
    ) -> None:
        self._holdings, self._members = holdings, members
        self._two_tier = two_tier
        self._placement, self._on_device = placement, _ranks_by_device(placement, members)
        self._total = [0] * (members.trainers + members.workers)
        self._bucket = list(self._total)
        self.holders = cache(self._holders)
        self.workers = cache(self._workers)

    def start_bucket(self) -> None:
        self._bucket = [0] * len(self._total)

    def num_shares(self, segment: Segment, smallest: int) -> int:
        """Into how many shares to split a segment so that its holders can send equally much."""
        holders = len(self.holders(segment.holdings)[0])
        nodes = self.workers(segment.tp_ranks)
        sends = len(nodes) if self._two_tier else self._members.replicas * len(segment.tp_ranks)
        even = min(holders // gcd(holders, sends), -(-8 * holders // sends))
        if self._two_tier:
            # the workers of a node that pass it on should have as many shares each, too
            relays = max(len(workers) for workers in nodes.values())
            even = lcm(even, relays) if lcm(even, relays) <= _MOST_SHARES else -(-relays // even) * even
        return max(1, min(even, segment.bytes // max(smallest, 1)))

    def route(self, segment: Segment) -> Routes:
        holders, by_node = self.holders(segment.holdings)
        sender: dict[int, int] = {}
        entries: list[int] = []  # workers that receive from another node
        for node, workers in self.workers(segment.tp_ranks).items():
            if near := by_node.get(node):
                for worker in workers:
                    sender[worker] = self._near(segment, near, worker)
            elif self._two_tier:
                relay = min(workers, key=self._load) if len(workers) > 1 else workers[0]
                entries.append(relay)
                for worker in workers:
                    if worker != relay:
                        sender[worker] = relay
                        self._count(relay, segment.bytes)
            else:
                entries += workers
        if entries:
            self._spread(segment.bytes, holders, entries, sender)
        return array("i", [sender[worker] for worker in sorted(sender)])

    def _near(self, segment: Segment, holders: Sequence[int], worker: int) -> int:
        for rank in self._on_device.get(self._placement.device(worker), ()):
            if rank in holders:
                return rank  # a copy, which loads no link
        bucket, total = self._bucket, self._total
        # a call of `_load` for each would cost half of the planning of a large model
        _, _, sender = min([(bucket[rank], total[rank], rank) for rank in holders])
        self._count(sender, segment.bytes)
        return sender

    def _spread(
        self, size: int, holders: Sequence[int], workers: Sequence[int], sender: dict[int, int]
    ) -> None:
        """One holder per worker, always the least loaded."""
        heap = [self._load(rank) for rank in holders]
        heapq.heapify(heap)
        for worker in workers:
            bucket, total, rank = heap[0]
            sender[worker] = rank
            heapq.heapreplace(heap, (bucket + size, total + size, rank))
        for bucket, total, rank in heap:
            self._bucket[rank], self._total[rank] = bucket, total

    def _load(self, member: int) -> tuple[int, int, int]:
        return self._bucket[member], self._total[member], member

    def _count(self, member: int, size: int) -> None:
        self._bucket[member] += size
        self._total[member] += size

    def _holders(self, holdings: tuple[int, ...]) -> tuple[list[int], Mapping[int, list[int]]]:
        ranks = sorted(rank for index in holdings for rank in self._holdings[index].ranks)
        return ranks, self._nodes(ranks)

    def _workers(self, tp_ranks: tuple[int, ...]) -> Mapping[int, list[int]]:
        return self._nodes(self._members.workers_of(tp_ranks))

    def _nodes(self, members: Iterable[int]) -> dict[int, list[int]]:
        nodes: dict[int, list[int]] = defaultdict(list)
        for member in members:
            nodes[self._placement.node(member)].append(member)
        return dict(nodes)

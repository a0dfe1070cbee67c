"""The proof that a plan is complete, from the plan and the two tables alone; nothing of how it was made.

Engines are alike, so what holds for the intervals of one tensor-parallel rank holds for the worker of that
rank in every engine, provided that each of them has one sender for each of its segments: both are checked.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING

from megatron_rl.errors import ReshardError
from megatron_rl.reshard.buckets import need_bytes
from megatron_rl.reshard.segments import Interval, Segment
from megatron_rl.reshard.tables import Need

if TYPE_CHECKING:
    from megatron_rl.reshard.plan import ReshardPlan


def check_plan(plan: ReshardPlan) -> None:
    """Raises ReshardError naming tensor, worker and place of whatever is missing, doubled or misplaced."""
    check_intervals(plan)
    check_tiling(plan)
    check_routes(plan)
    check_buckets(plan)
    check_totals(plan)


def check_intervals(plan: ReshardPlan) -> None:
    """Every interval has the bytes that its shape says and lies in one piece of each rank that may send it."""
    for segment in plan.segments:
        for interval in segment.intervals:
            name = plan.names[interval.tensor]
            _check_size(plan, name, interval)
            for index in segment.holdings:
                holding = plan.holdings[index]
                if holding.place(name, interval) is None:
                    raise ReshardError(
                        f"reshard plan: {_span(name, interval)} is planned from trainer rank {holding.ranks[0]}, "
                        f"which does not hold all of it"
                    )
        if sum(interval.bytes for interval in segment.intervals) != segment.bytes:
            raise ReshardError(
                f"reshard plan: a segment of bucket {segment.bucket} says {segment.bytes} bytes, its intervals "
                f"from {plan.names[segment.intervals[0].tensor]} on have another sum"
            )


def check_tiling(plan: ReshardPlan) -> None:
    """The intervals that go to each tensor-parallel rank tile its need of each tensor, once."""
    for rank, table in enumerate(plan.needs):
        arriving: list[list[Interval]] = [[] for _ in plan.names]
        for segment in plan.segments:
            if rank in segment.tp_ranks:
                for interval in segment.intervals:
                    arriving[interval.tensor].append(interval)
        for name, intervals in zip(plan.names, arriving, strict=True):
            need = table[name]
            if len(intervals) != 1 or intervals[0][1:4] != need:
                _check_exact(name, plan.shapes[name], need, intervals, rank)


def check_routes(plan: ReshardPlan) -> None:
    """Every worker of every segment has one sender, which holds it or passes on what it receives itself."""
    if len(plan.routes) != len(plan.segments):
        raise ReshardError(f"reshard plan: {len(plan.segments)} segments, but senders for {len(plan.routes)}")
    for segment, senders in zip(plan.segments, plan.routes, strict=True):
        workers = plan.workers_of(segment)
        if len(senders) != len(workers):
            raise ReshardError(
                f"reshard plan: {_first(plan, segment)} goes to {len(workers)} workers, but has "
                f"{len(senders)} senders"
            )
        kinds = set(senders)
        direct = {sender for sender in kinds if 0 <= sender < plan.num_trainers}
        for sender in sorted(direct):
            if plan.holding_of[sender] not in segment.holdings:
                worker = workers[senders.index(sender)]
                raise ReshardError(
                    f"reshard plan: {_first(plan, segment)} goes to {_worker(plan, worker)} from trainer "
                    f"rank {sender}, which does not hold it"
                )
        if kinds != direct:
            _check_relays(plan, segment, dict(zip(workers, senders, strict=True)), direct)


def _check_relays(
    plan: ReshardPlan, segment: Segment, sender_of: Mapping[int, int], direct: set[int]
) -> None:
    """Whoever is no trainer rank must be a worker of the same node that one sends the segment to."""
    node = plan.placement.node
    for worker, sender in sender_of.items():
        if sender not in direct and (sender_of.get(sender) not in direct or node(sender) != node(worker)):
            raise ReshardError(
                f"reshard plan: {_first(plan, segment)} goes to {_worker(plan, worker)} from "
                f"{_worker(plan, sender)}, which must be on the same node and receive it from a trainer rank"
            )


def check_buckets(plan: ReshardPlan) -> None:
    """No worker receives more than a bucket, no byte of a tensor later than it is said to be complete."""
    last = {
        part.tensor: index for index, bucket in enumerate(plan.buckets) for part in bucket if part.is_last
    }
    finished = [tensor for bucket in range(plan.num_buckets) for tensor in plan.completed[bucket]]
    if sorted(finished) != list(range(len(plan.names))):
        missing = sorted(set(range(len(plan.names))) - set(finished))
        what = f"{plan.names[missing[0]]} is never" if missing else "a tensor is more than once"
        raise ReshardError(f"reshard plan: {what} complete in the buckets")
    fill: dict[tuple[int, int], int] = defaultdict(int)
    for segment in plan.segments:
        for rank in segment.tp_ranks:
            fill[segment.bucket, rank] += segment.bytes
        for interval in segment.intervals:
            if segment.bucket > last[interval.tensor]:
                raise ReshardError(
                    f"reshard plan: {_span(plan.names[interval.tensor], interval)} arrives in bucket "
                    f"{segment.bucket}, but is said to be complete in bucket {last[interval.tensor]}"
                )
    for (bucket, rank), size in fill.items():
        if size > plan.bucket_bytes:
            raise ReshardError(
                f"reshard plan: tp rank {rank} receives {size} bytes in bucket {bucket}, the limit is "
                f"{plan.bucket_bytes}"
            )


def check_totals(plan: ReshardPlan) -> None:
    """Bytes into each worker are those of its needs, and bytes out of all senders those into all workers."""
    received, sent = [0] * plan.target_tp, 0
    for segment, senders in zip(plan.segments, plan.routes, strict=True):
        sent += segment.bytes * len(senders)
        for rank in segment.tp_ranks:
            received[rank] += segment.bytes
    for rank, table in enumerate(plan.needs):
        needed = sum(need_bytes(plan.shapes[name], need, plan.element_bytes) for name, need in table.items())
        if received[rank] != needed:
            raise ReshardError(
                f"reshard plan: tp rank {rank} receives {received[rank]} bytes, but needs {needed}"
            )
    if sent != plan.replicas * sum(received):
        raise ReshardError(f"reshard plan: {sent} bytes leave, {plan.replicas * sum(received)} arrive")


def _check_size(plan: ReshardPlan, name: str, interval: Interval) -> None:
    shape = plan.shapes[name]
    expected = prod(shape) * plan.element_bytes
    if interval.dim is not None:
        expected = expected // shape[interval.dim] * interval.length
    if interval.bytes != expected or (interval.dim is not None and interval.length < 1):
        raise ReshardError(
            f"reshard plan: {_span(name, interval)} moves {interval.bytes} bytes, its interval has {expected}"
        )


def _check_exact(name: str, shape: tuple[int, ...], need: Need, intervals: list[Interval], rank: int) -> None:
    """The intervals tile the need: sorted by start, each begins where the one before ends."""
    dim, cursor, length = need
    whole = [interval for interval in intervals if interval.dim is None]
    if whole:
        if dim is not None or len(intervals) > 1:
            raise ReshardError(
                f"reshard plan: {name} goes whole to tp rank {rank}, together with {len(intervals) - 1} other "
                f"intervals of it; it needs {'it once' if dim is None else f'{length} along dim {dim}'}"
            )
        return
    if dim is None:
        dim, cursor, length = 0, 0, shape[0]
    end = cursor + length
    for interval in sorted(intervals, key=lambda i: i.start):
        if interval.dim != dim:
            raise ReshardError(
                f"reshard plan: {name} goes to tp rank {rank} along dim {interval.dim}, needed along dim {dim}"
            )
        if interval.start != cursor:
            kind = "a gap" if interval.start > cursor else "an overlap"
            raise ReshardError(
                f"reshard plan: {kind} in {name} for tp rank {rank} along dim {dim}: index {cursor} expected, "
                f"got {interval.start}"
            )
        cursor += interval.length
    if cursor != end:
        raise ReshardError(
            f"reshard plan: {name} for tp rank {rank} along dim {dim} ends at {cursor}, needed up to {end}"
        )


def _span(name: str, interval: Interval) -> str:
    if interval.dim is None:
        return name
    return f"{name}[{interval.start}:{interval.start + interval.length}] along dim {interval.dim}"


def _first(plan: ReshardPlan, segment: Segment) -> str:
    return _span(plan.names[segment.intervals[0].tensor], segment.intervals[0])


def _worker(plan: ReshardPlan, member: int) -> str:
    return f"worker {member - plan.num_trainers}"

"""The proof that a plan is complete, from the plan and the two tables alone; nothing of how it was made.

Engines are alike, so what holds for the intervals of one tensor-parallel rank holds for the worker of that
rank in every engine, provided that each of them has one sender for each of its segments: both are checked.
"""

from __future__ import annotations

from collections import defaultdict
from math import prod
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from megatron_rl.errors import ReshardError
from megatron_rl.reshard.buckets import need_bytes
from megatron_rl.reshard.segments import Interval, Segment
from megatron_rl.reshard.tables import Need

if TYPE_CHECKING:
    from megatron_rl.reshard.plan import ReshardPlan

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


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
    holding = np.array(plan.holding_of)
    for segment, route in zip(plan.segments, plan.routes, strict=True):
        workers, senders = plan.workers_of(segment), np.array(route)
        if len(senders) != len(workers):
            raise ReshardError(
                f"reshard plan: {_first(plan, segment)} goes to {len(workers)} workers, but has "
                f"{len(senders)} senders"
            )
        holds = np.zeros(len(plan.holdings), dtype=bool)
        holds[list(segment.holdings)] = True
        direct = (senders >= 0) & (senders < plan.num_trainers)
        wrong = direct & ~holds[holding[np.where(direct, senders, 0)]]
        if wrong.any():
            at = int(wrong.argmax())
            raise ReshardError(
                f"reshard plan: {_first(plan, segment)} goes to {_worker(plan, workers[at])} from trainer "
                f"rank {senders[at]}, which does not hold it"
            )
        if not direct.all():
            _check_relays(plan, segment, direct, senders)


def _check_relays(plan: ReshardPlan, segment: Segment, direct: Bools, senders: Ints) -> None:
    """Whoever is no trainer rank must be a worker of the same node that one sends the segment to."""
    workers, node = plan.workers_of(segment), plan.placement.node
    first_hand = set(workers[direct].tolist())
    for worker, sender in zip(workers[~direct].tolist(), senders[~direct].tolist(), strict=True):
        if sender not in first_hand or node(sender) != node(worker):
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
    """Bytes out of all senders, into all workers, and of all needs are the same."""
    needed = [
        sum(need_bytes(plan.shapes[name], need, plan.element_bytes) for name, need in table.items())
        for table in plan.needs
    ]
    received = np.zeros(plan.num_trainers + plan.num_workers, dtype=np.int64)
    sent = 0
    for segment, senders in zip(plan.segments, plan.routes, strict=True):
        sent += segment.bytes * len(senders)
        received[plan.workers_of(segment)] += segment.bytes
    for worker, size in enumerate(received[plan.num_trainers :].tolist()):
        if size != needed[worker % plan.target_tp]:
            raise ReshardError(
                f"reshard plan: worker {worker} receives {size} bytes, but needs {needed[worker % plan.target_tp]}"
            )
    if sent != received.sum():
        raise ReshardError(f"reshard plan: {sent} bytes leave, {received.sum()} arrive")


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

"""The reshard plan: which interval goes from which trainer rank to which engine worker, and when. No tensors.

Every process builds the plan alone from the same few numbers and gets the same one (`digest` proves it). A
plan that `plan_reshard` returns is complete: each worker's need is tiled exactly, with no gap and no overlap.

Inside, a plan is a list of segments, intervals that travel together, and for each the sender per worker.
Single transfers are derived from that, for one member at a time.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from megatron_rl.errors import ReshardError
from megatron_rl.model.hf_tables import hf_tensors
from megatron_rl.model.spec import ModelSpec
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.reshard.buckets import DEFAULT_BUCKET_BYTES, Bucket, completed, cut_buckets, travel_order
from megatron_rl.reshard.placement import Placement
from megatron_rl.reshard.plan_summary import summarise
from megatron_rl.reshard.plan_text import explain, explain_tensor
from megatron_rl.reshard.proof import check_plan
from megatron_rl.reshard.routes import Members, Routes, choose_routes
from megatron_rl.reshard.segments import Holding, Interval, Segment, build_segments, read_holdings, stages_of
from megatron_rl.reshard.tables import Need, target_needs


@dataclass(frozen=True, slots=True)
class Transfer:
    """One interval of one HF tensor, and where it stands in the parameters of the trainer rank that holds it.

    Elements `hf_start : hf_start + length` along `hf_dim` of the HF tensor are read from `param_start` on
    along `param_dim` of `param` in model chunk `chunk`. `hf_dim` None: the whole tensor, `length` 0.
    """

    hf_name: str
    hf_dim: int | None
    hf_start: int
    length: int
    chunk: int
    param: str
    param_dim: int | None
    param_start: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Message:
    """Everything that one member sends to another in one bucket; `transfers` are in the order of its bytes.

    Members are trainer ranks 0 .. num_trainers - 1, then workers. A worker sends, in a two-tier plan, what it
    receives from a trainer rank in the same bucket.
    """

    bucket: int
    sender: int
    receiver: int
    transfers: tuple[Transfer, ...]
    bytes: int


@dataclass(frozen=True, kw_only=True)
class ReshardPlan:
    """Messages from the trainer layout `source` to `replicas` engines of `target_tp` workers, bucket by bucket.

    Worker `replica * target_tp + tp rank` is member `num_trainers + worker` of the transfer group. Buckets are
    the same for everybody; executed in ascending order they cannot wait for each other in a circle.
    """

    spec: ModelSpec
    source: ParallelLayout
    target_tp: int
    replicas: int
    element_bytes: int
    placement: Placement = field(repr=False)
    bucket_bytes: int
    two_tier: bool
    needs: tuple[dict[str, Need], ...] = field(repr=False)  # per tensor-parallel rank of an engine
    holdings: tuple[Holding, ...] = field(repr=False)
    buckets: tuple[Bucket, ...] = field(repr=False)
    segments: tuple[Segment, ...] = field(repr=False)
    routes: tuple[Routes, ...] = field(repr=False)  # per segment, the sender for each of its workers

    @property
    def num_trainers(self) -> int:
        return self.source.world_size

    @property
    def num_workers(self) -> int:
        return self.target_tp * self.replicas

    @property
    def num_buckets(self) -> int:
        return len(self.buckets)

    @property
    def members(self) -> Members:
        return Members(self.num_trainers, self.target_tp, self.replicas)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Full shape of every HF tensor, in the order in which engines load them."""
        return hf_tensors(self.spec)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """HF names in checkpoint order."""
        return tuple(self.shapes)

    @cached_property
    def completed(self) -> tuple[tuple[int, ...], ...]:
        """Per bucket, the positions of the tensors whose last byte arrives in it."""
        return tuple(completed(self.buckets))

    def workers_of(self, segment: Segment) -> list[int]:
        """The members that need a segment, lowest first: those of its row in `routes`."""
        if segment.tp_ranks not in self._workers:
            self._workers[segment.tp_ranks] = self.members.workers_of(segment.tp_ranks)
        return self._workers[segment.tp_ranks]

    @cached_property
    def _workers(self) -> dict[tuple[int, ...], list[int]]:
        return {}

    @cached_property
    def holding_of(self) -> tuple[int, ...]:
        """Per trainer rank, the position of its holding in `holdings`."""
        owner = {rank: index for index, holding in enumerate(self.holdings) for rank in holding.ranks}
        return tuple(owner[rank] for rank in range(self.num_trainers))

    def messages_from(self, member: int) -> list[Message]:
        """What a member sends, ordered by bucket and receiver."""
        found: dict[tuple[int, int, int], list[int]] = defaultdict(list)
        for index, (segment, senders) in enumerate(zip(self.segments, self.routes, strict=True)):
            if member in senders:
                for worker, sender in zip(self.workers_of(segment), senders, strict=True):
                    if sender == member:
                        found[segment.bucket, member, worker].append(index)
        return self._messages(found)

    def messages_to(self, member: int) -> list[Message]:
        """What a worker receives, ordered by bucket and sender; `member` is its place in the transfer group."""
        found: dict[tuple[int, int, int], list[int]] = defaultdict(list)
        if member >= self.num_trainers:
            tp_rank = (member - self.num_trainers) % self.target_tp
            for index, (segment, senders) in enumerate(zip(self.segments, self.routes, strict=True)):
                if tp_rank in segment.tp_ranks:
                    sender = senders[self.members.column_of(segment.tp_ranks, member)]
                    found[segment.bucket, sender, member].append(index)
        return self._messages(found)

    def completes(self, bucket: int) -> tuple[str, ...]:
        """HF names, in checkpoint order, whose last byte arrives in a bucket; each name is in exactly one.

        From bucket to bucket, layers of different pipeline stages take turns (see `buckets`).
        """
        return tuple(self.names[tensor] for tensor in self.completed[bucket])

    def bytes_moved(self) -> int:
        return sum(
            segment.bytes * len(senders) for segment, senders in zip(self.segments, self.routes, strict=True)
        )

    def piece_shape(self, transfer: Transfer) -> tuple[int, ...]:
        """Shape of the moved interval: the HF shape, cut along `hf_dim`."""
        shape = list(self.shapes[transfer.hf_name])
        if transfer.hf_dim is not None:
            shape[transfer.hf_dim] = transfer.length
        return tuple(shape)

    def origin(self, segment: int, sender: int) -> int:
        """The trainer rank from which a segment comes that `sender` sends: itself, unless it passes it on."""
        if sender < self.num_trainers:
            return sender
        return self.routes[segment][self.members.column_of(self.segments[segment].tp_ranks, sender)]

    def summary(self) -> dict[str, Any]:
        """Sizes, counts and balance; see `plan_summary.summarise` for each."""
        return summarise(self)

    def explain(self) -> str:
        """The summary as a table for a person."""
        return explain(self.summary(), self.digest())

    def explain_tensor(self, name: str) -> str:
        """The path of one tensor. Raises ReshardError with the nearest names when there is none."""
        return explain_tensor(self, name)

    def inputs(self) -> dict[str, Any]:
        """The few numbers from which `plan_from_inputs` builds the same plan elsewhere; JSON-able."""
        return {
            "spec": asdict(self.spec),
            "source": asdict(self.source),
            "target_tp": self.target_tp,
            "replicas": self.replicas,
            "element_bytes": self.element_bytes,
            "placement": asdict(self.placement),
            "bucket_bytes": self.bucket_bytes,
            "two_tier": self.two_tier,
        }

    def to_json(self) -> str:
        """The whole plan; canonical, so two equal plans are equal texts.

        `holdings`: ranks and their pieces. `buckets`: (tensor, number, parts). `segments`: bucket, tp ranks,
        holdings, intervals as (tensor, dim, start, length, bytes). `routes`: per segment the sender for each of
        its workers. Tensors are positions in `tensors`.
        """
        pieces = [
            [[p.hf_name, p.hf_dim, p.hf_start, p.length, p.chunk, p.param, p.param_dim, p.param_start]
             for group in holding.pieces.values() for p in group]
            for holding in self.holdings
        ]  # fmt: skip
        return json.dumps(
            {
                **self.inputs(),
                "tensors": self.names,
                "holdings": [[h.ranks, held] for h, held in zip(self.holdings, pieces, strict=True)],
                "buckets": self.buckets,
                "segments": [[s.bucket, s.tp_ranks, s.holdings, s.intervals] for s in self.segments],
                "routes": [list(senders) for senders in self.routes],
            },
            separators=(",", ":"),
        )

    def digest(self) -> str:
        """128 bits in hex; equal on every process that built the same plan."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        return hashlib.blake2b(self.to_json().encode(), digest_size=16).hexdigest()

    def _messages(self, found: Mapping[tuple[int, int, int], Sequence[int]]) -> list[Message]:
        """Messages by bucket, sender, receiver. Those with equal bytes share their `transfers`, as an object."""
        contents: dict[tuple[tuple[int, int], ...], tuple[Transfer, ...]] = {}
        messages = []
        for (bucket, sender, receiver), segments in sorted(found.items()):
            key = tuple((segment, self.holding_of[self.origin(segment, sender)]) for segment in segments)
            if key not in contents:
                contents[key] = self._transfers(key)
            size = sum(self.segments[segment].bytes for segment in segments)
            messages.append(Message(bucket, sender, receiver, contents[key], size))
        return messages

    def _transfers(self, segments: Iterable[tuple[int, int]]) -> tuple[Transfer, ...]:
        """The intervals of (segment, holding) pairs in checkpoint order."""
        intervals = [
            (interval, self.holdings[holding])
            for segment, holding in segments
            for interval in self.segments[segment].intervals
        ]
        intervals.sort(key=lambda item: (item[0].tensor, item[0].start))
        return tuple(self._transfer(interval, holding) for interval, holding in intervals)

    def _transfer(self, interval: Interval, holding: Holding) -> Transfer:
        name = self.names[interval.tensor]
        place = holding.place(name, interval)
        assert place is not None  # proven when the plan was built
        return Transfer(name, interval.dim, interval.start, interval.length, *place, interval.bytes)


def plan_reshard(
    spec: ModelSpec,
    source: ParallelLayout,
    *,
    target_tp: int,
    replicas: int,
    element_bytes: int,
    placement: Placement | None = None,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    two_tier: bool = False,
) -> ReshardPlan:
    """Plan a full weight transfer and prove it complete.

    `element_bytes` is the width on the wire. `placement` None: everybody on one node without devices. A worker
    receives at most `bucket_bytes` in one bucket. With `two_tier` every byte enters a node at most once, and
    workers pass it on inside.

    Raises LayoutError if the engine cannot hold the model, ReshardError naming the tensor if the source does
    not hold all of it.
    """
    needs = tuple(target_needs(spec, tp=target_tp, rank=rank) for rank in range(target_tp))
    members = Members(source.world_size, target_tp, replicas)
    placement = placement or Placement.one_node(members.trainers, members.workers)
    check_placement(placement, members)
    holdings = read_holdings(spec, source)
    shapes = hf_tensors(spec)
    order = travel_order(list(shapes), stages_of(holdings, source))
    buckets = cut_buckets(order, shapes, needs, element_bytes=element_bytes, bucket_bytes=bucket_bytes)
    segments, routes = choose_routes(
        build_segments(shapes, holdings, needs, buckets, element_bytes=element_bytes),
        holdings,
        members,
        placement,
        two_tier=two_tier,
        bucket_bytes=bucket_bytes,
    )
    plan = ReshardPlan(
        spec=spec,
        source=source,
        target_tp=target_tp,
        replicas=replicas,
        element_bytes=element_bytes,
        placement=placement,
        bucket_bytes=bucket_bytes,
        two_tier=two_tier,
        needs=needs,
        holdings=holdings,
        buckets=buckets,
        segments=segments,
        routes=routes,
    )
    check_plan(plan)
    return plan


def check_placement(placement: Placement, members: Members) -> None:
    """Raises ReshardError when `placement` is of another number of ranks or workers."""
    for side, got, wanted in (
        ("trainer ranks", len(placement.trainer_nodes), members.trainers),
        ("engine workers", len(placement.worker_nodes), members.workers),
    ):
        if got != wanted:
            raise ReshardError(f"placement: places {got} {side}, but there are {wanted}")


def plan_from_inputs(inputs: Mapping[str, Any], *, digest: str) -> ReshardPlan:
    """Rebuild a plan from `ReshardPlan.inputs`. Raises ReshardError when it is not the plan with `digest`."""
    plan = plan_reshard(
        ModelSpec.from_plain(inputs["spec"]),
        ParallelLayout(**inputs["source"]),
        target_tp=inputs["target_tp"],
        replicas=inputs["replicas"],
        element_bytes=inputs["element_bytes"],
        placement=Placement(**{key: tuple(value) for key, value in inputs["placement"].items()}),
        bucket_bytes=inputs["bucket_bytes"],
        two_tier=inputs["two_tier"],
    )
    if plan.digest() != digest:
        raise ReshardError(
            f"reshard plan: this process planned {plan.digest()}, the trainer {digest}; "
            f"both must run the same version of megatron_rl"
        )
    return plan

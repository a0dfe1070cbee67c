"""What can travel together: intervals of one bucket that the same ranks hold and the same workers need."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from megatron_rl.errors import ReshardError
from megatron_rl.model.hf_tables import Piece, source_pieces
from megatron_rl.model.spec import ModelSpec
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.reshard.buckets import Bucket, Part, slice_bytes
from megatron_rl.reshard.tables import Need


class Interval(NamedTuple):
    """Elements `start : start + length` along `dim` of an HF tensor; `dim` None: all of it, `length` 0."""

    tensor: int  # position in checkpoint order
    dim: int | None
    start: int
    length: int
    bytes: int


class Place(NamedTuple):
    """Where an interval stands in the parameters of a trainer rank; `param_dim` None: all of `param`."""

    chunk: int
    param: str
    param_dim: int | None
    param_start: int


@dataclass(frozen=True, slots=True)
class Holding:
    """Trainer ranks that hold the same intervals in the same places of their parameters."""

    ranks: tuple[int, ...]
    pieces: Mapping[str, tuple[Piece, ...]]  # HF name: its intervals there

    def place(self, name: str, interval: Interval) -> Place | None:
        """Where these ranks hold the interval; None when no single piece has all of it."""
        for piece in self.pieces.get(name, ()):
            offset = interval.start - piece.hf_start
            if piece.hf_dim is None:
                return Place(piece.chunk, piece.param, interval.dim, interval.start)
            if piece.hf_dim == interval.dim and 0 <= offset <= piece.length - interval.length:
                return Place(piece.chunk, piece.param, piece.param_dim, piece.param_start + offset)
        return None


@dataclass(frozen=True, slots=True)
class Segment:
    """Intervals that travel together, from one of their holders to every worker that needs them.

    Workers are named by their tensor-parallel rank: all engines need the same.
    """

    bucket: int
    tp_ranks: tuple[int, ...]
    holdings: tuple[int, ...]  # positions in the plan's holdings, of those that have all intervals
    intervals: tuple[Interval, ...]  # in checkpoint order
    bytes: int


def read_holdings(spec: ModelSpec, source: ParallelLayout) -> tuple[Holding, ...]:
    """Every trainer rank's pieces, ranks with the same pieces together, lowest rank first.

    Ranks that differ only in what replica of the model or of an expert they are hold the same.
    """
    alike: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank in range(source.world_size):
        tp_rank, _, pp_rank = source.coord(rank)
        alike[tp_rank, pp_rank, *source.expert_coord(rank)[:2]].append(rank)
    holdings = []
    for ranks in alike.values():
        pieces: dict[str, list[Piece]] = defaultdict(list)
        for piece in source_pieces(spec, source, rank=ranks[0]):
            pieces[piece.hf_name].append(piece)
        holdings.append(Holding(tuple(ranks), {name: tuple(group) for name, group in pieces.items()}))
    return tuple(holdings)


def stages_of(holdings: Sequence[Holding], source: ParallelLayout) -> dict[str, tuple[int, ...]]:
    """Per HF tensor, the pipeline stages that hold it."""
    stages: dict[str, dict[int, None]] = defaultdict(dict)
    for holding in holdings:
        _, _, pp_rank = source.coord(holding.ranks[0])
        for name in holding.pieces:
            stages[name][pp_rank] = None
    return {name: tuple(found) for name, found in stages.items()}


def build_segments(
    shapes: Mapping[str, tuple[int, ...]],
    holdings: Sequence[Holding],
    needs: Sequence[Mapping[str, Need]],
    buckets: Sequence[Bucket],
    *,
    element_bytes: int,
) -> Iterator[Segment]:
    """Every interval that a worker needs in exactly one segment per tp rank that needs it, bucket by bucket.

    `needs` has one table per tensor-parallel rank of an engine. Raises ReshardError naming the tensor and
    place that no trainer rank holds.
    """
    names = list(shapes)
    holders: dict[str, list[tuple[int, Piece]]] = defaultdict(list)
    for index, holding in enumerate(holdings):
        for name, pieces in holding.pieces.items():
            holders[name] += [(index, piece) for piece in pieces]
    seen: dict[object, list[_Stretch]] = {}
    for bucket_index, bucket in enumerate(buckets):
        together: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Interval]] = defaultdict(list)
        for part in bucket:
            name = names[part.tensor]
            wanted = tuple(table[name] for table in needs)
            held = tuple((index, p.hf_dim, p.hf_start, p.length) for index, p in holders[name])
            # experts and layers repeat, and are cut in the same way
            alike = shapes[name], wanted, held, part.number, part.parts
            if alike not in seen:
                seen[alike] = list(_stretches(name, shapes[name], wanted, holders[name], part, element_bytes))
            for stretch in seen[alike]:
                together[stretch.tp_ranks, stretch.holdings].append(Interval(part.tensor, *stretch.span))
        for (tp_ranks, group), intervals in together.items():
            size = sum(interval.bytes for interval in intervals)
            yield Segment(bucket_index, tp_ranks, group, tuple(intervals), size)


class _Stretch(NamedTuple):
    """A part of one tensor, its tensor left out."""

    tp_ranks: tuple[int, ...]
    holdings: tuple[int, ...]
    span: tuple[int | None, int, int, int]  # dim, start, length and bytes of an Interval


def _stretches(
    name: str,
    shape: tuple[int, ...],
    wanted: Sequence[Need],
    holders: Sequence[tuple[int, Piece]],
    part: Part,
    element_bytes: int,
) -> Iterator[_Stretch]:
    """Each interval that is needed, cut where the set of holdings that have it changes."""
    for need in dict.fromkeys(wanted):
        tp_ranks = tuple(rank for rank, other in enumerate(wanted) if other == need)
        dim = need[0] or 0  # a whole tensor is cut along its first dimension, if at all
        start, length = (0, shape[0]) if need[0] is None else need[1:]
        first, end = part.bounds(start, length)
        spans = [(*_span(name, shape, dim, piece), index) for index, piece in holders]
        inner = {edge for low, high, _ in spans for edge in (low, high) if first < edge < end}
        for low, high in pairwise(sorted({first, end} | inner)):
            group = tuple(dict.fromkeys(i for start, stop, i in spans if start <= low and high <= stop))
            if not group:
                raise ReshardError(
                    f"reshard plan: a gap in {name}: no trainer rank holds {low} to {high} along dim {dim}"
                )
            size = (high - low) * slice_bytes(shape, dim, element_bytes)
            whole = need[0] is None and high - low == shape[0]
            yield _Stretch(tp_ranks, group, (None, 0, 0, size) if whole else (dim, low, high - low, size))


def _span(name: str, shape: tuple[int, ...], dim: int, piece: Piece) -> tuple[int, int]:
    if piece.hf_dim is None:
        return 0, shape[dim]
    if piece.hf_dim != dim:
        raise ReshardError(
            f"reshard plan: {name} is held in intervals along dim {piece.hf_dim}, but needed along dim {dim}"
        )
    return piece.hf_start, piece.hf_start + piece.length

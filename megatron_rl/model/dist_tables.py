"""Where the tensors of a Hugging Face checkpoint stand in a distributed checkpoint of megatron-core. Pure Python.

A distributed checkpoint holds every parameter once and whole, whatever layout wrote it: as the one rank of a run
without model parallelism would hold it. So the table of that rank (`source_pieces`) says where each HF tensor
stands; only names differ: megatron-core stacks the layers of a model, and the experts of a layer, along leading
axes of one tensor. Rows of vocabulary padding may follow the real ones and mean nothing.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from megatron_rl.model.hf_tables import hf_tensors, source_pieces
from megatron_rl.model.pieces import Piece
from megatron_rl.model.spec import ModelSpec
from megatron_rl.parallel.layout import ParallelLayout

_LAYER = re.compile(r"(decoder\.layers\.)(\d+)\.(.+)")
_EXPERT = re.compile(r"(.+\.mlp\.experts\.)local_experts\.(\d+)\.(.+)")
# megatron-core's own layer specs name the norms after the linear layers that follow them
OTHER_KEYS = {
    "decoder.layers.self_attention.linear_qkv.layer_norm_weight": "decoder.layers.input_layernorm.weight",
    "decoder.layers.mlp.linear_fc1.layer_norm_weight": "decoder.layers.pre_mlp_layernorm.weight",
}
_LINEAR = re.compile(r"(.+\.linear_\w+)\.weight")


@dataclass(frozen=True, slots=True)
class Place:
    """An interval of one HF tensor inside a tensor of a distributed checkpoint.

    Elements `hf_start : hf_start + length` along `dim` of the HF tensor are elements `start : start + length` along
    `dim` of `key[index]`. `dim` None: the whole tensor.
    """

    key: str
    index: tuple[int, ...]  # position on the leading axes: layer, or layer and expert
    hf_name: str
    dim: int | None
    hf_start: int
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Shard:
    """A box of `key[index]` that one rank writes, and the intervals of HF tensors that fill it."""

    key: str
    index: tuple[int, ...]
    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    places: tuple[Place, ...]


@dataclass(frozen=True, slots=True)
class StoredShape:
    """A tensor of a distributed checkpoint: sizes of the leading axes, then the shape of the parameter."""

    leading: tuple[int, ...]
    param: tuple[int, ...]


def places(spec: ModelSpec) -> dict[str, list[Place]]:
    """HF name -> where its parts stand."""
    found: dict[str, list[Place]] = {name: [] for name in hf_tensors(spec)}
    for piece in source_pieces(spec, ParallelLayout(), rank=0):
        assert piece.hf_dim == piece.param_dim, "a whole parameter is cut as the HF tensor is"
        key, index = _stored_name(piece.param)
        place = Place(
            key, index, piece.hf_name, piece.hf_dim, piece.hf_start, piece.param_start, piece.length
        )
        found[piece.hf_name].append(place)
    return found


def _stored_name(param: str) -> tuple[str, tuple[int, ...]]:
    """Key of a parameter in a distributed checkpoint, and its position on the leading axes."""
    layer = _LAYER.fullmatch(param)
    if layer is None:
        return param, ()
    key, index = layer[1] + layer[3], (int(layer[2]),)
    expert = _EXPERT.fullmatch(key)
    if expert is None:
        return key, index
    return f"{expert[1]}experts.{expert[3]}", (*index, int(expert[2]))


def stored_shapes(spec: ModelSpec) -> dict[str, StoredShape]:
    """Every tensor of the model in a distributed checkpoint; vocabulary rows are the real ones."""
    shapes = hf_tensors(spec)
    leading: dict[str, tuple[int, ...]] = {}
    param: dict[str, tuple[int, ...]] = {}
    for name, held in places(spec).items():
        for place in held:
            counts = tuple(i + 1 for i in place.index)
            leading[place.key] = tuple(map(max, leading.get(place.key, counts), counts))
            shape = list(shapes[name])
            if place.dim is not None:
                so_far = param.get(place.key)
                shape[place.dim] = max(place.start + place.length, so_far[place.dim] if so_far else 0)
            param[place.key] = tuple(shape)
    return {key: StoredShape(leading[key], param[key]) for key in param}


def extra_state_keys(spec: ModelSpec) -> list[str]:
    """Names under which megatron-core looks for the extra state of linear layers, one per layer and expert."""
    names = []
    for key, shape in stored_shapes(spec).items():
        linear = _LINEAR.fullmatch(key)
        if linear and shape.leading:
            total = ".".join(map(str, shape.leading))
            names += [
                f"{linear[1]}._extra_state/shard_{'.'.join(map(str, index))}_{total}"
                for index in product(*map(range, shape.leading))
            ]
    return names


def shards(spec: ModelSpec, layout: ParallelLayout) -> list[list[Shard]]:
    """For each rank of `layout` the shards it writes; what several ranks hold is written by the first."""
    table, shapes = places(spec), hf_tensors(spec)
    seen: set[tuple[str, int]] = set()
    by_rank = []
    for rank in range(layout.world_size):
        held: dict[tuple[str, tuple[int, ...]], list[Place]] = defaultdict(list)
        for piece in source_pieces(spec, layout, rank=rank):
            if (piece.hf_name, piece.hf_start) in seen:
                continue
            seen.add((piece.hf_name, piece.hf_start))
            for place in _places_of(piece, table[piece.hf_name]):
                held[place.key, place.index].append(place)
        by_rank.append([shard for group in held.values() for shard in _boxes(group, shapes)])
    return by_rank


def _places_of(piece: Piece, whole: list[Place]) -> Iterator[Place]:
    """The parts of a HF tensor's places that a piece of it covers."""
    for place in whole:
        if piece.hf_dim is None:
            yield place
            continue
        low = max(piece.hf_start, place.hf_start)
        high = min(piece.hf_start + piece.length, place.hf_start + place.length)
        if high > low:
            start = place.start + low - place.hf_start
            yield Place(place.key, place.index, place.hf_name, place.dim, low, start, high - low)


def _boxes(held: list[Place], shapes: dict[str, tuple[int, ...]]) -> Iterator[Shard]:
    """Places of one parameter on one rank, joined where one begins where another ends."""
    run: list[Place] = []
    for place in sorted(held, key=lambda p: p.start):
        if run and run[-1].start + run[-1].length != place.start:
            yield _box(run, shapes)
            run = []
        run.append(place)
    yield _box(run, shapes)


def _box(run: list[Place], shapes: dict[str, tuple[int, ...]]) -> Shard:
    first, last = run[0], run[-1]
    sizes = list(shapes[first.hf_name])
    starts = [0] * len(sizes)
    if first.dim is not None:
        starts[first.dim] = first.start
        sizes[first.dim] = last.start + last.length - first.start
    return Shard(first.key, first.index, tuple(starts), tuple(sizes), tuple(run))

"""A distributed checkpoint holds each element of each HF tensor exactly once, however it is cut into files."""

from __future__ import annotations

import math
from collections import defaultdict
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.model.dist_tables import Shard, places, shards, stored_shapes
from megatron_rl.model.hf_tables import hf_tensors
from megatron_rl.model.spec import ModelSpec, MoeSpec
from megatron_rl.parallel.layout import ParallelLayout

FAMILIES = ("qwen2", "qwen3", "qwen3_moe", "llama")


@st.composite
def cases(draw: st.DrawFn) -> tuple[ModelSpec, ParallelLayout]:
    """A small model and a tp x pp that can split it."""
    family = draw(st.sampled_from(FAMILIES))
    tp, pp = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 3]))
    kv_heads = draw(st.sampled_from([1, 2, 4]))
    spec = ModelSpec(
        family=family,
        num_layers=pp * draw(st.integers(1, 2)),
        hidden_size=8,
        ffn_size=4 * draw(st.integers(1, 3)),
        num_heads=kv_heads * draw(st.sampled_from([4, 8])),
        num_kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([2, 4])),
        vocab_size=draw(st.integers(1, 200)),
        max_positions=64,
        rope_theta=1e4,
        norm_eps=1e-6,
        tied=draw(st.booleans()),
        qkv_bias=family == "qwen2",
        qk_norm=family.startswith("qwen3"),
        moe=_experts(draw) if family == "qwen3_moe" else None,
    )
    layout = ParallelLayout(tp=tp, pp=pp, sp=tp > 1)
    spec.check_layout(layout)
    return spec, layout


def _experts(draw: st.DrawFn) -> MoeSpec:
    return MoeSpec(
        num_experts=draw(st.integers(1, 3)), experts_per_token=1, expert_ffn_size=4, normalise_top_k=True
    )


def elements(shard: Shard, dim: int) -> set[int]:
    """Positions along `dim` of the parameter."""
    return set(range(shard.starts[dim], shard.starts[dim] + shard.sizes[dim]))


@settings(deadline=None, max_examples=150)
@given(cases())
def test_shards_of_all_ranks_tile_every_stored_tensor(case: tuple[ModelSpec, ParallelLayout]) -> None:
    spec, layout = case
    held: dict[tuple[str, tuple[int, ...]], list[Shard]] = defaultdict(list)
    for rank in shards(spec, layout):
        for shard in rank:
            held[shard.key, shard.index].append(shard)
    wanted = stored_shapes(spec)
    assert {key for key, _ in held} == wanted.keys()
    for key, shape in wanted.items():
        assert sum(k == key for k, _ in held) == math.prod(shape.leading)
    for (key, index), group in held.items():
        shape = wanted[key]
        assert all(i < n for i, n in zip(index, shape.leading, strict=True))
        # boxes of one parameter are cut along one dimension, whole in the others
        assert sum(math.prod(shard.sizes) for shard in group) == math.prod(shape.param)
        assert len({box for shard in group for box in boxes_of(shard)}) == math.prod(shape.param)


def boxes_of(shard: Shard) -> set[tuple[int, ...]]:
    """Every element of a shard."""
    found: set[tuple[int, ...]] = {()}
    for dim in range(len(shard.sizes)):
        found = {(*point, i) for point in found for i in elements(shard, dim)}
    return found


@settings(deadline=None, max_examples=150)
@given(cases())
def test_places_fill_every_hf_tensor_once_and_shards_are_made_of_them(
    case: tuple[ModelSpec, ParallelLayout],
) -> None:
    spec, layout = case
    shapes, table = hf_tensors(spec), places(spec)
    for name, held in table.items():
        if held[0].dim is None:
            assert len(held) == 1
            continue
        ends = sorted((place.hf_start, place.hf_start + place.length) for place in held)
        assert ends[0][0] == 0 and ends[-1][1] == shapes[name][held[0].dim]
        assert all(a[1] == b[0] for a, b in pairwise(ends))
    for rank in shards(spec, layout):
        for shard in rank:
            for part in shard.places:
                # the same element of the HF tensor stands at the same element of the stored one
                assert any(
                    (whole.key, whole.index, whole.dim) == (part.key, part.index, part.dim)
                    and whole.hf_start - whole.start == part.hf_start - part.start
                    for whole in table[part.hf_name]
                )

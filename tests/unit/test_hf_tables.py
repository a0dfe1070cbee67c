"""The tables of import, export and resharding: complete, exact, and in megatron-core's order."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.model.hf_tables import (
    EMBEDDING,
    VOCAB_MULTIPLE,
    hf_tensors,
    padded_vocab,
    source_pieces,
)
from megatron_rl.model.spec import ModelSpec
from megatron_rl.parallel.layout import ParallelLayout


def model(**changes: object) -> ModelSpec:
    sizes = {
        "family": "qwen2", "num_layers": 4, "hidden_size": 12, "ffn_size": 48, "num_heads": 8,
        "num_kv_heads": 2, "head_dim": 4, "vocab_size": 37, "max_positions": 64, "rope_theta": 1e4,
        "norm_eps": 1e-6, "tied": False, "qkv_bias": True, "qk_norm": False,
    }
    return ModelSpec(**(sizes | changes))  # type: ignore[arg-type]


@st.composite
def models_and_layouts(draw: st.DrawFn) -> tuple[ModelSpec, ParallelLayout]:
    tp = draw(st.sampled_from([1, 2, 4, 8]))
    pp, vpp = draw(st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 1), (2, 4)]))
    spec = model(
        num_layers=8, num_kv_heads=draw(st.sampled_from([1, 2, 4, 8])), vocab_size=draw(st.integers(1, 300)),
        tied=draw(st.booleans()), qkv_bias=draw(st.booleans()), qk_norm=draw(st.booleans()),
    )
    return spec, ParallelLayout(tp=tp, pp=pp, vpp=vpp)


@given(models_and_layouts())
def test_every_element_of_every_tensor_is_held_exactly_as_often_as_it_must(
    case: tuple[ModelSpec, ParallelLayout],
) -> None:
    """Sharded tensors once over tp, norms on every tp rank, a tied embedding on both end stages."""
    spec, layout = case
    held = {name: torch.zeros(shape, dtype=torch.int64) for name, shape in hf_tensors(spec).items()}
    for rank in range(layout.world_size):
        for piece in source_pieces(spec, layout, rank=rank):
            target = held[piece.hf_name]
            if piece.hf_dim is not None:
                target = target.narrow(piece.hf_dim, piece.hf_start, piece.length)
            target += 1
    for name, count in held.items():
        expected = layout.tp if "norm" in name else 1
        if name == EMBEDDING and spec.tied and layout.pp > 1:
            expected = 2
        assert torch.equal(count, torch.full_like(count, expected)), name


@given(models_and_layouts())
def test_pieces_of_one_parameter_are_disjoint_and_leave_no_gap(
    case: tuple[ModelSpec, ParallelLayout],
) -> None:
    spec, layout = case
    for rank in range(layout.world_size):
        rows: dict[tuple[int, str], list[int]] = {}
        for piece in source_pieces(spec, layout, rank=rank):
            covered = range(piece.param_start, piece.param_start + piece.length)
            rows.setdefault((piece.chunk, piece.param), []).extend(covered)
        for name, covered_rows in rows.items():
            assert sorted(covered_rows) == list(range(len(covered_rows))), name


def test_fused_qkv_rows_run_queries_then_key_then_value_of_each_kv_head() -> None:
    """Written out by hand for 4 query heads over 2 kv heads of 2 rows each."""
    spec = model(num_heads=4, num_kv_heads=2, head_dim=2, qkv_bias=False)
    whole = [
        "q0", "q1", "q2", "q3", "k0", "k1", "v0", "v1",
        "q4", "q5", "q6", "q7", "k2", "k3", "v2", "v3",
    ]
    for tp in (1, 2, 4):
        rows: list[str] = []
        for tp_rank in range(tp):
            local: dict[int, str] = {}
            for piece in source_pieces(spec, ParallelLayout(tp=tp), rank=tp_rank):
                if piece.param == "decoder.layers.0.self_attention.linear_qkv.weight":
                    letter = piece.hf_name.split(".")[-2][0]
                    for i in range(piece.length):
                        local[piece.param_start + i] = f"{letter}{piece.hf_start + i}"
            rows += [local[row] for row in sorted(local)]
        assert rows == whole


def test_gate_rows_of_a_rank_stand_before_its_up_rows() -> None:
    pieces = source_pieces(model(), ParallelLayout(tp=2), rank=1)
    fused = [p for p in pieces if p.param == "decoder.layers.0.mlp.linear_fc1.weight"]
    assert [(p.hf_name.split(".")[-2], p.hf_start, p.length, p.param_start) for p in fused] == [
        ("gate_proj", 24, 24, 0), ("up_proj", 24, 24, 24),
    ]


def test_interleaved_chunks_hold_the_layers_megatron_assigns_them() -> None:
    spec, layout = model(num_layers=8), ParallelLayout(pp=2, vpp=2)
    layers = {}
    for pp_rank in range(2):
        for piece in source_pieces(spec, layout, rank=pp_rank):
            if piece.hf_name.endswith(".o_proj.weight"):
                local = int(piece.param.split(".")[2])
                layers[int(piece.hf_name.split(".")[2])] = (pp_rank, piece.chunk, local)
    assert [layers[i] for i in range(8)] == [
        (0, 0, 0), (0, 0, 1), (1, 0, 0), (1, 0, 1), (0, 1, 0), (0, 1, 1), (1, 1, 0), (1, 1, 1),
    ]


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_vocabulary_is_padded_to_whole_shards(tp: int) -> None:
    for size in (1, 15, 16, 17, 251, 256):
        padded = padded_vocab(size, tp)
        assert padded >= size and padded % (VOCAB_MULTIPLE * tp) == 0 and padded - size < VOCAB_MULTIPLE * tp


def test_tensors_come_in_layer_order_without_a_tied_head() -> None:
    names = list(hf_tensors(model(tied=True)))
    assert names[0] == EMBEDDING and names[-1] == "model.norm.weight" and "lm_head.weight" not in names
    layers = [int(name.split(".")[2]) for name in names if ".layers." in name]
    assert layers == sorted(layers) and set(Counter(layers).values()) == {12}


def test_shapes_add_up_to_the_published_size_of_a_model() -> None:
    """Qwen3-8B has 8,190,735,360 parameters."""
    spec = model(
        family="qwen3", num_layers=36, hidden_size=4096, ffn_size=12288, num_heads=32, num_kv_heads=8,
        head_dim=128, vocab_size=151936, qkv_bias=False, qk_norm=True,
    )
    assert sum(math.prod(shape) for shape in hf_tensors(spec).values()) == 8_190_735_360

"""The tables of import, export and resharding: complete, exact, and in megatron-core's order."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from megatron_rl.errors import LayoutError
from megatron_rl.model.hf_tables import (
    EMBEDDING,
    VOCAB_MULTIPLE,
    hf_tensors,
    padded_vocab,
    source_pieces,
)
from megatron_rl.model.spec import ModelSpec, MoeSpec
from megatron_rl.parallel.layout import ParallelLayout


def model(**changes: object) -> ModelSpec:
    sizes = {
        "family": "qwen2",
        "num_layers": 4,
        "hidden_size": 12,
        "ffn_size": 48,
        "num_heads": 8,
        "num_kv_heads": 2,
        "head_dim": 4,
        "vocab_size": 37,
        "max_positions": 64,
        "rope_theta": 1e4,
        "norm_eps": 1e-6,
        "tied": False,
        "qkv_bias": True,
        "qk_norm": False,
    }
    return ModelSpec(**(sizes | changes))  # type: ignore[arg-type]


EXPERTS = MoeSpec(num_experts=8, experts_per_token=2, expert_ffn_size=24, normalise_top_k=True)


@st.composite
def models_and_layouts(draw: st.DrawFn) -> tuple[ModelSpec, ParallelLayout]:
    tp, dp = draw(st.sampled_from([1, 2, 4, 8])), draw(st.sampled_from([1, 2, 4]))
    pp, vpp, first, last = draw(st.sampled_from([
        (1, 1, None, None), (2, 1, None, None), (2, 2, None, None), (4, 1, None, None), (2, 4, None, None),
        (2, 1, 3, 5), (3, 1, 2, None), (3, 1, None, 4), (4, 1, 1, 3), (3, 2, 4, 2), (2, 2, 2, None),
    ]))  # fmt: skip
    moe = draw(st.sampled_from([None, EXPERTS]))
    ep, etp = 1, None
    if moe is not None:
        ep = draw(st.sampled_from([n for n in (1, 2, 4, 8) if tp * dp % n == 0]))
        etp = draw(st.sampled_from([n for n in (1, 2, 4, 8) if tp * dp % (n * ep) == 0])) if ep > 1 else None
    spec = model(
        num_layers=8,
        num_kv_heads=draw(st.sampled_from([1, 2, 4, 8])),
        vocab_size=draw(st.integers(1, 300)),
        tied=draw(st.booleans()),
        qkv_bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
        moe=moe,
    )
    try:
        layout = ParallelLayout(
            tp=tp,
            pp=pp,
            vpp=vpp,
            dp=dp,
            sp=True,
            ep=ep,
            etp=etp,
            first_stage_layers=first,
            last_stage_layers=last,
        )
        spec.check_layout(layout)
    except LayoutError:
        reject()
    return spec, layout


@settings(max_examples=80, deadline=None)
@given(models_and_layouts())
def test_every_element_of_every_tensor_is_held_exactly_as_often_as_it_must(
    case: tuple[ModelSpec, ParallelLayout],
) -> None:
    """Sharded tensors once over tp, norms and routers on every tp rank, a tied embedding on both end stages."""
    spec, layout = case
    held = {name: torch.zeros(shape, dtype=torch.int64) for name, shape in hf_tensors(spec).items()}
    for rank in range(layout.world_size):
        for piece in source_pieces(spec, layout, rank=rank):
            target = held[piece.hf_name]
            if piece.hf_dim is not None:
                target = target.narrow(piece.hf_dim, piece.hf_start, piece.length)
            target += 1
    for name, count in held.items():
        expected = layout.dp
        if "norm" in name or name.endswith("mlp.gate.weight"):
            expected *= layout.tp
        elif ".experts." in name:
            expected = layout.expert_dp
        elif name == EMBEDDING and spec.tied and layout.pp > 1:
            expected *= 2
        assert torch.equal(count, torch.full_like(count, expected)), name


@settings(max_examples=80, deadline=None)
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
        "q0",
        "q1",
        "q2",
        "q3",
        "k0",
        "k1",
        "v0",
        "v1",
        "q4",
        "q5",
        "q6",
        "q7",
        "k2",
        "k3",
        "v2",
        "v3",
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
        ("gate_proj", 24, 24, 0),
        ("up_proj", 24, 24, 24),
    ]


def test_experts_of_a_rank_are_consecutive_and_split_over_etp() -> None:
    """Rank 5 of tp 2 x dp 4 with ep 2 x etp 2: etp rank 1, ep rank 0, so experts 0 to 3, columns from 12 on."""
    spec, layout = model(moe=EXPERTS, num_layers=1), ParallelLayout(tp=2, dp=4, sp=True, ep=2, etp=2)
    assert layout.expert_coord(5) == (1, 0, 1)
    held = [p for p in source_pieces(spec, layout, rank=5) if ".experts.3." in p.hf_name]
    prefix = "decoder.layers.0.mlp.experts.local_experts.3."
    assert [
        (p.hf_name.split(".")[-2], p.hf_dim, p.hf_start, p.length, p.param, p.param_start) for p in held
    ] == [
        ("gate_proj", 0, 12, 12, prefix + "linear_fc1.weight", 0),
        ("up_proj", 0, 12, 12, prefix + "linear_fc1.weight", 12),
        ("down_proj", 1, 12, 12, prefix + "linear_fc2.weight", 0),
    ]
    # the other half of the experts, counted from 0 inside the rank
    other = [p for p in source_pieces(spec, layout, rank=2) if ".experts." in p.hf_name]
    assert {p.hf_name.split(".")[5] for p in other} == {"4", "5", "6", "7"}
    assert {p.param.split(".")[6] for p in other} == {"0", "1", "2", "3"}


def test_interleaved_chunks_hold_the_layers_megatron_assigns_them() -> None:
    spec, layout = model(num_layers=8), ParallelLayout(pp=2, vpp=2)
    layers = {}
    for pp_rank in range(2):
        for piece in source_pieces(spec, layout, rank=pp_rank):
            if piece.hf_name.endswith(".o_proj.weight"):
                local = int(piece.param.split(".")[2])
                layers[int(piece.hf_name.split(".")[2])] = (pp_rank, piece.chunk, local)
    assert [layers[i] for i in range(8)] == [
        (0, 0, 0),
        (0, 0, 1),
        (1, 0, 0),
        (1, 0, 1),
        (0, 1, 0),
        (0, 1, 1),
        (1, 1, 0),
        (1, 1, 1),
    ]


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_vocabulary_is_padded_to_whole_shards(tp: int) -> None:
    for size in (1, 15, 16, 17, 251, 256):
        padded = padded_vocab(size, tp)
        assert padded >= size and padded % (VOCAB_MULTIPLE * tp) == 0 and padded - size < VOCAB_MULTIPLE * tp
        # a size that is padded already is not padded again
        assert padded_vocab(padded, tp) == padded


def test_tensors_come_in_layer_order_without_a_tied_head() -> None:
    names = list(hf_tensors(model(tied=True)))
    assert names[0] == EMBEDDING and names[-1] == "model.norm.weight" and "lm_head.weight" not in names
    layers = [int(name.split(".")[2]) for name in names if ".layers." in name]
    assert layers == sorted(layers) and set(Counter(layers).values()) == {12}


def test_shapes_add_up_to_the_published_size_of_a_mixture() -> None:
    """Qwen3-30B-A3B has 30,532,122,624 parameters."""
    spec = model(
        family="qwen3_moe",
        num_layers=48,
        hidden_size=2048,
        ffn_size=6144,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        vocab_size=151936,
        qkv_bias=False,
        qk_norm=True,
        moe=MoeSpec(num_experts=128, experts_per_token=8, expert_ffn_size=768, normalise_top_k=True),
    )
    assert sum(math.prod(shape) for shape in hf_tensors(spec).values()) == 30_532_122_624


def test_shapes_add_up_to_the_published_size_of_a_model() -> None:
    """Qwen3-8B has 8,190,735,360 parameters."""
    spec = model(
        family="qwen3",
        num_layers=36,
        hidden_size=4096,
        ffn_size=12288,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=151936,
        qkv_bias=False,
        qk_norm=True,
    )
    assert sum(math.prod(shape) for shape in hf_tensors(spec).values()) == 8_190_735_360

"""Plans of known models: sizes, balance, and every way in which a plan can be refused."""

from dataclasses import replace

import pytest

from megatron_rl.errors import LayoutError, ReshardError
from megatron_rl.model.spec import ModelSpec
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.reshard.plan import plan_from_inputs, plan_reshard
from megatron_rl.reshard.tables import target_needs

QWEN3_8B = ModelSpec(
    family="qwen3",
    num_layers=36,
    hidden_size=4096,
    ffn_size=12288,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=151936,
    max_positions=40960,
    rope_theta=1e6,
    norm_eps=1e-6,
    tied=False,
    qkv_bias=False,
    qk_norm=True,
)
TINY = ModelSpec(
    family="qwen2",
    num_layers=2,
    hidden_size=8,
    ffn_size=16,
    num_heads=4,
    num_kv_heads=1,
    head_dim=4,
    vocab_size=100,
    max_positions=64,
    rope_theta=1e4,
    norm_eps=1e-6,
    tied=True,
    qkv_bias=True,
    qk_norm=False,
)
QKV = "model.layers.0.self_attn.{}_proj.weight"


def test_qwen3_8b_moves_the_minimum_and_loads_senders_evenly():
    plan = plan_reshard(QWEN3_8B, ParallelLayout(tp=4, pp=2), target_tp=2, replicas=4, element_bytes=2)
    facts = plan.summary()
    assert facts["model_bytes"] == 16_381_470_720
    # each engine receives the model once, and every worker but the first its own copy of the norms
    norms = (36 * 2 + 1) * 4096 * 2 + 36 * 2 * 128 * 2
    assert plan.bytes_moved() == 4 * (facts["model_bytes"] + norms)
    assert facts["send_imbalance"] < 1.05
    assert "max/mean 1.0" in plan.explain()


def test_a_single_kv_head_is_replicated_on_every_worker():
    needs = [target_needs(TINY, tp=4, rank=rank)[QKV.format("k")] for rank in range(4)]
    assert needs == [(0, 0, 4)] * 4


def test_two_kv_heads_on_four_workers_go_to_pairs():
    spec = replace(TINY, num_kv_heads=2)
    assert [target_needs(spec, tp=4, rank=rank)[QKV.format("v")][1] for rank in range(4)] == [0, 0, 4, 4]


def test_vocabulary_is_split_after_padding():
    rows = [target_needs(TINY, tp=4, rank=rank)["model.embed_tokens.weight"] for rank in range(4)]
    assert rows == [(0, 0, 32), (0, 32, 32), (0, 64, 32), (0, 96, 4)]


def test_a_worker_with_only_padding_receives_no_rows():
    spec = replace(TINY, vocab_size=30)
    plan = plan_reshard(spec, ParallelLayout(), target_tp=2, replicas=1, element_bytes=4)
    assert target_needs(spec, tp=2, rank=1)["model.embed_tokens.weight"] == (0, 30, 0)
    assert "model.embed_tokens.weight" not in {t.hf_name for _, t in received(plan, 1)}


def test_tied_copies_share_the_load_of_the_embedding():
    plan = plan_reshard(TINY, ParallelLayout(pp=2), target_tp=1, replicas=2, element_bytes=4)
    arriving = [*received(plan, 0), *received(plan, 1)]
    senders = {sender for sender, t in arriving if t.hf_name == "model.embed_tokens.weight"}
    assert senders == {0, 1}


def test_data_parallel_replicas_share_the_load():
    layout = ParallelLayout(dp=4)
    plan = plan_reshard(TINY, layout, target_tp=1, replicas=1, element_bytes=4, bucket_bytes=16384)
    sent = plan.summary()["sent_bytes"]
    assert min(sent.values()) > 0


@pytest.mark.parametrize(
    ("changes", "tp", "match"),
    [
        ({}, 3, "attention heads"),
        ({"num_heads": 6, "num_kv_heads": 3}, 2, "kv heads"),
        ({"ffn_size": 15}, 4, "ffn columns"),
        ({"num_heads": 12, "ffn_size": 24}, 12, "padded vocabulary rows"),
    ],
)
def test_an_engine_that_cannot_hold_the_model_is_refused(changes, tp, match):
    with pytest.raises(LayoutError, match=match):
        plan_reshard(replace(TINY, **changes), ParallelLayout(), target_tp=tp, replicas=1, element_bytes=4)


def received(plan, worker):
    """(sender, transfer) of everything that a worker receives."""
    return [(m.sender, t) for m in plan.messages_to(plan.num_trainers + worker) for t in m.transfers]


def test_a_process_with_another_plan_is_refused():
    plan = plan_reshard(TINY, ParallelLayout(tp=2), target_tp=1, replicas=1, element_bytes=4)
    with pytest.raises(ReshardError, match="same version"):
        plan_from_inputs({**plan.inputs(), "element_bytes": 2}, digest=plan.digest())

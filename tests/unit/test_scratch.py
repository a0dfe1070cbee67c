"""Memory for full-shape tensors: used again only when nobody reads it, and still NaN where nothing arrives."""

import torch

from megatron_rl.model.spec import ModelSpec
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.reshard.plan import plan_reshard
from megatron_rl.reshard.scratch import Scratch

SPEC = ModelSpec(
    family="qwen3", num_layers=3, hidden_size=8, ffn_size=16, num_heads=4, num_kv_heads=1, head_dim=4,
    vocab_size=101, max_positions=64, rope_theta=1e4, norm_eps=1e-6, tied=True, qkv_bias=False, qk_norm=True,
)  # fmt: skip
DOWN = "model.layers.{}.mlp.down_proj.weight"  # worker 1 of 2 needs columns 8 to 16


def scratch(*, canary=True, worker=1):
    plan = plan_reshard(SPEC, ParallelLayout(), target_tp=2, replicas=1, element_bytes=4)
    messages = plan.messages_to(1 + worker)
    return Scratch(plan, messages, dtype=torch.float32, device=torch.device("cpu"), canary=canary)


def test_memory_is_used_again_once_nobody_holds_it():
    made = scratch()
    first = made.take(DOWN.format(0))
    place = first.data_ptr()
    del first
    assert made.take(DOWN.format(1)).data_ptr() == place


def test_memory_that_is_held_is_left_alone():
    made = scratch()
    first = made.take(DOWN.format(0))
    view = first.narrow(1, 8, 8).t()
    view.fill_(7.0)
    del first
    second = made.take(DOWN.format(1))
    second.fill_(8.0)
    assert torch.all(view == 7.0)


def test_memory_of_another_interval_is_not_used():
    made = scratch()
    first = made.take("model.layers.0.self_attn.q_proj.weight")  # [16, 8], rows 8 to 16
    place = first.data_ptr()
    del first
    assert made.take("model.layers.0.mlp.up_proj.weight").data_ptr() == place  # the same shape and interval
    assert made.take("model.layers.0.self_attn.o_proj.weight").data_ptr() != place  # [8, 16]


def test_all_that_does_not_arrive_stays_nan():
    made = scratch()
    for layer in range(3):
        full = made.take(DOWN.format(layer))
        full[:, 8:] = float(layer)
        assert full[:, :8].isnan().all()
        assert not full[:, 8:].isnan().any()
        del full


def test_the_whole_of_a_replicated_tensor_arrives():
    assert not scratch().take("model.norm.weight").fill_(1.0).isnan().any()


def test_a_tensor_of_which_nothing_arrives_is_nan():
    # 101 rows padded to 128: the last of four workers has nothing but padding
    plan = plan_reshard(SPEC, ParallelLayout(), target_tp=4, replicas=1, element_bytes=4)
    made = Scratch(plan, plan.messages_to(4), dtype=torch.float32, device=torch.device("cpu"), canary=True)
    full = made.take("model.embed_tokens.weight")
    assert full.shape == (101, 8)
    assert full[:96].isnan().all()

"""The same global batch gives the same loss and gradients however it is spread over ranks and micro-batches."""

from __future__ import annotations

import os
import random
from functools import partial
from pathlib import Path

import pytest

from megatron_rl.parallel.layout import ParallelLayout
from tests.helpers.distributed import run_distributed
from tests.helpers.models import make_tiny_hf

# layout and packed tokens per micro-batch: 400 holds the whole batch, 40 about two samples
ONE_BY_ONE = 1
DENSE = [
    (ParallelLayout(), 400),
    (ParallelLayout(), 90),
    (ParallelLayout(), 40),
    (ParallelLayout(), ONE_BY_ONE),
    (ParallelLayout(tp=2), 400),
    (ParallelLayout(tp=2, sp=True), 90),
    (ParallelLayout(pp=2), 90),
    (ParallelLayout(pp=2, vpp=2), 90),
    (ParallelLayout(pp=2, first_stage_layers=1), 90),
    (ParallelLayout(dp=2), 90),
    (ParallelLayout(dp=2), ONE_BY_ONE),
    (ParallelLayout(tp=2, pp=2, sp=True), 90),
    (ParallelLayout(tp=2, dp=2, sp=True), 60),
    (ParallelLayout(pp=2, dp=2), 60),
    (ParallelLayout(tp=4), 90),
]
EXPERTS = [
    (ParallelLayout(), 400),
    (ParallelLayout(), 90),
    (ParallelLayout(), ONE_BY_ONE),
    (ParallelLayout(tp=2, sp=True), 90),
    (ParallelLayout(dp=2), 90),
    (ParallelLayout(dp=2, ep=2), 90),
    (ParallelLayout(dp=2, ep=2), ONE_BY_ONE),
    (ParallelLayout(tp=2, sp=True, ep=2, etp=1), 90),
    (ParallelLayout(tp=2, dp=2, sp=True, ep=2), 60),
    (ParallelLayout(tp=2, dp=2, sp=True, ep=2, etp=1), 60),
    (ParallelLayout(dp=4, ep=2, etp=2), 60),
    (ParallelLayout(pp=2, dp=2, ep=2), 60),
    (ParallelLayout(tp=2, pp=2, vpp=2, sp=True, ep=2, etp=1), 90),
]
CASES = {"qwen2": DENSE, "qwen3": DENSE, "qwen3_moe": EXPERTS}


def _samples(vocab_size: int):
    from megatron_rl.data.types import TrainSample

    rng = random.Random(0)
    samples = []
    for index in range(10):
        length = rng.randint(5, 32)
        prompt = rng.randint(1, length - 2)
        samples.append(
            TrainSample(
                token_ids=[rng.randrange(vocab_size) for _ in range(length)],
                loss_mask=[False] * prompt + [True] * (length - prompt),
                rollout_logprobs=[0.0] * prompt + [rng.uniform(-6.5, -4.5) for _ in range(length - prompt)],
                advantage=rng.uniform(-1.5, 1.5),
                is_positive=rng.random() < 0.5,
                sample_id=str(index),
            )
        )
    return samples


def _measure(rank: int, world_size: int, hf_path: str, cases) -> list[dict[str, float]]:
    """Loss and gradient norm of SFT and of GPPO for every case; runs on every rank."""
    import torch

    from megatron_rl.parallel.groups import build_model_groups, destroy_model_groups, init_process_groups

    torch.set_num_threads(1)
    init_process_groups(
        cases[0][0],
        rank=rank,
        world_size=world_size,
        master_addr="127.0.0.1",
        master_port=int(os.environ["MASTER_PORT"]),
        timeout_s=60,
    )
    results = []
    for number, (layout, tokens) in enumerate(cases):
        if number:
            destroy_model_groups()
            build_model_groups(layout, timeout_s=60)
        results.append(_one_case(hf_path, layout, rank, tokens))
    return results


def _one_case(hf_path: str, layout, rank: int, tokens: int) -> dict[str, float]:
    from megatron_rl.algo.aggregate import normaliser, positive_normaliser
    from megatron_rl.algo.losses import policy_loss, sft_loss
    from megatron_rl.algo.surrogates import gppo
    from megatron_rl.data.pack import pack_microbatch, with_old_logprobs
    from megatron_rl.model.spec import ModelSpec
    from megatron_rl.recipe.schema import ModelConfig
    from megatron_rl.recipe.stages import OptimizerConfig, ScheduleConfig
    from megatron_rl.train.batches import local_batches
    from megatron_rl.train.metrics import merge
    from megatron_rl.train.policy import Policy

    spec = ModelSpec.from_hf(hf_path)
    policy = Policy(ModelConfig(hf_path=hf_path, dtype="float32", spec="local"), spec, layout, rank=rank)
    # a step so small that it changes nothing: Adam's first one turns rounding of tiny gradients into whole steps
    policy.start_stage(OptimizerConfig(lr=1e-30), ScheduleConfig(), total_steps=10)
    samples = _samples(spec.vocab_size)
    if tokens == ONE_BY_ONE:
        mine = [i for i in range(len(samples)) if i % layout.dp == policy.dp_rank]
        batches = [pack_microbatch(samples, [i]) for i in mine]
    else:
        batches = local_batches(samples, layout, dp_rank=policy.dp_rank, tokens_per_microbatch=tokens)
    loss = partial(sft_loss, normaliser=normaliser(samples, "token_mean"))
    sft = merge(policy.forward_backward(batches, loss))
    sft_norm = policy.optimizer_step().grad_norm
    # made-up old log-probs put ratios on both sides of the clip
    batches = [with_old_logprobs(batch, batch.rl.rollout_logprobs) for batch in batches]
    loss = partial(
        policy_loss,
        surrogate=gppo(0.2, 0.28),
        aggregate="sequence_mean",
        normaliser=normaliser(samples, "sequence_mean"),
        sft_on_positives=0.1,
        positive_normaliser=positive_normaliser(samples),
    )
    rl = merge(policy.forward_backward(batches, loss, temperature=0.8))
    return {
        "sft loss": sft["sft/loss"],
        "sft norm": sft_norm,
        "rl loss": rl["policy/loss"],
        "rl norm": policy.optimizer_step().grad_norm,
        "rl entropy": rl["policy/entropy"],
        "rl clipped": rl["policy/clip_high_frac"] + rl["policy/clip_low_frac"],
    }


def _packing_gradients(rank: int, world_size: int, hf_path: str) -> dict[str, float]:
    """Largest difference of any gradient element, packed against one by one, relative to the largest element."""
    from megatron_rl.algo.aggregate import normaliser
    from megatron_rl.algo.losses import sft_loss
    from megatron_rl.data.pack import pack, pack_microbatch
    from megatron_rl.model.spec import ModelSpec
    from megatron_rl.parallel.groups import init_process_groups
    from megatron_rl.recipe.schema import ModelConfig
    from megatron_rl.recipe.stages import OptimizerConfig, ScheduleConfig
    from megatron_rl.train.policy import Policy

    port = int(os.environ["MASTER_PORT"])
    layout = ParallelLayout()
    init_process_groups(
        layout, rank=rank, world_size=world_size, master_addr="127.0.0.1", master_port=port, timeout_s=60
    )
    spec = ModelSpec.from_hf(hf_path)
    policy = Policy(ModelConfig(hf_path=hf_path, dtype="float32", spec="local"), spec, layout, rank=rank)
    policy.start_stage(OptimizerConfig(lr=1e-2), ScheduleConfig(), total_steps=10)
    samples = _samples(spec.vocab_size)
    loss = partial(sft_loss, normaliser=normaliser(samples, "token_mean"))
    gradients = []
    for batches in (
        [pack_microbatch(samples, [i]) for i in range(len(samples))],
        pack(samples, tokens_per_microbatch=400),
        pack(samples, tokens_per_microbatch=90),
    ):
        policy.forward_backward(batches, loss)
        gradients.append({name: p.main_grad.clone() for name, p in policy.chunks[0].named_parameters()})
    alone, *packed = gradients
    return {
        name: max(
            float((other[name] - alone[name]).abs().max() / alone[name].abs().max()) for other in packed
        )
        for name in alone
    }


def _bfloat16_losses(rank: int, world_size: int, hf_path: str, layout: ParallelLayout) -> list[float]:
    from megatron_rl.algo.aggregate import normaliser
    from megatron_rl.algo.losses import sft_loss
    from megatron_rl.model.spec import ModelSpec
    from megatron_rl.parallel.groups import init_process_groups
    from megatron_rl.recipe.schema import ModelConfig
    from megatron_rl.recipe.stages import OptimizerConfig, ScheduleConfig
    from megatron_rl.train.batches import local_batches
    from megatron_rl.train.metrics import merge
    from megatron_rl.train.policy import Policy

    port = int(os.environ["MASTER_PORT"])
    init_process_groups(
        layout, rank=rank, world_size=world_size, master_addr="127.0.0.1", master_port=port, timeout_s=60
    )
    spec = ModelSpec.from_hf(hf_path)
    policy = Policy(ModelConfig(hf_path=hf_path, dtype="bfloat16"), spec, layout, rank=rank)
    policy.start_stage(OptimizerConfig(lr=1e-2), ScheduleConfig(), total_steps=10)
    samples = _samples(spec.vocab_size)
    batches = local_batches(samples, layout, dp_rank=0, tokens_per_microbatch=400)
    loss = partial(sft_loss, normaliser=normaliser(samples, "token_mean"))
    losses = []
    for _ in range(5):
        losses.append(merge(policy.forward_backward(batches, loss))["sft/loss"])
        policy.optimizer_step()
    return losses


@pytest.mark.parametrize(
    ("family", "layout"),
    [("qwen2", ParallelLayout(tp=2)), ("qwen3_moe", ParallelLayout(tp=2, sp=True, ep=2, etp=1))],
    ids=["qwen2", "qwen3_moe"],
)
def test_a_bfloat16_model_trains_on_float32_master_weights(
    tmp_path: Path, family: str, layout: ParallelLayout
) -> None:
    hf_path = str(make_tiny_hf(tmp_path / "hf", family=family))
    losses, _ = run_distributed(_bfloat16_losses, 2, hf_path, layout)
    assert losses[-1] < losses[0] - 1.0, losses


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen3_moe"])
def test_every_gradient_of_a_packed_batch_equals_the_one_by_one_gradient(tmp_path: Path, family: str) -> None:
    hf_path = str(make_tiny_hf(tmp_path / "hf", family=family))
    (differences,) = run_distributed(_packing_gradients, 1, hf_path)
    assert len(differences) > 30
    # float32 sums in another order: 1e-6 of the largest element, doubled for the accumulation over micro-batches and
    # again for norms, whose gradients sum over every token and head
    assert max(differences.values()) < 4e-6, max(differences.items(), key=lambda item: item[1])


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("family", "tied"), [("qwen2", False), ("qwen3", True), ("qwen3_moe", False)])
def test_loss_and_gradient_norm_do_not_depend_on_layout_or_micro_batches(
    tmp_path: Path, family: str, tied: bool
) -> None:
    hf_path = str(make_tiny_hf(tmp_path / "hf", family=family, tied=tied, num_layers=4, heads=4, kv_heads=2))
    measured = {}
    for world_size in (1, 2, 4):
        cases = [case for case in CASES[family] if case[0].world_size == world_size]
        ranks = run_distributed(_measure, world_size, hf_path, cases, timeout_s=180)
        for number, case in enumerate(cases):
            # every rank reports the same numbers, bit for bit
            assert all(rank[number] == ranks[0][number] for rank in ranks), case
            measured[case] = ranks[0][number]
    reference = measured[CASES[family][0]]
    assert 0.0 < reference["rl clipped"] < 1.0, (
        "the ratios must reach the clip for this test to mean anything"
    )
    for case, got in measured.items():
        for name, want in reference.items():
            tolerance = 1e-5 if "norm" in name else 1e-6
            assert got[name] == pytest.approx(want, rel=tolerance, abs=1e-9), (case, name)

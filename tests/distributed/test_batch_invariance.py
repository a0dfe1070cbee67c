"""Loss and every gradient element are those of the samples, whatever batch, rank, order or padding they come in."""

from __future__ import annotations

import os
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.parallel.layout import ParallelLayout
from tests.helpers.distributed import run_distributed
from tests.helpers.models import make_tiny_hf

NUM_SPLITS = 6
VOCAB = 251
LOSSES = ("sft", "token_mean", "sequence_mean")


def _sample(rng: random.Random, prompt: int, response: int, *, masked: bool = False) -> Any:
    from megatron_rl.data.types import TrainSample

    return TrainSample(
        token_ids=[rng.randrange(VOCAB) for _ in range(prompt + response)],
        loss_mask=[False] * prompt + [not masked] * response,
        rollout_logprobs=[0.0] * prompt + [rng.uniform(-6.5, -4.5) for _ in range(response)],
        advantage=rng.uniform(-1.5, 1.5),
        is_positive=rng.random() < 0.5,
    )


def _samples(*, masked: bool = False) -> list[Any]:
    """One far longer than the others, one of a single trained token, one without any."""
    rng = random.Random(0)
    sizes = [(8, 120), (1, 1), (3, 2), (2, 5), (4, 1), (1, 6), (5, 3)]
    return [_sample(rng, *size, masked=masked or number == 3) for number, size in enumerate(sizes)]


def _random_split(rng: random.Random, count: int) -> list[list[list[int]]]:
    """split[dp_rank][microbatch] = samples in any order; a rank or a micro-batch may get none."""
    order = rng.sample(range(count), count)
    microbatches = rng.randint(1, 5)
    split: list[list[list[int]]] = [[[] for _ in range(microbatches)] for _ in range(2)]
    for index in order:
        split[rng.randrange(2)][rng.randrange(microbatches)].append(index)
    return split


def _gradients(policy: Any, samples: list[Any], microbatches: list[list[int]], kind: str, pad: int) -> Any:
    """The step's loss, and this rank's part of the summed gradients."""
    import torch

    from megatron_rl.algo.aggregate import normaliser, positive_normaliser
    from megatron_rl.algo.losses import policy_loss, sft_loss
    from megatron_rl.algo.surrogates import gppo
    from megatron_rl.data.pack import pack_microbatch, with_old_logprobs
    from megatron_rl.train.metrics import merge

    batches = [pack_microbatch(samples, indices, pad_multiple=pad) for indices in microbatches]
    batches = [with_old_logprobs(batch, batch.rl.rollout_logprobs) for batch in batches]
    if kind == "sft":
        # where nothing is trained on, any divisor shows that the sum itself is zero
        loss = partial(sft_loss, normaliser=normaliser(samples, "token_mean") or 1.0)
    else:
        loss = partial(
            policy_loss, surrogate=gppo(0.2, 0.28), aggregate=kind, normaliser=normaliser(samples, kind) or 1.0,
            sft_on_positives=0.1, positive_normaliser=positive_normaliser(samples),
        )  # fmt: skip
    metrics = merge(policy.forward_backward(batches, loss))
    policy.optimizer.inner.prepare_grads()
    shards = [param.grad.flatten() for param in policy.optimizer.inner.get_parameters()]
    return metrics.get("sft/loss" if kind == "sft" else "policy/loss"), torch.cat(shards)


def _ranks(rank: int, world_size: int, hf_path: str) -> dict[str, Any]:
    from megatron_rl.model.spec import ModelSpec
    from megatron_rl.parallel.groups import init_process_groups
    from megatron_rl.recipe.schema import ModelConfig
    from megatron_rl.recipe.stages import OptimizerConfig, ScheduleConfig
    from megatron_rl.train.policy import Policy

    layout = ParallelLayout(dp=2)
    port = int(os.environ["MASTER_PORT"])
    init_process_groups(
        layout, rank=rank, world_size=world_size, master_addr="127.0.0.1", master_port=port, timeout_s=60
    )
    policy = Policy(
        ModelConfig(hf_path=hf_path, dtype="float32", spec="local"),
        ModelSpec.from_hf(hf_path),
        layout,
        rank=rank,
    )
    policy.start_stage(OptimizerConfig(lr=1e-3), ScheduleConfig(), total_steps=10)
    samples, rng = _samples(), random.Random(1)
    found: dict[str, Any] = {"splits": []}
    for kind in LOSSES:
        one_by_one = [[[i] for i in range(len(samples))], [[] for _ in samples]]
        want_loss, want = _gradients(policy, samples, one_by_one[rank], kind, 1)
        for pad in [1, 2, 8] * (NUM_SPLITS // 3):
            split = _random_split(rng, len(samples))
            loss, got = _gradients(policy, samples, split[rank], kind, pad)
            gap, size = float((got - want).abs().max()), float(want.abs().max())
            found["splits"].append((kind, pad, split, loss, want_loss, gap, size))
    # one sample for two ranks, by the plan that a run uses
    from megatron_rl.data.balance import microbatch_plan

    few = samples[:1]
    plan = microbatch_plan(few, dp=2, tokens_per_microbatch=200)
    alone_loss, alone = _gradients(policy, few, [[[]], [[0]]][rank], "sft", 1)
    loss, got = _gradients(policy, few, plan[rank], "sft", 1)
    found["few"] = (plan, loss, alone_loss, float((got - alone).abs().max()), float(alone.abs().max()))
    masked = _samples(masked=True)
    found["masked"] = [
        (loss, gradient.abs().max().item(), bool(gradient.isfinite().all()))
        for loss, gradient in (
            _gradients(policy, masked, [list(range(len(masked)))], kind, 1) for kind in LOSSES
        )
    ]
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    hf_path: Path = make_tiny_hf(tmp_path_factory.mktemp("model"), family="qwen3", tied=True, num_layers=2)
    return run_distributed(_ranks, 2, str(hf_path), timeout_s=400)


@pytest.mark.timeout(500)
def test_loss_and_gradients_depend_on_the_samples_alone(ranks: list[dict[str, Any]]) -> None:
    assert len(ranks[0]["splits"]) == NUM_SPLITS * len(LOSSES)
    for mine, other in zip(*(rank["splits"] for rank in ranks), strict=True):
        case, (loss, want_loss, _, _) = mine[:3], mine[3:]
        assert loss == pytest.approx(want_loss, rel=1e-6), case
        # float32 sums in another order, relative to the largest element of all
        assert max(mine[5], other[5]) < 2e-6 * max(mine[6], other[6]), case


@pytest.mark.timeout(500)
def test_fewer_samples_than_data_parallel_ranks_train_as_on_one(ranks: list[dict[str, Any]]) -> None:
    plan, loss, want_loss, _, _ = ranks[0]["few"]
    assert sorted(map(len, (indices for rank in plan for indices in rank))) == [0, 1]
    assert loss == pytest.approx(want_loss, rel=1e-6)
    assert max(rank["few"][3] for rank in ranks) < 2e-6 * max(rank["few"][4] for rank in ranks)


@pytest.mark.timeout(500)
def test_a_global_batch_without_trained_tokens_gives_no_gradient_and_no_nan(
    ranks: list[dict[str, Any]],
) -> None:
    for rank in ranks:
        for loss, largest, is_finite in rank["masked"]:
            # an average over no token is left out, a sum over none is zero
            assert loss in (None, 0.0)
            assert largest == 0.0 and is_finite

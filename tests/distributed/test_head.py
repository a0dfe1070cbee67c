"""The fused head inside the trainer: the same gradients as materialised logits, no such logits, and values checked."""

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

TEMPERATURE = 0.8


def _batch(vocab_size: int, lengths: list[int]):
    """One micro-batch of rollouts whose made-up old log-probs put ratios on both sides of the clip."""
    from megatron_rl.data.pack import pack_microbatch, with_old_logprobs
    from megatron_rl.data.types import TrainSample

    rng = random.Random(0)
    samples = [
        TrainSample(
            token_ids=[rng.randrange(vocab_size) for _ in range(length)],
            loss_mask=[False] * 2 + [True] * (length - 2),
            rollout_logprobs=[0.0] * 2 + [rng.uniform(-6.5, -4.5) for _ in range(length - 2)],
            advantage=rng.uniform(-1.5, 1.5),
            is_positive=rng.random() < 0.5,
        )
        for length in lengths
    ]
    batch = pack_microbatch(samples, list(range(len(samples))))
    return with_old_logprobs(batch, batch.rl.rollout_logprobs)


def _policy(rank: int, world_size: int, hf_path: str, layout: ParallelLayout):
    import torch

    from megatron_rl.model.spec import ModelSpec
    from megatron_rl.parallel.groups import init_process_groups
    from megatron_rl.recipe.schema import ModelConfig
    from megatron_rl.recipe.stages import OptimizerConfig, ScheduleConfig
    from megatron_rl.train.policy import Policy

    torch.set_num_threads(1)
    port = int(os.environ["MASTER_PORT"])
    init_process_groups(
        layout, rank=rank, world_size=world_size, master_addr="127.0.0.1", master_port=port, timeout_s=60
    )
    spec = ModelSpec.from_hf(hf_path)
    policy = Policy(ModelConfig(hf_path=hf_path, dtype="float32", spec="local"), spec, layout, rank=rank)
    policy.start_stage(OptimizerConfig(lr=1e-30), ScheduleConfig(), total_steps=10)
    return policy, spec


def _loss(batch, kind: str):
    from megatron_rl.algo.losses import policy_loss, sft_loss
    from megatron_rl.algo.surrogates import gppo

    count = float(batch.loss_mask.sum())
    if kind == "sft":
        return sft_loss(batch, normaliser=count)
    return policy_loss(
        batch, surrogate=gppo(0.2, 0.28), aggregate="sequence_mean", normaliser=3.0, sft_on_positives=0.1,
        positive_normaliser=count,
    )  # fmt: skip


def _fused_and_materialised(rank: int, world_size: int, hf_path: str) -> dict[str, dict[str, float]]:
    """Largest difference of the gradients by kind and parameter, relative to the largest element."""
    from tests.helpers.losses import evaluate

    policy, spec = _policy(rank, world_size, hf_path, ParallelLayout())
    batch = _batch(spec.vocab_size, [9, 30, 18])
    gaps: dict[str, dict[str, float]] = {}
    for kind in ("sft", "policy"):
        loss = _loss(batch, kind)
        policy.forward_backward([batch], lambda _, loss=loss: loss, temperature=TEMPERATURE)
        named = dict(policy.chunks[0].named_parameters())
        fused = {name: param.main_grad.clone() for name, param in named.items()}

        def materialised(loss, hidden, batch=batch):
            from torch import zeros

            logits = hidden.squeeze(1) @ policy.head.weight[: spec.vocab_size].T / TEMPERATURE
            logprobs = logits.log_softmax(dim=1)
            chosen = logprobs.gather(1, batch.labels[:, None]).squeeze(1)
            return evaluate(loss, chosen).loss, zeros((), dtype=int), []

        for chunk in policy.ddp_chunks:
            chunk.zero_grad_buffer()
        policy._run_schedule(
            [batch], lambda _, hidden, loss=loss: materialised(loss, hidden), forward_only=False
        )
        gaps[kind] = {
            name: float((fused[name] - param.main_grad).abs().max() / param.main_grad.abs().max())
            for name, param in named.items()
        }
    return gaps


@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied"])
def test_gradients_are_those_of_materialised_logits(tmp_path: Path, tied: bool):
    model = make_tiny_hf(tmp_path / "model", tied=tied)
    (gaps,) = run_distributed(_fused_and_materialised, 1, str(model))
    assert max(gaps["sft"].values()) < 1e-5
    assert max(gaps["policy"].values()) < 1e-5
    assert len(gaps["sft"]) == len(gaps["policy"]) >= 30


def _largest_tensors(rank: int, world_size: int, hf_path: str, num_tokens: int) -> dict[str, int]:
    """Bytes of the largest storage that any operator returned, by pass."""
    from torch import Tensor
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Largest(TorchDispatchMode):
        bytes = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            sizes = [leaf.untyped_storage().nbytes() for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
            self.bytes = max([self.bytes, *sizes])
            return out

    policy, spec = _policy(rank, world_size, hf_path, ParallelLayout())
    batch = _batch(spec.vocab_size, [num_tokens + 1])
    found = {}
    with Largest() as largest:
        policy.logprobs([batch])
    found["log-probs"] = largest.bytes
    with Largest() as largest:
        policy.forward_backward([batch], partial(_loss, kind="policy"))
    found["training"] = largest.bytes
    # the instrument does see logits
    with Largest() as largest:
        policy.logprob_rows([batch], list(range(num_tokens)))
    found["materialised"] = largest.bytes
    return found


def test_no_pass_of_the_trainer_has_all_logits_at_once(tmp_path: Path):
    tokens, vocab = 1024, 80_000
    model = make_tiny_hf(tmp_path / "model", tied=True, num_layers=1, vocab=vocab)
    (largest,) = run_distributed(_largest_tensors, 1, str(model), tokens)
    logits = tokens * vocab * 4
    assert largest["materialised"] >= logits
    # the embedding itself is 20 MB
    assert largest["log-probs"] < logits / 10
    # 160 MiB of logits are in work at once
    assert largest["training"] <= 160 * 2**20


def _with_nan_weights(rank: int, world_size: int, hf_path: str, layout: ParallelLayout) -> dict[str, str]:
    """What every pass says of a model that rank 0 has damaged."""
    import torch

    from megatron_rl.errors import TrainingError

    policy, spec = _policy(rank, world_size, hf_path, layout)
    batch = _batch(spec.vocab_size, [9, 30, 18])
    # the first batch is compared with the definition; this is about later ones
    policy.logprobs([batch])
    policy.forward_backward([batch], partial(_loss, kind="policy"))
    with torch.no_grad():
        for param in policy.chunks[0].parameters():
            param.fill_(float("nan"))
    said = {}
    try:
        policy.logprobs([batch])
    except TrainingError as error:
        said["log-probs"] = str(error)
    try:
        policy.forward_backward([batch], partial(_loss, kind="policy"))
    except TrainingError as error:
        said["training"] = str(error)
    return said


@pytest.mark.parametrize(
    "layout", [ParallelLayout(tp=2, sp=True), ParallelLayout(pp=2)], ids=["tp2-sp", "pp2"]
)
def test_log_probs_that_cannot_be_stop_every_rank_with_op_position_and_values(
    tmp_path: Path, layout: ParallelLayout
):
    model = make_tiny_hf(tmp_path / "model")
    ranks = run_distributed(_with_nan_weights, 2, str(model), layout)
    assert ranks[0] == ranks[1]
    assert (
        "linear_logprob: token 0 of a micro-batch (the first of 54) has log-prob nan" in ranks[0]["log-probs"]
    )
    # prompts are not trained on, so their tokens are not looked at: one of the two has no label
    assert "linear_policy_loss: token 1 of a micro-batch (the first of 51)" in ranks[0]["training"]
    assert "between 0 and ln(251) = 5.525" in ranks[0]["training"]


def _with_wrong_kernels(rank: int, world_size: int, hf_path: str) -> dict[str, str]:
    """What the first batch says of each op at a temperature that is not the one asked for."""
    from megatron_rl.errors import TrainingError
    from megatron_rl.train import head

    policy, spec = _policy(rank, world_size, hf_path, ParallelLayout())
    batch = _batch(spec.vocab_size, [9, 30, 18])
    passes = {
        "linear_logprob": lambda: policy.logprobs([batch]),
        "linear_policy_loss": lambda: policy.forward_backward([batch], partial(_loss, kind="policy")),
    }
    said = {}
    for op, run in passes.items():
        right = getattr(head, op)

        def wrong(*args, temperature, right=right, **options):
            return right(*args, temperature=1.1 * temperature, **options)

        setattr(head, op, wrong)
        try:
            run()
        except TrainingError as error:
            said[op] = str(error)
    return said


def test_a_kernel_that_is_wrong_on_the_first_batch_stops_the_run(tmp_path: Path):
    model = make_tiny_hf(tmp_path / "model")
    (said,) = run_distributed(_with_wrong_kernels, 1, str(model))
    for op in ("linear_logprob", "linear_policy_loss"):
        assert said[op].startswith(f"head: {op}: the log-prob of token ")
        assert "by its definition in float64" in said[op]

"""Layers computed again on the way back give the gradients of layers whose activations were kept."""

from __future__ import annotations

import os
import random
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.data.types import TrainSample
from megatron_rl.parallel.layout import ParallelLayout
from tests.helpers.distributed import run_distributed
from tests.helpers.models import make_tiny_hf


class Tally:
    """Bytes of the storages that autograd keeps: now, and at most."""

    def __init__(self) -> None:
        self.now = self.peak = 0
        self.holders: Counter[int] = Counter()


class Kept:
    """A tensor that autograd keeps, counted as long as it does; a storage that several share counts once."""

    def __init__(self, tally: Tally, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self.tensor, self.tally = tensor, tally
        self.address, self.bytes = storage.data_ptr(), storage.nbytes()
        tally.now += 0 if tally.holders[self.address] else self.bytes
        tally.holders[self.address] += 1
        tally.peak = max(tally.peak, tally.now)

    def __del__(self) -> None:
        self.tally.holders[self.address] -= 1
        self.tally.now -= 0 if self.tally.holders[self.address] else self.bytes


def _samples(vocab_size: int) -> list[TrainSample]:
    rng = random.Random(0)
    return [
        TrainSample(
            token_ids=[rng.randrange(vocab_size) for _ in range(length)],
            loss_mask=[False] * 3 + [True] * (length - 3),
        )
        for length in (30, 24, 17, 9, 28, 33)
    ]


def _gradients(rank: int, world_size: int, hf_path: str, layout: ParallelLayout) -> list[dict[str, Any]]:
    """Every gradient and the most the graph kept, first with all activations, then with the layers' inputs alone."""
    from megatron_rl.algo.aggregate import normaliser
    from megatron_rl.algo.losses import sft_loss
    from megatron_rl.model.spec import ModelSpec
    from megatron_rl.parallel.groups import init_process_groups
    from megatron_rl.recipe.schema import ModelConfig
    from megatron_rl.recipe.stages import OptimizerConfig, ScheduleConfig
    from megatron_rl.train.batches import local_batches
    from megatron_rl.train.policy import Policy

    port = int(os.environ["MASTER_PORT"])
    init_process_groups(
        layout, rank=rank, world_size=world_size, master_addr="127.0.0.1", master_port=port, timeout_s=60
    )
    spec = ModelSpec.from_hf(hf_path)
    samples = _samples(spec.vocab_size)
    loss = partial(sft_loss, normaliser=normaliser(samples, "token_mean"))
    measured = []
    for recompute in ("none", "full"):
        config = ModelConfig(hf_path=hf_path, dtype="float32", spec="local", recompute=recompute)
        policy = Policy(config, spec, layout, rank=rank)
        policy.start_stage(OptimizerConfig(lr=1e-30), ScheduleConfig(), total_steps=10)
        batches = local_batches(samples, layout, dp_rank=0, tokens_per_microbatch=200)
        tally = Tally()
        with torch.autograd.graph.saved_tensors_hooks(partial(Kept, tally), lambda kept: kept.tensor):
            policy.forward_backward(batches, loss)
        gradients = {
            f"{number}.{name}": param.main_grad.clone()
            for number, chunk in enumerate(policy.chunks)
            for name, param in chunk.named_parameters()
        }
        measured.append({"kept": tally.peak, "gradients": gradients})
    return measured


@pytest.mark.parametrize(
    "layout", [ParallelLayout(), ParallelLayout(tp=2, sp=True), ParallelLayout(pp=2, vpp=2)], ids=str
)
def test_recomputed_layers_give_the_same_gradients_and_keep_less(
    tmp_path: Path, layout: ParallelLayout
) -> None:
    hf_path = str(make_tiny_hf(tmp_path / "hf", family="qwen3", num_layers=4, heads=4, kv_heads=2))
    for kept, recomputed in run_distributed(_gradients, layout.world_size, hf_path, layout):
        assert recomputed["gradients"].keys() == kept["gradients"].keys()
        for name, want in kept["gradients"].items():
            assert want.abs().max() > 0, name
            assert torch.equal(recomputed["gradients"][name], want), name
        assert recomputed["kept"] < 0.5 * kept["kept"], (recomputed["kept"], kept["kept"])

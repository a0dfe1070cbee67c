"""A resumed run is the same run: bit-equal in its layout, equal up to rounding in any other, or refused."""

from __future__ import annotations

import hashlib
import os
import random
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from megatron_rl.data.types import TrainSample
from megatron_rl.errors import CheckpointError
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.recipe.schema import ModelConfig, Recipe
from megatron_rl.recipe.stages import OptimizerConfig, ScheduleConfig, SftStage
from tests.helpers.distributed import DistributedFailure, run_distributed
from tests.helpers.models import make_tiny_hf

STEPS = 3  # before the checkpoint, and again after it
# float32 sums in another order, over three optimizer steps
TOLERANCE = 1e-6
SAVED_AT = {"stage": 1, "step": STEPS, "sampler": {"cursor": 7}}


@dataclass(frozen=True, kw_only=True)
class Run:
    """One process group's worth of training in a layout; picklable, so that ranks can be told what to do."""

    hf_path: str
    root: str
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    sp: bool = False
    dtype: str = "float32"


def recipe_of(run: Run) -> Recipe:
    stage = SftStage(
        kind="sft", data="data.jsonl", steps=2 * STEPS, global_batch_size=8, tokens_per_microbatch=64,
        optimizer=OptimizerConfig(lr=1e-3, weight_decay=0.1, max_grad_norm=0.5),
        schedule=ScheduleConfig(kind="cosine", warmup_steps=2, min_lr=1e-4),
    )
    return Recipe(name="tiny", model=ModelConfig(hf_path="tiny", dtype=run.dtype), stages=(stage, stage))


def samples_of(step: int) -> list[TrainSample]:
    rng = random.Random(step)
    lengths = [rng.randint(6, 24) for _ in range(8)]
    return [
        TrainSample(
            token_ids=[rng.randrange(251) for _ in range(length)],
            loss_mask=[False] * 2 + [True] * (length - 2),
            sample_id=f"{step}.{number}",
        )
        for number, length in enumerate(lengths)
    ]


class Session:
    """A policy in its stage and the checkpoints of its run, on one rank."""

    def __init__(self, run: Run, rank: int, world_size: int) -> None:
        from megatron_rl.model.checkpoint import CheckpointStore
        from megatron_rl.model.spec import ModelSpec
        from megatron_rl.train.policy import Policy

        self.layout = ParallelLayout.for_world(
            tp=run.tp, pp=run.pp, vpp=run.vpp, sp=run.sp, world_size=world_size
        )
        self.recipe = recipe_of(run)
        self.store = CheckpointStore(Path(run.root), keep=2, rank=rank, recipe=self.recipe, timeout_s=20)
        config = ModelConfig(hf_path=run.hf_path, dtype=run.dtype, spec="local")
        self.policy = Policy(config, ModelSpec.from_hf(run.hf_path), self.layout, rank=rank)

    def start_stage(self) -> None:
        stage = self.recipe.stages[1]
        self.policy.start_stage(stage.optimizer, stage.schedule, total_steps=2 * STEPS)

    def resume(self) -> None:
        saved = self.store.latest()
        assert saved is not None
        assert saved.progress == SAVED_AT
        self.store.load_model(self.policy, saved)
        self.start_stage()
        self.store.load_optimizer(self.policy, saved)

    def train(self, first: int, last: int) -> dict[str, Any]:
        """Loss, gradient norm and learning rate of each step, and a digest of this rank's weights after them."""
        from megatron_rl.algo.losses import sft_loss
        from megatron_rl.train.batches import local_batches

        steps = []
        for step in range(first, last):
            samples = samples_of(step)
            tokens = sum(sample.num_trained_tokens for sample in samples)
            batches = local_batches(
                samples, self.layout, dp_rank=self.policy.dp_rank, tokens_per_microbatch=64
            )
            metrics = self.policy.forward_backward(batches, partial(sft_loss, normaliser=float(tokens)))
            losses = [metric for batch in metrics for metric in batch if metric.name == "sft/loss"]
            loss = sum(metric.value * metric.weight for metric in losses) / tokens
            stats = self.policy.optimizer_step()
            steps.append((loss, stats.grad_norm, stats.lr))
        return {"steps": steps, "weights": self.digest()}

    def digest(self) -> str:
        digest = hashlib.sha256()
        for chunk in self.policy.named_params():
            for name, value in chunk.items():
                digest.update(name.encode() + value.contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


@contextmanager
def session(run: Run, rank: int, world_size: int, *, number: int = 0) -> Iterator[Session]:
    from megatron_rl.parallel.groups import destroy_process_groups, init_process_groups

    layout = ParallelLayout.for_world(tp=run.tp, pp=run.pp, vpp=run.vpp, sp=run.sp, world_size=world_size)
    init_process_groups(
        layout, rank=rank, world_size=world_size, master_addr="127.0.0.1",
        master_port=int(os.environ["MASTER_PORT"]) + number, timeout_s=30,
    )
    yield Session(run, rank, world_size)
    destroy_process_groups()


def train_save_train(rank: int, world_size: int, runs: list[Run]) -> list[dict[str, Any]]:
    results = []
    for number, run in enumerate(runs):
        with session(run, rank, world_size, number=number) as here:
            here.start_stage()
            here.train(0, STEPS)
            before = here.digest()
            here.store.save(here.policy, SAVED_AT)
            assert here.digest() == before, "saving must not change the weights"
            assert psutil.Process().children(recursive=True) == [], "saving must leave no process behind"
            results.append(here.train(STEPS, 2 * STEPS))
    return results


def resume_train(rank: int, world_size: int, runs: list[Run]) -> list[dict[str, Any]]:
    results = []
    for number, run in enumerate(runs):
        with session(run, rank, world_size, number=number) as here:
            here.resume()
            results.append(here.train(STEPS, 2 * STEPS))
    return results


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {
        "tied": str(make_tiny_hf(root / "tied", family="qwen2", tied=True)),
        "untied": str(make_tiny_hf(root / "untied", family="qwen3")),
    }


@dataclass(frozen=True)
class Original:
    """A run that saved in the middle and went on, and what every rank measured after the checkpoint."""

    run: Run
    measured: list[dict[str, Any]]


@pytest.fixture(scope="module")
def tp2_pp2(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Original:
    run = Run(hf_path=models["tied"], root=str(tmp_path_factory.mktemp("tp2_pp2")), tp=2, pp=2)
    return Original(run, [rank[0] for rank in run_distributed(train_save_train, 4, [run])])


def test_resume_in_the_same_layout_is_bit_equal_over_tp_and_pp(tp2_pp2: Original) -> None:
    resumed = run_distributed(resume_train, 4, [tp2_pp2.run])
    assert [rank[0] for rank in resumed] == tp2_pp2.measured


def test_resume_in_the_same_layout_is_bit_equal_over_dp(models: dict[str, str], tmp_path: Path) -> None:
    runs = [
        Run(hf_path=models["untied"], root=str(tmp_path / "dp2")),
        Run(hf_path=models["tied"], root=str(tmp_path / "dp2_bf16"), dtype="bfloat16"),
        Run(hf_path=models["untied"], root=str(tmp_path / "vpp2"), pp=2, vpp=2),
    ]
    original = run_distributed(train_save_train, 2, runs)
    assert run_distributed(resume_train, 2, runs) == original

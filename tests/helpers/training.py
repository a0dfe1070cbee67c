"""Short training runs of a tiny model that save and resume, on the ranks of a test."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_rl.data.types import TrainSample
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.recipe.schema import ModelConfig, Recipe
from megatron_rl.recipe.stages import OptimizerConfig, ScheduleConfig, SftStage

STEPS = 3  # before the checkpoint, and again after it
TOKENS = 64  # packed into one micro-batch, at most
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
    ep: int = 1
    etp: int | None = None
    dtype: str = "float32"
    asynchronous: bool = False
    timeout_s: float = 20.0

    def layout(self, world_size: int) -> ParallelLayout:
        return ParallelLayout.for_world(
            tp=self.tp, pp=self.pp, vpp=self.vpp, sp=self.sp, ep=self.ep, etp=self.etp, world_size=world_size
        )


def recipe_of(run: Run) -> Recipe:
    stage = SftStage(
        kind="sft",
        data="data.jsonl",
        steps=2 * STEPS,
        global_batch_size=8,
        tokens_per_microbatch=TOKENS,
        optimizer=OptimizerConfig(lr=1e-3, weight_decay=0.1, max_grad_norm=0.5),
        schedule=ScheduleConfig(kind="cosine", warmup_steps=2, min_lr=1e-4),
    )
    return Recipe(name="tiny", model=ModelConfig(hf_path="tiny", dtype=run.dtype), stages=(stage, stage))


def samples_of(step: int) -> list[TrainSample]:
    """Eight samples of 15 packed tokens: micro-batches of 60 at dp 1 and dp 2 alike."""
    rng = random.Random(step)
    prompts = [rng.randint(1, 12) for _ in range(8)]
    return [
        TrainSample(
            token_ids=[rng.randrange(251) for _ in range(16)],
            loss_mask=[False] * prompt + [True] * (16 - prompt),
            sample_id=f"{step}.{number}",
        )
        for number, prompt in enumerate(prompts)
    ]


class Session:
    """A policy and the checkpoints of its run, on one rank."""

    def __init__(self, run: Run, rank: int, world_size: int) -> None:
        # these import megatron-core, which belongs after the platform is known
        from megatron_rl.model.checkpoint import CheckpointStore
        from megatron_rl.model.spec import ModelSpec
        from megatron_rl.train.policy import Policy

        self.rank, self.root = rank, run.root
        self.layout = run.layout(world_size)
        self.recipe = recipe_of(run)
        self.store = CheckpointStore(
            Path(run.root), keep=2, rank=rank, recipe=self.recipe, timeout_s=run.timeout_s,
            asynchronous=run.asynchronous,
        )  # fmt: skip
        config = ModelConfig(hf_path=run.hf_path, dtype=run.dtype, spec="local")
        self.policy = Policy(config, ModelSpec.from_hf(run.hf_path), self.layout, rank=rank)

    def start_stage(self) -> None:
        stage = self.recipe.stages[1]
        self.policy.start_stage(stage.optimizer, stage.schedule, total_steps=2 * STEPS)

    def resume(self) -> None:
        """Model and optimizer as the checkpoint has them."""
        saved = self.store.latest()
        assert saved is not None
        assert saved.progress == SAVED_AT
        self.store.load_model(self.policy, saved)
        self.store.load_generators(self.policy, saved)
        self.start_stage()
        self.store.load_optimizer(self.policy, saved)

    def train(self, first: int, last: int) -> dict[str, Any]:
        """Loss, gradient norm and learning rate of each step; after them a digest of this rank's weights, and what
        its generators draw."""
        from megatron_rl.algo.losses import sft_loss
        from megatron_rl.train.batches import local_batches

        steps = []
        for step in range(first, last):
            samples = samples_of(step)
            tokens = sum(sample.num_trained_tokens for sample in samples)
            batches = local_batches(
                samples, self.layout, dp_rank=self.policy.dp_rank, tokens_per_microbatch=TOKENS
            )
            metrics = self.policy.forward_backward(batches, partial(sft_loss, normaliser=float(tokens)))
            losses = [metric for batch in metrics for metric in batch if metric.name == "sft/loss"]
            loss = sum(metric.value * metric.weight for metric in losses) / tokens
            stats = self.policy.optimizer_step()
            steps.append((loss, stats.grad_norm, stats.lr))
        return {"steps": steps, "weights": self.digest(), "draws": draws()}

    def digest(self) -> str:
        digest = hashlib.sha256()
        for chunk in self.policy.named_params():
            for name, value in chunk.items():
                digest.update(name.encode() + value.contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


def draws() -> list[float]:
    """One number of every generator."""
    from megatron_rl.model.generators import generator_states

    tracker = generator_states()["megatron_core"]
    held = hashlib.sha256(repr(sorted(tracker.items())).encode()).hexdigest()
    return [random.random(), float(np.random.rand()), float(torch.rand(())), int(held[:12], 16)]

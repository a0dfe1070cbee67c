"""What every stage of a run shares, and where a run stands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.model.checkpoint import CheckpointStore
from megatron_rl.model.spec import ModelSpec
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.recipe.schema import Recipe
from megatron_rl.recipe.stages import Stage
from megatron_rl.train.policy import Policy
from megatron_rl.train.reporter import Reporter


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Where a run stands: `step` optimizer steps (SFT) or iterations (RL) of stage `stage` are done."""

    stage: int = 0
    step: int = 0
    sampler: Mapping[str, Any] = field(default_factory=dict)  # prompt cursors of an RL stage

    def advanced(self, step: int, *, sampler: Mapping[str, Any] | None = None) -> Progress:
        return replace(self, step=step, sampler=self.sampler if sampler is None else sampler)

    def to_dict(self) -> dict[str, Any]:
        return {"stage": self.stage, "step": self.step, "sampler": dict(self.sampler)}


@dataclass(frozen=True, kw_only=True, slots=True)
class RunContext:
    """One run on one rank. Collective methods are marked; every rank calls those together."""

    recipe: Recipe
    run_dir: Path
    rank: int
    layout: ParallelLayout
    spec: ModelSpec
    policy: Policy
    tokenizer: Tokenizer
    reporter: Reporter
    checkpoints: CheckpointStore

    @property
    def is_driver(self) -> bool:
        """The one rank that owns engines, graders, records and the console."""
        return self.rank == 0

    def start_stage(self, stage: Stage, progress: Progress, *, total_steps: int) -> None:
        """Fresh optimizer for the stage; restored when the run resumes inside it. Collective."""
        self.policy.start_stage(stage.optimizer, stage.schedule, total_steps=total_steps)
        if progress.step:
            self.checkpoints.load_optimizer(self.policy)
        self.reporter.start_stage(progress.stage, stage.kind, first_step=progress.step)

    def finish_step(self, progress: Progress, metrics: Mapping[str, float], *, total: int) -> None:
        """Record the step, and save a checkpoint when one is due (always after the last step). Collective."""
        self.reporter.step(progress.step, total, metrics)
        config = self.recipe.checkpoint
        if config and (progress.step % config.every_steps == 0 or progress.step == total):
            self.checkpoints.save(self.policy, progress.to_dict())

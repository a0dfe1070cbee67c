"""The optimizer of a stage and its learning rate, which is a pure function of the step (so a resume cannot skew it)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer

from megatron_rl.errors import TrainingError
from megatron_rl.recipe.stages import OptimizerConfig, ScheduleConfig

SKIPPED = "optim/skipped"  # a metric of steps that were left out, 1 for each


def learning_rate(
    step: int, *, total_steps: int, optimizer: OptimizerConfig, schedule: ScheduleConfig
) -> float:
    """Learning rate of optimizer step `step` (the first is 0) of a stage of `total_steps` steps.

    Warm-up rises linearly and reaches `lr` on its last step; cosine and linear then end at `min_lr` on the last step.
    """
    if step < schedule.warmup_steps:
        return optimizer.lr * (step + 1) / schedule.warmup_steps
    if schedule.kind == "constant":
        return optimizer.lr
    span = max(1, total_steps - 1 - schedule.warmup_steps)
    progress = min(1.0, (step - schedule.warmup_steps) / span)
    remaining = 1.0 - progress if schedule.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return schedule.min_lr + (optimizer.lr - schedule.min_lr) * remaining


@dataclass(frozen=True, kw_only=True, slots=True)
class StepStats:
    """One optimizer step: global L2 norm of the gradients before clipping, and the learning rate used.

    A step that `was_skipped` had a norm that is not finite, and changed nothing.
    """

    grad_norm: float
    lr: float
    was_skipped: bool = False

    def metrics(self) -> dict[str, float]:
        """`optim/lr`, and `optim/skipped` for a step that was."""
        return {"optim/lr": self.lr} | ({SKIPPED: 1.0} if self.was_skipped else {})

    def counts(self) -> dict[str, int]:
        """What the step adds to the counts of the run, besides what was trained on."""
        return {"skipped_steps": 1} if self.was_skipped else {}


class StageOptimizer:
    """megatron-core's distributed AdamW over one stage of `total_steps` optimizer steps."""

    def __init__(
        self,
        model_chunks: list[torch.nn.Module],
        *,
        dtype: torch.dtype,
        config: OptimizerConfig,
        schedule: ScheduleConfig,
        total_steps: int,
    ) -> None:
        self._config, self._schedule, self._total_steps = config, schedule, total_steps
        self._max_skipped_steps = config.max_skipped_steps
        self.num_steps = 0
        self.skipped_in_a_row = 0  # steps left out since the last one that was taken
        self.inner: MegatronOptimizer = get_megatron_optimizer(
            MegatronOptimizerConfig(
                optimizer="adam",
                lr=config.lr,
                weight_decay=config.weight_decay,
                adam_beta1=config.beta1,
                adam_beta2=config.beta2,
                adam_eps=config.eps,
                clip_grad=config.max_grad_norm,
                use_distributed_optimizer=True,
                params_dtype=dtype,
                bf16=dtype is torch.bfloat16,
            ),
            model_chunks,
        )

    def step(self) -> StepStats:
        """Clip, update the weights, advance the schedule.

        A gradient with NaN or inf on any rank is skipped on all: weights, moments and schedule stay. Raises
        TrainingError for one more in a row than `max_skipped_steps`.
        """
        lr = learning_rate(
            self.num_steps, total_steps=self._total_steps, optimizer=self._config, schedule=self._schedule
        )
        for group in self.inner.param_groups:
            group["lr"] = lr
        self.inner.prepare_grads()
        grad_norm = float(self.inner.get_grad_norm())
        # the norm is over all ranks, so all of them decide alike
        if not math.isfinite(grad_norm):
            self._skip(grad_norm)
            return StepStats(grad_norm=grad_norm, lr=lr, was_skipped=True)
        self.inner.step()
        self.num_steps += 1
        self.skipped_in_a_row = 0
        return StepStats(grad_norm=grad_norm, lr=lr)

    def _skip(self, grad_norm: float) -> None:
        self.skipped_in_a_row += 1
        allowed = self._max_skipped_steps
        if self.skipped_in_a_row > allowed:
            again = f", as in {self.skipped_in_a_row} steps in a row" if allowed else ""
            raise TrainingError(
                f"optimizer step {self.num_steps}: the gradient norm is {grad_norm}{again}; the weights were not "
                "touched; look at the last rollouts and losses, lower optimizer.lr, check the data of this step, or "
                f"allow more than optimizer.max_skipped_steps = {allowed} such steps in a row"
            )

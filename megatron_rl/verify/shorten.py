"""A recipe whose whole run is made by a proof: a few steps of each stage. Without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron_rl.recipe.schema import CheckpointConfig, Recipe
from megatron_rl.recipe.stages import CurriculumWindow, EvalConfig, RlStage, ScheduleConfig, SftStage, Stage

STEPS, ITERATIONS = 6, 4  # of each stage
_EVAL_PROMPTS = 8


def shorten(recipe: Recipe) -> Recipe:
    """A few steps of each stage, a checkpoint every two of them, and what depends on their number."""
    checkpoint = recipe.checkpoint or CheckpointConfig(every_steps=2)
    return replace(
        recipe,
        stages=tuple(_shortened(stage) for stage in recipe.stages),
        checkpoint=replace(checkpoint, every_steps=2, keep=2),
    )


def with_coin(stage: RlStage) -> RlStage:
    """With a reward that tells any two responses apart: groups of equal rewards teach nothing, and prove nothing."""
    return replace(
        stage,
        rewards={**stage.rewards, "coin": 1.0},
        algorithm=replace(stage.algorithm, drop_zero_advantage=False),
    )


def _shortened(stage: Stage) -> Stage:
    if isinstance(stage, SftStage):
        steps = min(stage.steps, STEPS)
        return replace(stage, steps=steps, epochs=None, schedule=_schedule(stage.schedule, steps))
    iterations = min(stage.iterations, ITERATIONS)
    return replace(
        stage,
        iterations=iterations,
        schedule=_schedule(stage.schedule, iterations * stage.updates_per_rollout),
        curriculum=_windows(stage.curriculum, iterations),
        # every step that a kill is planned for has to come
        promote=None,
        eval=_eval(stage.eval),
    )


def _schedule(schedule: ScheduleConfig, steps: int) -> ScheduleConfig:
    return replace(schedule, warmup_steps=min(schedule.warmup_steps, steps // 2))


def _windows(windows: Sequence[CurriculumWindow], iterations: int) -> tuple[CurriculumWindow, ...]:
    """The first two share the iterations, so that one border is crossed."""
    kept = windows[: min(2, iterations)]
    shares = (
        [iterations // len(kept) + (i < iterations % len(kept)) for i in range(len(kept))] if kept else []
    )
    return tuple(
        replace(window, iterations=share, promote=None) for window, share in zip(kept, shares, strict=True)
    )


def _eval(config: EvalConfig | None) -> EvalConfig | None:
    if config is None:
        return None
    prompts = min(config.max_prompts or _EVAL_PROMPTS, _EVAL_PROMPTS)
    samples = min(config.samples, 2)
    pass_at = tuple(k for k in config.pass_at if k <= samples)
    return replace(config, every=2, samples=samples, pass_at=pass_at, windows={}, max_prompts=prompts)

"""Amounts that follow from an RL stage alone: prompts of an iteration, iterations before a promotion."""

from __future__ import annotations

from megatron_rl.recipe.batch import PromoteConfig
from megatron_rl.recipe.stages import RlStage


def prompts_drawn(stage: RlStage) -> int:
    """Prompts that one round of an iteration draws."""
    sampling = stage.dynamic_sampling
    return stage.prompts_per_iteration if sampling is None else sampling.generate_prompts


def most_prompts_drawn(stage: RlStage) -> int:
    """Prompts that an iteration draws at most, over all its rounds."""
    sampling = stage.dynamic_sampling
    rounds = sampling.max_rounds if sampling is not None and sampling.kind == "refill" else 1
    return prompts_drawn(stage) * rounds


def iterations_before_promotion(rule: PromoteConfig) -> int:
    """Iterations of a window after which the rule is asked for the first time."""
    return max(rule.min_iterations, rule.window * (2 if rule.on == "reward_plateau" else 1))

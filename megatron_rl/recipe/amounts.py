"""Amounts that follow from an RL stage alone: prompts of an iteration, iterations before a promotion."""

from __future__ import annotations

import math

from megatron_rl.recipe.batch import PARTIAL_STALENESS, PromoteConfig
from megatron_rl.recipe.stages import RlStage


def prompts_drawn(stage: RlStage) -> int:
    """Prompts that one round of an iteration draws."""
    sampling = stage.dynamic_sampling
    return stage.prompts_per_iteration if sampling is None else sampling.generate_prompts


def groups_waited_for(share: float, count: int) -> int:
    """Whole groups that a round of `count` waits for, where it waits for a `share` of them."""
    # 0.07 of 100 is 7.000000000000001
    return max(1, math.ceil(round(share * count, 9)))


def most_prompts_drawn(stage: RlStage) -> int:
    """Prompts that an iteration draws at most, over all its rounds."""
    sampling = stage.dynamic_sampling
    rounds = sampling.max_rounds if sampling is not None and sampling.kind == "refill" else 1
    return prompts_drawn(stage) * rounds


def has_old_logprob_pass(stage: RlStage, *, updates: int) -> bool:
    """Whether old log-probs take a forward pass of their own in an iteration of `updates` optimizer steps.

    Not where they are the engine's. Nor where there is one step and nothing before it asks for them: no step came
    before it, so its own pass is the old policy's.
    """
    algorithm = stage.algorithm
    if algorithm.correction.old == "rollout":
        return False
    kl_in_reward = algorithm.kl is not None and algorithm.kl.where == "reward"
    return updates > 1 or algorithm.correction.kind != "none" or kl_in_reward


def max_staleness(stage: RlStage) -> int:
    """Transfers that the oldest token may be behind as it is trained on: 0 without overlap, else 1, more if partial."""
    if stage.overlap != "partial":
        return int(stage.overlap == "one_step")
    configured = stage.stragglers.max_staleness if stage.stragglers is not None else None
    return PARTIAL_STALENESS if configured is None else configured


def iterations_before_promotion(rule: PromoteConfig) -> int:
    """Iterations of a window after which the rule is asked for the first time."""
    return max(rule.min_iterations, rule.window * (2 if rule.on == "reward_plateau" else 1))

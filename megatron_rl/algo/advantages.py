"""Advantages of rollouts from the rewards of their group or of the whole iteration, and which groups carry no signal.

Pure Python numbers. R is a rollout's reward; groups hold all rollouts of a prompt, whatever a filter masks later.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from megatron_rl.data.types import Verdict
from megatron_rl.errors import DataError
from megatron_rl.recipe.algorithm import AdvantageName

EPS = 1e-6  # added to every standard deviation

AdvantageFn = Callable[[Sequence[float]], list[float]]
Groups = Sequence[Sequence[float]]  # one number per rollout, by group


def group_std_advantages(
    rewards: Sequence[float], *, eps: float = EPS, unbiased: bool = False
) -> list[float]:
    """(reward - group mean) / (population std + eps), in the order of `rewards` (arXiv 2508.07629).

    `unbiased` divides the sum of squares by n - 1, as the code released with that paper does. A group with equal
    rewards gets exact zeros. Raises DataError for fewer than two rewards (a group of one has no baseline) and for one
    that is not finite.
    """
    centred = group_mean_advantages(rewards)
    std = math.sqrt(math.fsum(value * value for value in centred) / (len(centred) - unbiased))
    return [value / (std + eps) for value in centred]


def group_mean_advantages(rewards: Sequence[float]) -> list[float]:
    """reward - group mean (Dr. GRPO, arXiv 2503.20783); order, zeros and errors as in `group_std_advantages`."""
    _check_rewards(rewards)
    if all(reward == rewards[0] for reward in rewards):
        # the mean of equal numbers may differ from them in the last bit
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def leave_one_out_advantages(rewards: Sequence[float]) -> list[float]:
    """reward - mean of the others (RLOO, arXiv 2402.14740); order, zeros and errors as above."""
    size = len(rewards)
    return [value * (size / (size - 1)) for value in group_mean_advantages(rewards)]


def batch_std_advantages(groups: Groups, *, eps: float = EPS) -> list[list[float]]:
    """(reward - group mean) / (std of all rewards + eps) (Lite PPO, arXiv 2508.08221)."""
    centred = [group_mean_advantages(rewards) for rewards in groups]
    return _divided(centred, _std(_flat(groups)) + eps)


def reinforce_pp_baseline_advantages(groups: Groups, *, eps: float = EPS) -> list[list[float]]:
    """reward - group mean, over the std of all of those (REINFORCE++-baseline, arXiv 2501.03262)."""
    centred = [group_mean_advantages(rewards) for rewards in groups]
    return _divided(centred, _std(_flat(centred)) + eps)


def reinforce_pp_advantages(groups: Groups, tokens: Groups, *, eps: float = EPS) -> list[list[float]]:
    """Rewards whitened over all trained tokens of the batch (REINFORCE++, arXiv 2501.03262; no discount).

    `tokens`: how many each rollout has; every token of a rollout has its reward for a return. No group baseline. A
    batch of equal rewards, or without tokens, gets exact zeros. Raises DataError for a reward that is not finite.
    """
    rewards, weights = _flat(groups), _flat(tokens)
    _check_finite(rewards)
    total = math.fsum(weights)
    if not total or all(reward == rewards[0] for reward in rewards):
        return [[0.0] * len(group) for group in groups]
    weighted = list(zip(rewards, weights, strict=True))
    mean = math.fsum(reward * weight for reward, weight in weighted) / total
    std = math.sqrt(math.fsum(weight * (reward - mean) ** 2 for reward, weight in weighted) / total)
    return _divided([[reward - mean for reward in group] for group in groups], std + eps)


ADVANTAGES: dict[str, AdvantageFn] = {
    "group_std": group_std_advantages,
    "group_mean": group_mean_advantages,
    "leave_one_out": leave_one_out_advantages,
}


def advantages(
    name: AdvantageName, groups: Groups, *, tokens: Groups, unbiased: bool = False
) -> list[list[float]]:
    """Advantages of every rollout of every group that is trained on, in order.

    Pass all groups of the iteration, of all ranks, before they are cut into steps: batch forms are over all of them.
    `tokens` are the trained tokens of each rollout; `unbiased` is read by group_std. Raises DataError.
    """
    if name == "reinforce_pp":
        return reinforce_pp_advantages(groups, tokens)
    if name == "reinforce_pp_baseline":
        return reinforce_pp_baseline_advantages(groups)
    if name == "batch_std":
        return batch_std_advantages(groups)
    if name == "group_std":
        return [group_std_advantages(rewards, unbiased=unbiased) for rewards in groups]
    return [ADVANTAGES[name](rewards) for rewards in groups]


def is_zero_advantage(outcomes: Sequence[Verdict] | Sequence[float]) -> bool:
    """True when the task cannot tell the rollouts of a group apart, so the group teaches nothing.

    Pass what the task grader itself said, not the shaped reward: verdicts (only "correct or not" counts), or
    raw task scores where a score is finer than a verdict (share of tests passed). Leave out rollouts whose
    grader failed. Raises DataError for an empty group.
    """
    if not outcomes:
        raise DataError("advantages: a group without graded rollouts, at least 1 is needed; drop the group")
    told = [one is Verdict.CORRECT if isinstance(one, Verdict) else one for one in outcomes]
    return all(one == told[0] for one in told)


def _flat(groups: Groups) -> list[float]:
    return [value for group in groups for value in group]


def _std(values: Sequence[float]) -> float:
    """Population standard deviation; 0 of no values."""
    if not values:
        return 0.0
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))


def _divided(groups: Groups, divisor: float) -> list[list[float]]:
    # a value of exactly 0 stays 0 whatever the divisor
    return [[value / divisor if value else 0.0 for value in group] for group in groups]


def _check_rewards(rewards: Sequence[float]) -> None:
    if len(rewards) < 2:
        raise DataError(
            f"advantages: a group of {len(rewards)} rollouts has no baseline, at least 2 are needed; "
            "raise group_size"
        )
    _check_finite(rewards)


def _check_finite(rewards: Sequence[float]) -> None:
    for index, reward in enumerate(rewards):
        if not math.isfinite(reward):
            raise DataError(f"advantages: reward {index} of a group is {reward}, must be finite; fix it")

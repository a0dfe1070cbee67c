"""Advantages of the rollouts of one prompt, and which groups carry no signal. Pure Python numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from megatron_rl.data.types import Verdict
from megatron_rl.errors import DataError

AdvantageFn = Callable[[Sequence[float]], list[float]]


def group_std_advantages(rewards: Sequence[float], *, eps: float = 1e-6) -> list[float]:
    """(reward - group mean) / (population std + eps), in the order of `rewards` (arXiv 2508.07629).

    A group with equal rewards gets exact zeros. Raises DataError for fewer than two rewards (a group of one
    has no baseline) and for one that is not finite.
    """
    centred = group_mean_advantages(rewards)
    std = math.sqrt(math.fsum(value * value for value in centred) / len(centred))
    return [value / (std + eps) for value in centred]


def group_mean_advantages(rewards: Sequence[float]) -> list[float]:
    """reward - group mean, in the order of `rewards`; zeros and errors as in `group_std_advantages`."""
    _check_rewards(rewards)
    if all(reward == rewards[0] for reward in rewards):
        # the mean of equal numbers may differ from them in the last bit
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


ADVANTAGES: dict[str, AdvantageFn] = {
    "group_std": group_std_advantages,
    "group_mean": group_mean_advantages,
}


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


def _check_rewards(rewards: Sequence[float]) -> None:
    if len(rewards) < 2:
        raise DataError(
            f"advantages: a group of {len(rewards)} rollouts has no baseline, at least 2 are needed; "
            "raise group_size"
        )
    for index, reward in enumerate(rewards):
        if not math.isfinite(reward):
            raise DataError(f"advantages: reward {index} of a group is {reward}, must be finite; fix it")

"""Which groups of an iteration are trained on: rounds of generation, the filter of outcomes, overlong responses.

Every rank holds the same groups and decides alike. Group statistics are those of whole groups: nothing is taken out of
one here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal

from megatron_rl.algo.advantages import is_zero_advantage
from megatron_rl.algo.overlong import overlong_penalty
from megatron_rl.data.types import Rollout, RolloutGroup
from megatron_rl.recipe.stages import RlStage

Outcome = Literal["verdict", "score", "all_pass"]
# the graded groups of the next round, in the order of drawing
Generate = Callable[[], Sequence[RolloutGroup]]

_OUTCOMES: dict[Outcome, Callable[[Rollout], float]] = {
    "verdict": lambda rollout: float(rollout.reward.verdict.is_correct()),
    "score": lambda rollout: rollout.reward.task_score,
    # exact: the score of a response that passes all tests is 1 and not nearly so
    "all_pass": lambda rollout: float(rollout.reward.task_score == 1.0),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Collected:
    """What an iteration generated, and the part of it that is trained on, both in the order of drawing."""

    groups: Sequence[RolloutGroup]
    kept: Sequence[RolloutGroup]
    num_cut: int = 0  # groups that could have been trained on, beyond prompts_per_iteration
    metrics: Mapping[str, float]
    counts: Mapping[str, int]  # what dynamic sampling adds to the counts of the run


def outcomes(group: RolloutGroup, by: Outcome) -> list[float]:
    """What the task's judge said of each rollout, as a number from 0 (wrong) to 1 (right); never the shaped reward."""
    return [_OUTCOMES[by](rollout) for rollout in group.rollouts]


def is_graded(group: RolloutGroup) -> bool:
    """Whether the task grader judged every rollout; a group of guesses and failures must not be trained on."""
    return all(rollout.reward.verdict.is_usable() for rollout in group.rollouts)


def is_uninformative(group: RolloutGroup, *, by: Outcome = "verdict") -> bool:
    """Whether the task grader said the same of every rollout."""
    return is_zero_advantage(outcomes(group, by))


def informative_groups(
    groups: Sequence[RolloutGroup],
    *,
    drop_zero_advantage: bool,
    by: Outcome = "verdict",
    mask_truncated: bool = False,
) -> list[RolloutGroup]:
    """Groups to train on: those whose grader worked, and (if asked) whose rollouts differ in outcome.

    An all-correct group is dropped whole, loss on positives included: of Klear's groups only mixed ones reach it. With
    `mask_truncated` a group of which every response was truncated has nothing to train on, and is dropped as well.
    """
    found = [group for group in groups if is_graded(group)]
    if mask_truncated:
        found = [
            group for group in found if not all(r.completion.finish.is_truncated() for r in group.rollouts)
        ]
    return [group for group in found if not is_uninformative(group, by=by)] if drop_zero_advantage else found


def collect_groups(generate: Generate, stage: RlStage, *, pool_size: int | None = None) -> Collected:
    """One iteration's groups: one round, or as many as `dynamic_sampling` allows until there are enough.

    No prompt is drawn twice in an iteration, so a pool of `pool_size` prompts (None: enough) bounds the rounds too.
    What is left after the last round is trained on, however little: micro-batches of no weight even out the ranks, so
    that no group has to be thrown away for a number to divide.
    """
    sampling = stage.dynamic_sampling
    algorithm = stage.algorithm
    most = sampling.max_rounds if sampling is not None and sampling.kind == "refill" else 1
    if sampling is not None and pool_size is not None:
        most = min(most, max(1, pool_size // sampling.generate_prompts))
    groups: list[RolloutGroup] = []
    found: list[RolloutGroup] = []
    rounds = 0
    while rounds < most and (rounds == 0 or len(found) < stage.prompts_per_iteration):
        fresh = with_overlong_penalty(generate(), stage)
        rounds += 1
        groups += fresh
        found += informative_groups(
            fresh,
            drop_zero_advantage=algorithm.drop_zero_advantage,
            by=algorithm.zero_advantage_by,
            mask_truncated=masks_truncated(stage),
        )
    kept = found[: stage.prompts_per_iteration]
    metrics = outcome_metrics(groups, by=algorithm.zero_advantage_by)
    metrics["reward/dropped_frac"] = 1.0 - len(found) / len(groups)
    counts: dict[str, int] = {}
    if sampling is not None:
        metrics |= {
            "sampling/rounds": float(rounds),
            "sampling/generated": float(len(groups)),
            "sampling/kept": float(len(kept)),
            "sampling/cut": float(len(found) - len(kept)),
        }
        counts = {
            "cut_by_sampling": len(found) - len(kept),
            "short_iterations": int(len(kept) < stage.prompts_per_iteration),
        }
    return Collected(groups=groups, kept=kept, num_cut=len(found) - len(kept), metrics=metrics, counts=counts)


def outcome_metrics(groups: Sequence[RolloutGroup], *, by: Outcome) -> dict[str, float]:
    """Shares of the groups whose grader worked, before any was dropped: all right, all wrong, all alike.

    All are 0 when it worked for none.
    """
    told = [outcomes(group, by) for group in groups if is_graded(group)]
    return {
        "reward/zero_advantage_frac": fmean(map(is_zero_advantage, told)) if told else 0.0,
        "reward/all_right_frac": fmean(all(one == 1.0 for one in group) for group in told) if told else 0.0,
        "reward/all_wrong_frac": fmean(all(one == 0.0 for one in group) for group in told) if told else 0.0,
    }


def masks_truncated(stage: RlStage) -> bool:
    """Whether truncated responses are left out of the loss."""
    return stage.overlong is not None and stage.overlong.kind == "filter"


def with_overlong_penalty(groups: Sequence[RolloutGroup], stage: RlStage) -> Sequence[RolloutGroup]:
    """The groups with DAPO's penalty in their rewards, as the part `overlong`; as they are without one."""
    overlong = stage.overlong
    if overlong is None or overlong.kind != "penalty":
        return groups
    limits = {"max_tokens": stage.sampling.max_response_tokens, "buffer_tokens": overlong.buffer_tokens}
    return [
        replace(group, rollouts=[_penalised(rollout, limits) for rollout in group.rollouts])
        for group in groups
    ]


def _penalised(rollout: Rollout, limits: Mapping[str, int]) -> Rollout:
    penalty = overlong_penalty(len(rollout.completion.token_ids), **limits)
    reward = rollout.reward
    return replace(
        rollout,
        reward=replace(reward, score=reward.score + penalty, parts={**reward.parts, "overlong": penalty}),
    )

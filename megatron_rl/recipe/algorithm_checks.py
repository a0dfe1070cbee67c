"""What does not fit together inside the algorithm of an RL stage."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from megatron_rl.recipe.algorithm import (
    CORRECTION_DEFAULTS,
    DEFAULT_MAX_ENTROPY_COEFFICIENT,
    REQUIRED_AGGREGATE,
    SURROGATE_OPTIONS,
    CorrectionConfig,
    EntropyConfig,
    KlConfig,
    KlEstimatorName,
    correction_bound,
)
from megatron_rl.recipe.problems import Problem
from megatron_rl.recipe.stages import AlgorithmConfig


def algorithm_problems(algorithm: AlgorithmConfig, path: str) -> Iterator[Problem]:
    """Every contradiction; `path` is the dotted path of the algorithm."""
    yield from _surrogate_problems(algorithm, path)
    yield from _average_problems(algorithm, path)
    if algorithm.kl is not None:
        yield from _kl_problems(algorithm.kl, algorithm.surrogate, f"{path}.kl")
    if algorithm.entropy is not None:
        yield from _entropy_problems(algorithm.entropy, f"{path}.entropy")
    yield from _correction_problems(algorithm.correction, algorithm.surrogate, f"{path}.correction")


def _surrogate_problems(algorithm: AlgorithmConfig, path: str) -> Iterator[Problem]:
    # the default surrogate's own values may stay, so that one override of `surrogate` is enough to try another
    usual = SURROGATE_OPTIONS[AlgorithmConfig().surrogate]
    for name in dict.fromkeys(name for read in SURROGATE_OPTIONS.values() for name in read):
        users = [surrogate for surrogate, read in SURROGATE_OPTIONS.items() if name in read]
        value = getattr(algorithm, name)
        if algorithm.surrogate not in users and value not in (None, False, usual.get(name)):
            yield Problem(
                f"{path}.{name}",
                f"got {value}, but it is not used by surrogate {algorithm.surrogate}, only by "
                f"{', '.join(users)}; remove it or change surrogate",
            )
    if algorithm.dual_clip is not None and algorithm.dual_clip <= 1:
        yield Problem(f"{path}.dual_clip", f"got {algorithm.dual_clip}, must be above 1; null disables it")
    if algorithm.surrogate == "dro" and algorithm.tau is None:
        yield Problem(
            f"{path}.tau", "surrogate dro needs it and no value is usual; give a number such as 0.1"
        )


def _average_problems(algorithm: AlgorithmConfig, path: str) -> Iterator[Problem]:
    needed, reason = REQUIRED_AGGREGATE.get(algorithm.surrogate, (algorithm.aggregate, ""))
    if algorithm.aggregate != needed:
        yield Problem(
            f"{path}.aggregate",
            f"got {algorithm.aggregate}, must be {needed} with surrogate {algorithm.surrogate}: {reason}",
        )
    if algorithm.loss_length is not None and algorithm.aggregate != "token_sum_norm":
        yield Problem(
            f"{path}.loss_length",
            f"got {algorithm.loss_length}, but it is not used by aggregate {algorithm.aggregate}, only by "
            "token_sum_norm; remove it or change aggregate",
        )
    if algorithm.normaliser == "micro_batch" and algorithm.aggregate != "token_mean":
        yield Problem(
            f"{path}.normaliser",
            f"got micro_batch, which is an average of token means and means nothing with aggregate "
            f"{algorithm.aggregate}; use step, or aggregate token_mean",
        )
    if algorithm.advantage_std != "population" and algorithm.advantage != "group_std":
        yield Problem(
            f"{path}.advantage_std",
            f"got {algorithm.advantage_std}, but it is not used by advantage {algorithm.advantage}, only by "
            "group_std; remove it or change advantage",
        )


def _kl_problems(kl: KlConfig, surrogate: str, path: str) -> Iterator[Problem]:
    if kl.where == "loss" and kl.estimator == "k1":
        others = ", ".join(name for name in get_args(KlEstimatorName) if name != "k1")
        yield Problem(
            f"{path}.estimator",
            f"got k1, whose gradient is zero on average, so that in the loss it is noise; use one of {others}, or "
            "where: reward",
        )
    if kl.where == "reward" and kl.estimator not in (None, "k1"):
        yield Problem(
            f"{path}.estimator",
            f"got {kl.estimator}, must be k1 in the reward: old - reference log-prob, whose expectation is the KL",
        )
    if kl.where == "loss" and surrogate == "dro":
        yield Problem(
            f"{path}.where",
            "got loss, but surrogate dro has a squared distance to the old policy in that place; use reward, or "
            "another surrogate",
        )


def _entropy_problems(entropy: EntropyConfig, path: str) -> Iterator[Problem]:
    if entropy.target is not None:
        highest = entropy.max_coefficient or DEFAULT_MAX_ENTROPY_COEFFICIENT
        if entropy.coefficient > highest:
            yield Problem(
                f"{path}.coefficient",
                f"got {entropy.coefficient}, must be at most max_coefficient = {highest}; lower it or raise that",
            )
        return
    if entropy.coefficient == 0:
        yield Problem(
            f"{path}.coefficient",
            "got 0.0 without a target, which does nothing; set one of them, or entropy to null",
        )
    for name in ("max_coefficient", "delta"):
        if getattr(entropy, name) is not None:
            yield Problem(
                f"{path}.{name}",
                f"got {getattr(entropy, name)}, which a fixed coefficient does not use; remove it or set target",
            )


def _correction_problems(correction: CorrectionConfig, surrogate: str, path: str) -> Iterator[Problem]:
    kind = correction.kind
    if kind == "none":
        unread = {"veto": correction.veto, "batch_normalise": correction.batch_normalise or None}
        for name, value in unread.items():
            if value is not None:
                yield Problem(f"{path}.{name}", f"got {value}, which kind none does not use; set kind")
        if surrogate == "decoupled_ppo":
            yield Problem(
                f"{path}.kind",
                "got none, but surrogate decoupled_ppo is weighed by the ratio of old to rollout policy; use icepop "
                "with low: 0, high: 5 to leave out what is above 5, or token_tis to cut it, or surrogate ppo",
            )
    for bound in ("low", "high"):
        value = getattr(correction, bound)
        if value is not None and bound not in CORRECTION_DEFAULTS[kind]:
            users = [name for name, read in CORRECTION_DEFAULTS.items() if bound in read]
            yield Problem(
                f"{path}.{bound}",
                f"got {value}, but it is not used by kind {kind}, only by {', '.join(users)}; remove it or change "
                "kind",
            )
    if correction.veto is not None and correction.veto >= 1:
        yield Problem(
            f"{path}.veto",
            f"got {correction.veto}, must be below 1, the ratio of equal policies; such as 1e-4",
        )
    yield from _interval_problems(correction, path)
    if correction.old == "rollout" and kind != "none":
        yield Problem(
            f"{path}.old",
            f"got rollout with kind {kind}: the surrogate's ratio is then taken to the engine's log-probs and corrects "
            "already, and old / rollout is 1; use old: trainer, or kind: none",
        )


def _interval_problems(correction: CorrectionConfig, path: str) -> Iterator[Problem]:
    if correction.kind in ("none", "k2_mask", "k3_mask"):
        return
    low, high = correction_bound(correction, "low"), correction_bound(correction, "high")
    if high is not None and (high < 1 or (low is not None and low > 1)):
        yield Problem(
            f"{path}.{'high' if high < 1 else 'low'}",
            f"got {high if high < 1 else low}, but the bounds must have 1 between them, the ratio of equal policies",
        )

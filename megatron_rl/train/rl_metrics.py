"""Numbers of one RL iteration, by the names that the run directory promises."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import fmean, pstdev

import torch

from megatron_rl.algo.losses import mismatch_metrics
from megatron_rl.algo.metric import Metric
from megatron_rl.data.load import Load
from megatron_rl.data.types import RolloutGroup, Verdict
from megatron_rl.evaluation.statistics import percentile
from megatron_rl.parallel.collectives import all_gather_object
from megatron_rl.train.groups import Collected, is_graded
from megatron_rl.train.metrics import merge
from megatron_rl.train.optimizer import SKIPPED
from megatron_rl.train.policy import Policy
from megatron_rl.train.updates import Update, logprob_gaps


def iteration_metrics(
    collected: Collected,
    updates: Sequence[Update],
    steps: Sequence[Sequence[Sequence[Metric]]],
    *,
    policy: Policy,
) -> dict[str, float]:
    """Rollouts, rewards, losses, the gap between engine and trainer, the load. Collective (the gap is gathered)."""
    # the other tp and pp ranks hold copies of the same tokens
    holds_tokens = policy.tp_rank == 0 and policy.pp_rank == 0
    gaps = torch.cat(all_gather_object(logprob_gaps(updates if holds_tokens else [])))
    losses = merge([metrics for step in steps for metrics in step])
    if steps and "policy/loss" in losses:
        # a sum over micro-batches is the loss of a step; over several steps their mean is wanted
        losses["policy/loss"] /= len(steps)
    return {
        **rollout_metrics(collected.groups),
        **collected.metrics,
        **losses,
        **merge([mismatch_metrics(gaps)]),
        "policy/updates": float(len(steps)),
        **sum((update.load for update in updates), Load()).metrics(),
    }


def rollout_metrics(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Rewards and lengths over all rollouts, before any group was dropped."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    scores = [rollout.reward.score for rollout in rollouts]
    lengths = [len(rollout.completion.token_ids) for rollout in rollouts]
    verdicts = Counter(rollout.reward.verdict for rollout in rollouts)
    metrics = {
        "reward/mean": fmean(scores),
        "reward/std": pstdev(scores),
        "rollout/tokens": float(sum(lengths)),
        "rollout/response_tokens_mean": fmean(lengths),
        "rollout/response_tokens_std": pstdev(lengths),
        "rollout/response_tokens_p95": percentile(lengths, 95),
        "rollout/response_tokens_max": float(max(lengths)),
        "rollout/truncated_frac": fmean(rollout.completion.finish.is_truncated() for rollout in rollouts),
        "rollout/weight_version": float(min(rollout.completion.weight_version for rollout in rollouts)),
    }
    for verdict in Verdict:
        metrics[f"reward/{verdict.value}_frac"] = verdicts[verdict] / len(rollouts)
    for part in rollouts[0].reward.parts:
        metrics[f"reward/{part}"] = fmean(rollout.reward.parts[part] for rollout in rollouts)
    return metrics


def iteration_counts(collected: Collected, steps: Sequence[Sequence[Sequence[Metric]]]) -> dict[str, int]:
    """What one iteration adds to the counts of the run. A prompt is one group."""
    groups = collected.groups
    skipped = sum(metric.name == SKIPPED for step in steps for part in step for metric in part)
    ungraded = sum(not is_graded(group) for group in groups)
    return {
        "prompts": len(groups),
        "rollouts": sum(len(group.rollouts) for group in groups),
        "dropped_ungraded": ungraded,
        "dropped_uninformative": len(groups) - ungraded - len(collected.kept) - collected.num_cut,
        **collected.counts,
        "updates": len(steps) - skipped,
        **({"skipped_steps": skipped} if skipped else {}),
    }


def num_tokens(groups: Sequence[RolloutGroup]) -> int:
    """Prompt and response tokens of all rollouts."""
    return sum(
        len(rollout.prompt_token_ids) + len(rollout.completion.token_ids)
        for group in groups
        for rollout in group.rollouts
    )

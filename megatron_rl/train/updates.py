"""The optimizer steps of one RL iteration: from groups to micro-batches, old log-probs and the update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megatron_rl.algo.advantages import ADVANTAGES
from megatron_rl.algo.aggregate import normaliser, positive_normaliser
from megatron_rl.algo.losses import policy_loss
from megatron_rl.algo.metric import Metric
from megatron_rl.algo.surrogates import make_surrogate
from megatron_rl.data.pack import with_old_logprobs
from megatron_rl.data.types import PackedBatch, RolloutGroup, TrainSample
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.recipe.stages import RlStage
from megatron_rl.train.batches import local_batches, rollout_samples, split_updates
from megatron_rl.train.groups import masks_truncated
from megatron_rl.train.optimizer import SKIPPED
from megatron_rl.train.policy import LossFunction, Policy


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """One optimizer step: the samples of all ranks, and the micro-batches of this one."""

    samples: Sequence[TrainSample]
    batches: Sequence[PackedBatch]


def plan_updates(
    groups: Sequence[RolloutGroup], stage: RlStage, layout: ParallelLayout, *, dp_rank: int
) -> list[Update]:
    """Advantages over whole groups first, then the cut into optimizer steps, ranks and micro-batches.

    A step in which no token is trained on is not taken: it would divide by zero, and moments alone would move weights.
    """
    advantages_of = ADVANTAGES[stage.algorithm.advantage]
    updates = []
    per_update = stage.prompts_per_iteration // stage.updates_per_rollout
    for part in split_updates(groups, groups_per_update=per_update):
        advantages = [advantages_of([rollout.reward.score for rollout in group.rollouts]) for group in part]
        samples = rollout_samples(part, advantages, mask_truncated=masks_truncated(stage))
        if not any(sample.num_trained_tokens for sample in samples):
            continue
        batches = local_batches(
            samples, layout, dp_rank=dp_rank, tokens_per_microbatch=stage.tokens_per_microbatch
        )
        updates.append(Update(samples=samples, batches=batches))
    return updates


def add_old_logprobs(policy: Policy, update: Update, *, temperature: float) -> Update:
    """The same update with this trainer's log-probs before any step of the iteration. Collective."""
    logprobs = policy.logprobs(update.batches, temperature=temperature)
    batches = [with_old_logprobs(b, values.cpu()) for b, values in zip(update.batches, logprobs, strict=True)]
    return Update(samples=update.samples, batches=batches)


def update_loss(update: Update, stage: RlStage) -> LossFunction:
    """The loss of one optimizer step by the recipe's algorithm; its normalisers count the whole step."""
    algorithm = stage.algorithm
    return partial(
        policy_loss,
        surrogate=make_surrogate(algorithm),
        aggregate=algorithm.aggregate,
        normaliser=normaliser(update.samples, algorithm.aggregate),
        sft_on_positives=algorithm.sft_on_positives,
        positive_normaliser=positive_normaliser(update.samples),
    )


def apply_update(policy: Policy, update: Update, stage: RlStage) -> list[list[Metric]]:
    """One optimizer step; metrics of every micro-batch of every rank. Collective."""
    loss_fn = update_loss(update, stage)
    metrics = policy.forward_backward(update.batches, loss_fn, temperature=stage.sampling.temperature)
    stats = policy.optimizer_step()
    step = [
        Metric(name="policy/grad_norm", value=stats.grad_norm, reduce="mean"),
        Metric(name="optim/lr", value=stats.lr, reduce="max"),
        *[Metric(name=SKIPPED, value=1.0, reduce="sum")] * stats.was_skipped,
    ]
    return [*metrics, step]


def logprob_gaps(updates: Sequence[Update]) -> Tensor:
    """|old - rollout| log-prob of every trained token of this rank, [K] float32."""
    gaps = [
        (batch.rl.old_logprobs - batch.rl.rollout_logprobs)[batch.loss_mask].abs()
        for update in updates
        for batch in update.batches
        if batch.rl is not None
    ]
    return torch.cat(gaps) if gaps else torch.zeros(0)

"""The optimizer steps of one RL iteration: from groups to micro-batches, old log-probs and the update."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from megatron_rl.algo.advantages import advantages
from megatron_rl.algo.aggregate import normaliser, positive_normaliser
from megatron_rl.algo.entropy import EntropyState
from megatron_rl.algo.losses import policy_loss
from megatron_rl.algo.metric import Metric
from megatron_rl.algo.surrogates import is_anchored_to_old, make_policy_loss
from megatron_rl.data.load import Load
from megatron_rl.data.pack import with_old_logprobs
from megatron_rl.data.types import PackedBatch, Rollout, RolloutGroup, TrainSample
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.recipe.stages import RlStage
from megatron_rl.train.batches import rollout_samples, split_updates, step_batches
from megatron_rl.train.groups import masks_truncated
from megatron_rl.train.metrics import merge
from megatron_rl.train.optimizer import SKIPPED
from megatron_rl.train.policy import LossFunction, Policy


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """One optimizer step: the samples of all ranks, and the micro-batches of this one."""

    samples: Sequence[TrainSample]
    batches: Sequence[PackedBatch]
    load: Load  # of the micro-batches of all ranks
    is_on_policy: bool = False  # old log-probs are not there yet: the step's own pass gives them


def plan_updates(
    groups: Sequence[RolloutGroup],
    stage: RlStage,
    layout: ParallelLayout,
    *,
    dp_rank: int,
    attention_weight: float = 0.0,
) -> list[Update]:
    """Advantages over all groups first, then the cut into optimizer steps, ranks and micro-batches.

    A step in which no token is trained on is not taken: it would divide by zero, and moments alone would move weights.
    """
    of_group = group_advantages(groups, stage)
    updates: list[Update] = []
    first = 0
    per_update = stage.prompts_per_iteration // stage.updates_per_rollout
    for part in split_updates(groups, groups_per_update=per_update):
        samples = rollout_samples(
            part, of_group[first : first + len(part)], mask_truncated=masks_truncated(stage)
        )
        first += len(part)
        if not any(sample.num_trained_tokens for sample in samples):
            continue
        step = step_batches(
            samples,
            layout,
            dp_rank=dp_rank,
            tokens_per_microbatch=stage.tokens_per_microbatch,
            attention_weight=attention_weight,
        )
        updates.append(Update(samples=samples, batches=step.batches, load=step.load))
    return updates


def group_advantages(
    groups: Sequence[RolloutGroup], stage: RlStage, *, penalties: Mapping[str, float] | None = None
) -> list[list[float]]:
    """Advantages of every rollout by the recipe; `groups` are all that the iteration trains on, on every rank.

    `penalties`, by sample id, are taken off the rewards first.
    """
    algorithm, taken = stage.algorithm, penalties or {}
    rewards = [
        [
            rollout.reward.score - taken.get(f"{group.prompt.id}/{rollout.sample_index}", 0.0)
            for rollout in group.rollouts
        ]
        for group in groups
    ]
    return advantages(
        algorithm.advantage,
        rewards,
        tokens=[[_num_trained_tokens(rollout, stage) for rollout in group.rollouts] for group in groups],
        unbiased=algorithm.advantage_std == "unbiased",
    )


def _num_trained_tokens(rollout: Rollout, stage: RlStage) -> int:
    completion = rollout.completion
    is_masked = masks_truncated(stage) and completion.finish.is_truncated()
    return 0 if is_masked else len(completion.token_ids)


def add_old_logprobs(policy: Policy, update: Update, *, temperature: float) -> Update:
    """The same update with this trainer's log-probs before any step of the iteration. Collective."""
    return _with_old(update, policy.logprobs(update.batches, temperature=temperature))


def _with_old(update: Update, logprobs: Sequence[Tensor]) -> Update:
    batches = [with_old_logprobs(b, values.cpu()) for b, values in zip(update.batches, logprobs, strict=True)]
    return replace(update, batches=batches)


def update_loss(update: Update, stage: RlStage, *, entropy_coefficient: float = 0.0) -> LossFunction:
    """The loss of one optimizer step by the recipe's algorithm; its normalisers count the whole step."""
    algorithm = stage.algorithm
    per_micro_batch = algorithm.normaliser == "micro_batch"
    length = algorithm.loss_length or stage.sampling.max_response_tokens
    # of micro-batches means are weighted by their sequences
    counted = "sequence_mean" if per_micro_batch else algorithm.aggregate
    return partial(
        policy_loss,
        surrogate=make_policy_loss(algorithm, entropy_coefficient=entropy_coefficient),
        aggregate=algorithm.aggregate,
        normaliser=normaliser(update.samples, counted, loss_length=length),
        sft_on_positives=algorithm.sft_on_positives,
        positive_normaliser=positive_normaliser(update.samples),
        per_micro_batch=per_micro_batch,
        anchored_to_old=is_anchored_to_old(algorithm),
    )


def apply_updates(
    policy: Policy,
    updates: Sequence[Update],
    stage: RlStage,
    entropy: EntropyState,
    *,
    watch: Callable[[Update], Callable[[PackedBatch, Tensor], None] | None] = lambda update: None,
) -> tuple[list[Update], list[list[list[Metric]]], EntropyState]:
    """One optimizer step after the other: the updates, now all with old log-probs, the metrics of each step, and where
    they leave the entropy bonus. Collective.

    `watch` gives of each what `Policy.forward_backward` tells of its log-probs.
    """
    config, done, steps = stage.algorithm.entropy, [], []
    for update in updates:
        coefficient = entropy.active_coefficient(config)
        update, step = apply_update(
            policy, update, stage, entropy_coefficient=coefficient, watch=watch(update)
        )
        done.append(update)
        entropy = entropy.after_step(config, merge(step).get("policy/entropy"))
        if config is not None:
            step.append([Metric(name="policy/entropy_coefficient", value=coefficient, reduce="mean")])
        steps.append(step)
    return done, steps, entropy


def apply_update(
    policy: Policy,
    update: Update,
    stage: RlStage,
    *,
    entropy_coefficient: float = 0.0,
    watch: Callable[[PackedBatch, Tensor], None] | None = None,
) -> tuple[Update, list[list[Metric]]]:
    """One optimizer step: the update with its old log-probs, metrics of every micro-batch of every rank. Collective."""
    loss_fn = update_loss(update, stage, entropy_coefficient=entropy_coefficient)
    temperature = stage.sampling.temperature
    if update.is_on_policy:
        metrics, logprobs = policy.forward_backward_on_policy(
            update.batches, loss_fn, temperature=temperature, watch=watch
        )
        update = replace(_with_old(update, logprobs), is_on_policy=False)
    else:
        metrics = policy.forward_backward(update.batches, loss_fn, temperature=temperature, watch=watch)
    stats = policy.optimizer_step()
    step = [
        Metric(name="policy/grad_norm", value=stats.grad_norm, reduce="mean"),
        Metric(name="optim/lr", value=stats.lr, reduce="max"),
        *[Metric(name=SKIPPED, value=1.0, reduce="sum")] * stats.was_skipped,
    ]
    return update, [*metrics, step]


def logprob_gaps(updates: Sequence[Update]) -> Tensor:
    """|old - rollout| log-prob of every trained token of this rank, [K] float32.

    Without the micro-batches whose old log-probs are the engine's own: they tell nothing of the trainer's.
    """
    gaps = [
        (batch.rl.old_logprobs - batch.rl.rollout_logprobs)[batch.loss_mask].abs()
        for update in updates
        for batch in update.batches
        if batch.rl is not None and batch.rl.old_logprobs is not batch.rl.rollout_logprobs
    ]
    return torch.cat(gaps) if gaps else torch.zeros(0)

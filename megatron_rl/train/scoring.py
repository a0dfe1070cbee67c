"""What is known of an iteration's rollouts before its first step: log-probs of other policies and what follows.

Old and reference log-probs, the correction of the mismatch with the engine, and, with the KL in the reward, advantages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from megatron_rl.algo.correction import (
    MismatchSums,
    add_sums,
    correction_metrics,
    correction_weights,
    mean_kept_weight,
    mismatch_sums,
)
from megatron_rl.data.pack import (
    unpack_per_token,
    with_advantages,
    with_correction,
    with_ref_logprobs,
)
from megatron_rl.data.types import PackedBatch, RolloutGroup
from megatron_rl.parallel.collectives import all_gather_object
from megatron_rl.recipe.algorithm import CorrectionConfig
from megatron_rl.recipe.amounts import has_old_logprob_pass
from megatron_rl.recipe.stages import RlStage
from megatron_rl.train.metrics import merge
from megatron_rl.train.policy import Policy
from megatron_rl.train.reference import ReferencePolicy
from megatron_rl.train.updates import Update, add_old_logprobs, group_advantages


def score_updates(
    policy: Policy,
    updates: Sequence[Update],
    groups: Sequence[RolloutGroup],
    stage: RlStage,
    *,
    reference: ReferencePolicy | None,
) -> tuple[list[Update], dict[str, float]]:
    """The same updates, ready for their steps, and metrics. `groups` are all that they train on. Collective."""
    algorithm = stage.algorithm
    temperature = stage.sampling.temperature
    if algorithm.correction.old == "rollout":
        scored = [_with_rollout_as_old(update) for update in updates]
    elif has_old_logprob_pass(stage, updates=len(updates)):
        scored = [add_old_logprobs(policy, update, temperature=temperature) for update in updates]
    else:
        scored = [replace(update, is_on_policy=True) for update in updates]
    if reference is not None:
        scored = _add_ref_logprobs(reference, policy, scored, temperature=temperature)
    metrics: dict[str, float] = {}
    if algorithm.correction.kind != "none":
        parts = [_add_correction(policy, update, algorithm.correction) for update in scored]
        scored = [update for update, _ in parts]
        metrics |= merge([correction_metrics(add_sums([sums for _, sums in parts]))])
    if algorithm.kl is not None and algorithm.kl.where == "reward":
        distances = reference_distances(policy, scored)
        scored = with_kl_in_reward(scored, groups, stage, distances)
        if distances:
            metrics["reward/kl_ref"] = sum(distances.values()) / len(distances)
    return scored, metrics


def with_kl_in_reward(
    updates: Sequence[Update], groups: Sequence[RolloutGroup], stage: RlStage, distances: Mapping[str, float]
) -> list[Update]:
    """Advantages of rewards from which coefficient * distance was taken; `distances` in nats by sample id."""
    assert stage.algorithm.kl is not None
    penalties = {name: stage.algorithm.kl.coefficient * nats for name, nats in distances.items()}
    known = {
        f"{group.prompt.id}/{rollout.sample_index}": advantage
        for group, values in zip(groups, group_advantages(groups, stage, penalties=penalties), strict=True)
        for rollout, advantage in zip(group.rollouts, values, strict=True)
    }
    result = []
    for update in updates:
        samples = [replace(sample, advantage=known[sample.sample_id]) for sample in update.samples]
        batches = [with_advantages(batch, samples) for batch in update.batches]
        result.append(replace(update, samples=samples, batches=batches))
    return result


def reference_distances(policy: Policy, updates: Sequence[Update]) -> dict[str, float]:
    """By sample id, of all ranks: sum over its trained tokens of old - reference log-prob. Collective."""
    mine: dict[str, float] = {}
    for update in updates if _holds_tokens(policy) else ():
        for batch in update.batches:
            assert batch.rl is not None and batch.rl.ref_logprobs is not None
            gaps = unpack_per_token(batch, batch.rl.old_logprobs - batch.rl.ref_logprobs)
            for index, gap in zip(batch.sample_index, gaps, strict=True):
                mine[update.samples[index].sample_id] = float(gap.double().sum())
    return {name: nats for of_rank in all_gather_object(mine) for name, nats in of_rank.items()}


def _with_rollout_as_old(update: Update) -> Update:
    """The engine's own log-probs are the old ones: no pass, and the surrogate's ratio is to them."""
    batches = []
    for batch in update.batches:
        assert batch.rl is not None
        batches.append(replace(batch, rl=replace(batch.rl, old_logprobs=batch.rl.rollout_logprobs)))
    return replace(update, batches=batches)


def _add_ref_logprobs(
    reference: ReferencePolicy, policy: Policy, updates: Sequence[Update], *, temperature: float
) -> list[Update]:
    values = reference.logprobs(policy, [update.batches for update in updates], temperature=temperature)
    return [
        replace(
            update,
            batches=[
                with_ref_logprobs(b, one.cpu()) for b, one in zip(update.batches, of_update, strict=True)
            ],
        )
        for update, of_update in zip(updates, values, strict=True)
    ]


def _add_correction(policy: Policy, update: Update, config: CorrectionConfig) -> tuple[Update, MismatchSums]:
    """The update with its weights, and their sums over all ranks. Collective."""
    batches = [_with_weights(batch, config) for batch in update.batches]
    sums = _sums(policy, batches)
    if config.batch_normalise:
        mean = mean_kept_weight(sums)
        batches = [_scaled(batch, 1.0 / mean) for batch in batches]
        sums = _sums(policy, batches)
    return replace(update, batches=batches), sums


def _with_weights(batch: PackedBatch, config: CorrectionConfig) -> PackedBatch:
    rl = batch.rl
    assert rl is not None
    weights = correction_weights(
        config, rl.old_logprobs, rl.rollout_logprobs, loss_mask=batch.loss_mask, cu_seqlens=batch.cu_seqlens
    )
    return with_correction(batch, weights)


def _scaled(batch: PackedBatch, factor: float) -> PackedBatch:
    assert batch.rl is not None and batch.rl.correction is not None
    return with_correction(batch, batch.rl.correction * factor)


def _sums(policy: Policy, batches: Sequence[PackedBatch]) -> MismatchSums:
    mine = []
    for batch in batches if _holds_tokens(policy) else ():
        rl = batch.rl
        assert rl is not None and rl.correction is not None
        mine.append(mismatch_sums(rl.correction, rl.old_logprobs, rl.rollout_logprobs, batch.loss_mask))
    return add_sums(all_gather_object(add_sums(mine)))


def _holds_tokens(policy: Policy) -> bool:
    """Whether this rank counts: the other tp and pp ranks hold copies of the same tokens."""
    return policy.tp_rank == 0 and policy.pp_rank == 0

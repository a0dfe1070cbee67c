"""Losses of one micro-batch as the fused head takes them: constants per token, the surrogate, what to report.

The head computes log-probs, value and gradient in one go (`megatron_rl_kernels.linear_policy_loss`). A micro-batch's
loss is its share of the step's loss: it is divided by the *global* normaliser that the caller passes in, so shares are
added (over micro-batches and data-parallel ranks), never averaged.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megatron_rl.algo.aggregate import Aggregate, micro_batch_mean_weights, token_weights
from megatron_rl.algo.metric import Metric
from megatron_rl.data.types import PackedBatch
from megatron_rl.errors import TrainingError
from megatron_rl_kernels.linear_policy_loss import PolicyInputs
from megatron_rl_kernels.policy_loss import METRICS, PolicyLossConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLoss:
    """What the head needs to know of a loss, and how its results become metrics.

    `report` takes the loss (0-dim) and the kernel's metrics [len(METRICS)], both without gradient.
    """

    inputs: PolicyInputs
    config: PolicyLossConfig
    report: Callable[[Tensor, Tensor], list[Metric]]


def sft_loss(batch: PackedBatch, *, normaliser: float) -> TokenLoss:
    """Negative log-likelihood of the trained tokens; `normaliser` is their global count in the step.

    Raises TrainingError when nothing is trained on.
    """
    _check_normaliser(normaliser)
    zeros = torch.zeros_like(batch.loss_mask, dtype=torch.float32)
    inputs = PolicyInputs(
        advantage=zeros,
        mask=batch.loss_mask,
        token_weight=zeros,
        nll_weight=batch.loss_mask.float() / normaliser,
    )
    return TokenLoss(inputs=inputs, config=PolicyLossConfig(surrogate="reinforce"), report=_report_sft)


def policy_loss(
    batch: PackedBatch,
    *,
    surrogate: PolicyLossConfig,
    aggregate: Aggregate,
    normaliser: float,
    sft_on_positives: float = 0.0,
    positive_normaliser: float = 0.0,
    per_micro_batch: bool = False,
    anchored_to_old: bool = False,
) -> TokenLoss:
    """Surrogate loss + `sft_on_positives` * mean NLL of correct rollouts (arXiv 2508.07629, eq. 13, 14).

    `batch.rl` is required. `normaliser` and `positive_normaliser` are global counts of the optimizer step
    (`algo.aggregate`); a step without correct rollouts has a positive_normaliser of 0 and no such term. With
    `per_micro_batch` both means are those of the micro-batch, and `normaliser` counts the step's trained sequences.
    `anchored_to_old`: the KL term is to the old policy. `policy/loss` is the whole scalar. Raises TrainingError when
    nothing is trained on.
    """
    _check_normaliser(normaliser)
    rl, mask, bounds = batch.rl, batch.loss_mask, batch.cu_seqlens
    assert rl is not None
    has_positives = sft_on_positives > 0 and positive_normaliser > 0
    positives = None
    if per_micro_batch:
        weights = micro_batch_mean_weights(mask, loss_mask=mask, cu_seqlens=bounds)
        if has_positives:
            means = micro_batch_mean_weights(rl.positives > 0, loss_mask=mask, cu_seqlens=bounds)
            positives = means * (sft_on_positives / normaliser)
    else:
        weights = token_weights(aggregate, loss_mask=mask, cu_seqlens=bounds)
        if has_positives:
            positives = rl.positives * (sft_on_positives / positive_normaliser)
    inputs = PolicyInputs(
        advantage=rl.advantages,
        mask=mask,
        token_weight=weights / normaliser,
        old_logprob=rl.old_logprobs,
        ref_logprob=rl.old_logprobs if anchored_to_old else rl.ref_logprobs,
        correction=rl.correction,
        nll_weight=positives,
        cu_seqlens=bounds if surrogate.is_sequence_level else None,
    )
    has_reference = rl.ref_logprobs is not None and not anchored_to_old
    report = partial(_report_policy, has_positives=has_positives, has_reference=has_reference)
    return TokenLoss(inputs=inputs, config=surrogate, report=report)


def mismatch_metrics(diffs: Tensor) -> list[Metric]:
    """mismatch/mean, p99 and max of |old - rollout| log-prob: how far trainer and engine are apart.

    `diffs` [K] holds that gap for every trained token of the iteration, gathered over data-parallel ranks (a
    percentile cannot be merged from parts); p99 is the nearest-rank one. No tokens, no metrics.
    """
    if diffs.numel() == 0:
        return []
    gaps = diffs.detach().abs().float()
    p99 = gaps.kthvalue(math.ceil(0.99 * gaps.numel())).values
    return [
        Metric(name="mismatch/mean", value=gaps.mean(), reduce="mean"),
        Metric(name="mismatch/p99", value=p99, reduce="max"),
        Metric(name="mismatch/max", value=gaps.max(), reduce="max"),
    ]


def _report_sft(loss: Tensor, metrics: Tensor) -> list[Metric]:
    return [
        _mean("sft/loss", metrics, "nll", over="nll_tokens"),
        _mean("sft/entropy", metrics, "entropy"),
    ]


def _report_policy(
    loss: Tensor, metrics: Tensor, *, has_positives: bool, has_reference: bool
) -> list[Metric]:
    return [
        _mean("policy/clip_high_frac", metrics, "clipped_high"),
        _mean("policy/clip_low_frac", metrics, "clipped_low"),
        # r - 1 - log r: never negative; its mean over tokens of the old policy is KL(old || new)
        _mean("policy/kl_old", metrics, "kl_k3"),
        _mean("policy/entropy", metrics, "entropy"),
        Metric(name="policy/loss", value=loss, reduce="sum"),
        *[_mean("policy/kl_ref", metrics, "kl_ref")] * has_reference,
        *[_mean("policy/positive_nll", metrics, "nll", over="nll_tokens")] * has_positives,
    ]


def _mean(name: str, metrics: Tensor, numerator: str, *, over: str = "tokens") -> Metric:
    """One sum of the kernel over one of its counts; a micro-batch that counts none has no say."""
    total, count = metrics[METRICS.index(numerator)], metrics[METRICS.index(over)]
    return Metric(name=name, value=total / count.clamp(min=1), reduce="mean", weight=count)


def _check_normaliser(normaliser: float) -> None:
    if not (math.isfinite(normaliser) and normaliser > 0):
        raise TrainingError(
            f"loss: the normaliser of this optimizer step is {normaliser}, must be above 0: no token of the "
            "global batch is trained on; skip the step, or check the data"
        )

"""Losses of one micro-batch, from per-token log-probs to a scalar, with the metrics that belong to them.

A micro-batch's loss is its share of the step's loss: it is divided by the *global* normaliser that the caller
passes in, so shares are added (over micro-batches and data-parallel ranks), never averaged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_rl.algo.aggregate import Aggregate, token_weights
from megatron_rl.algo.metric import Metric
from megatron_rl.algo.surrogates import MAX_LOG_RATIO, ClippedRatio
from megatron_rl.data.types import PackedBatch
from megatron_rl.errors import TrainingError


@dataclass(frozen=True, kw_only=True, slots=True)
class LossOutput:
    """`loss` is a 0-dim float32 tensor with gradient to the log-probs; metric values are detached."""

    loss: Tensor
    metrics: list[Metric]


def sft_loss(logprob: Tensor, entropy: Tensor | None, batch: PackedBatch, *, normaliser: float) -> LossOutput:
    """Negative log-likelihood of the trained tokens; `normaliser` is their global count in the step.

    logprob, entropy [T] float32, aligned to `batch.labels`. Raises TrainingError when nothing is trained on.
    """
    _check_normaliser(normaliser)
    nll = -torch.where(batch.loss_mask, logprob, 0.0)
    tokens = batch.loss_mask.sum()
    metrics = [_token_mean("sft/loss", nll, tokens)]
    if entropy is not None:
        metrics.append(_token_mean("sft/entropy", torch.where(batch.loss_mask, entropy, 0.0), tokens))
    return LossOutput(loss=nll.sum() / normaliser, metrics=metrics)


def policy_loss(
    logprob: Tensor,
    entropy: Tensor | None,
    batch: PackedBatch,
    *,
    surrogate: ClippedRatio,
    aggregate: Aggregate,
    normaliser: float,
    sft_on_positives: float = 0.0,
    positive_normaliser: float = 0.0,
) -> LossOutput:
    """Surrogate loss + `sft_on_positives` * mean NLL of correct rollouts (arXiv 2508.07629, eq. 13, 14).

    logprob (with gradient) and entropy [T] float32, aligned to `batch.labels`; `batch.rl` is required.
    `normaliser` and `positive_normaliser` are global counts of the optimizer step (`algo.aggregate`); a step
    without correct rollouts has a positive_normaliser of 0 and no such term. The gradient is the surrogate's
    closed form. `policy/loss` is the whole scalar. Raises TrainingError when nothing is trained on.
    """
    _check_normaliser(normaliser)
    assert batch.rl is not None
    out = surrogate(logprob, batch.rl.old_logprobs, batch.rl.advantages, batch.loss_mask)
    weights = token_weights(aggregate, loss_mask=batch.loss_mask, cu_seqlens=batch.cu_seqlens) / normaliser
    loss = _ClosedForm.apply(logprob, (weights * out.loss).sum(), weights * out.grad_weight)
    tokens = batch.loss_mask.sum()
    metrics = [
        _token_mean("policy/clip_high_frac", out.clipped_high, tokens),
        _token_mean("policy/clip_low_frac", out.clipped_low, tokens),
        _token_mean("policy/kl_old", _kl_old(logprob, batch.rl.old_logprobs, batch.loss_mask), tokens),
    ]
    if entropy is not None:
        metrics.append(_token_mean("policy/entropy", torch.where(batch.loss_mask, entropy, 0.0), tokens))
    if sft_on_positives > 0 and positive_normaliser > 0:
        positives = (batch.rl.positives > 0) & batch.loss_mask
        nll = -torch.where(positives, logprob, 0.0)
        loss = loss + sft_on_positives * nll.sum() / positive_normaliser
        metrics.append(_token_mean("policy/positive_nll", nll, positives.sum()))
    metrics.append(Metric(name="policy/loss", value=loss.detach(), reduce="sum"))
    return LossOutput(loss=loss, metrics=metrics)


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


class _ClosedForm(torch.autograd.Function):
    """A scalar whose value and whose gradient by `logprob` were both computed by hand."""

    @staticmethod
    def forward(ctx: Any, logprob: Tensor, value: Tensor, grad_weight: Tensor) -> Tensor:
        ctx.save_for_backward(grad_weight)
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (grad_weight,) = ctx.saved_tensors
        return grad * grad_weight, None, None


def _kl_old(logprob: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """r - 1 - log r per token: never negative; its mean over tokens of the old policy is KL(old || new)."""
    log_ratio = torch.where(mask, logprob.detach() - old_logprobs, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(log_ratio) - log_ratio


def _token_mean(name: str, values: Tensor, tokens: Tensor) -> Metric:
    """Mean of `values` [T], which are 0 where they do not count, over `tokens` (0-dim) of them."""
    value = values.detach().float().sum() / tokens.clamp(min=1)
    return Metric(name=name, value=value, reduce="mean", weight=tokens)


def _check_normaliser(normaliser: float) -> None:
    if not (math.isfinite(normaliser) and normaliser > 0):
        raise TrainingError(
            f"loss: the normaliser of this optimizer step is {normaliser}, must be above 0: no token of the "
            "global batch is trained on; skip the step, or check the data"
        )

"""Losses at given log-probs, without a head: what the kernel makes of them, token by token or as a whole."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.algo.losses import TokenLoss
from megatron_rl.algo.metric import Metric
from megatron_rl_kernels.policy_loss import METRICS, PolicyLossConfig, policy_loss


@dataclass(frozen=True)
class Evaluated:
    loss: Tensor  # 0-dim, differentiable in the log-probs
    metrics: dict[str, Metric]


def evaluate(loss: TokenLoss, logprob: Tensor, entropy: Tensor | None = None) -> Evaluated:
    """logprob, entropy [T], as a head would hand them over."""
    inputs = loss.inputs
    result = policy_loss(
        logprob,
        logprob.detach() if inputs.old_logprob is None else inputs.old_logprob,
        inputs.advantage,
        inputs.mask,
        loss.config,
        token_weight=inputs.token_weight,
        entropy=entropy,
        ref_logprob=inputs.ref_logprob,
        correction=inputs.correction,
        nll_weight=inputs.nll_weight,
        cu_seqlens=inputs.cu_seqlens,
    )
    metrics = loss.report(result.loss.detach(), result.metrics)
    return Evaluated(result.loss, {metric.name: metric for metric in metrics})


@dataclass(frozen=True)
class PerToken:
    """All [T]."""

    loss: Tensor
    grad_weight: Tensor
    clipped_high: Tensor
    clipped_low: Tensor


def per_token(
    config: PolicyLossConfig, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor
) -> PerToken:
    """A surrogate of single tokens, each with weight 1."""
    ones = torch.ones(1, dtype=logprobs.dtype)
    rows = []
    for index in range(len(logprobs)):
        one = slice(index, index + 1)
        out = policy_loss(
            logprobs[one].detach(), old_logprobs[one], advantages[one], mask[one], config, token_weight=ones
        )
        clipped = [out.metrics[METRICS.index(name)] > 0 for name in ("clipped_high", "clipped_low")]
        rows.append((out.loss.detach(), out.grad[0], *clipped))
    return PerToken(*(torch.stack(column) for column in zip(*rows, strict=True)))

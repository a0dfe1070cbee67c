"""The meaning of `linear_policy_loss`: all logits at once, plain autograd, works in float64; an unsharded head."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl_kernels.linear_policy_loss.types import LinearPolicyLoss, PolicyInputs
from megatron_rl_kernels.policy_loss import PolicyLossConfig, policy_loss


def linear_policy_loss_reference(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    inputs: PolicyInputs,
    config: PolicyLossConfig,
    *,
    temperature: float | Tensor = 1.0,
    valid_vocab: int | None = None,
) -> LinearPolicyLoss:
    """`policy_loss` of the log-probs and entropies of softmax(hidden @ weight.T / temperature).

    Shapes as in `linear_policy_loss`; rows of `weight` from `valid_vocab` on are padding. Masked tokens take no
    part in any product.
    """
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    mask = inputs.mask
    rows = weight if valid_vocab is None else weight[:valid_vocab]
    logits = hidden[mask].to(dtype) @ rows.to(dtype).T  # [n, V]
    logits = logits / (temperature[mask, None].to(dtype) if isinstance(temperature, Tensor) else temperature)
    logprobs = torch.log_softmax(logits, dim=1)
    zeros = torch.zeros(len(mask), dtype=dtype, device=hidden.device)
    column = target[mask, None]
    is_real = (column >= 0) & (column < logprobs.shape[1])
    chosen = logprobs.gather(1, column.clamp(0, logprobs.shape[1] - 1)).masked_fill(~is_real, float("nan"))
    logprob = zeros.masked_scatter(mask, chosen.squeeze(1))
    # p log p is 0 where p is 0
    weighted = logprobs.exp() * logprobs.masked_fill(logprobs == float("-inf"), 0.0)
    entropy = zeros.masked_scatter(mask, -weighted.sum(dim=1))
    inputs = inputs.map(lambda tensor: tensor if tensor.dtype == torch.bool else tensor.detach().to(dtype))
    result = policy_loss(
        logprob,
        logprob.detach() if inputs.old_logprob is None else inputs.old_logprob,
        inputs.advantage,
        mask,
        config,
        token_weight=inputs.token_weight,
        entropy=entropy,
        ref_logprob=inputs.ref_logprob,
        correction=inputs.correction,
        nll_weight=inputs.nll_weight,
        cu_seqlens=None if inputs.cu_seqlens is None else inputs.cu_seqlens.int(),
        impl="reference",
    )
    return LinearPolicyLoss(result.loss, logprob.detach(), entropy.detach(), result.metrics)

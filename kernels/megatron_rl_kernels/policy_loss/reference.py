"""The meaning of `policy_loss`: each surrogate as published, with stop-gradients, differentiated by autograd.

Works in float64 and materialises everything; waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl_kernels.policy_loss.config import MAX_LOG_RATIO, PolicyLossConfig
from megatron_rl_kernels.policy_loss.terms import METRICS, TokenInputs, TokenTerms


def reference_terms(inputs: TokenInputs, config: PolicyLossConfig, cu_seqlens: Tensor | None) -> TokenTerms:
    """All tokens at once: keep the trained ones, write their loss down, differentiate it.

    cu_seqlens [S + 1] is needed by gspo and gmpo, whose `inputs.sequence_log_ratio` is not read.
    """
    kept = inputs.mask.nonzero().squeeze(1)
    sequence = None if cu_seqlens is None else torch.bucketize(kept, cu_seqlens[1:].long(), right=True)
    dense = inputs.map(lambda tensor: tensor.detach()[kept])
    # the derivative by a shift of a log-prob is the one by the log-prob, and a shift of 0 is finite where that is -inf
    shift = torch.zeros_like(dense.logprob).requires_grad_()
    entropy = None if dense.entropy is None else dense.entropy.clone().requires_grad_()
    with torch.enable_grad():
        loss, metrics = _loss(dense, config, shift, entropy, sequence)
        grad, grad_entropy = torch.autograd.grad(
            loss,
            (shift, shift if entropy is None else entropy),
            allow_unused=True,
            materialize_grads=True,
        )
    metrics["grad_abs"] = grad.abs().sum()
    has_entropy_term = entropy is not None and config.entropy_coefficient != 0
    return TokenTerms(
        loss=loss.detach().double(),
        grad=_scattered(grad, inputs),
        grad_entropy=_scattered(grad_entropy, inputs) if has_entropy_term else None,
        metrics=torch.stack([metrics[name].detach().double() for name in METRICS]),
    )


def _loss(
    dense: TokenInputs,
    config: PolicyLossConfig,
    shift: Tensor,
    entropy: Tensor | None,
    sequence: Tensor | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and metrics of tokens that are all trained; `sequence` [N] numbers the sequence of each."""
    zero = torch.zeros_like(shift)
    logprob = dense.logprob + shift
    log_ratio = dense.logprob - dense.old_logprob
    clamped = _clamped(log_ratio)
    # 1 as a number, exp(logprob - stop(logprob)) for autograd: the clamp acts on values and keeps gradients
    one = shift.exp()
    ratio = clamped.exp()
    if config.is_sequence_level:
        assert sequence is not None
        ratio = _sequence_ratio(dense, config, log_ratio, sequence)
    value, high, low = _surrogate(config, logprob, log_ratio, ratio, one, dense.advantage)
    terms = -dense.advantage * value * (1.0 if dense.correction is None else dense.correction)
    kl = zero
    if dense.ref_logprob is not None:
        kl = _kl(config, dense.ref_logprob - dense.logprob, shift, clamped.exp(), one)
        if config.kl != "none":
            terms = terms + config.kl_coefficient * kl
    # a coefficient of 0 leaves it a metric, which may be anything
    if entropy is not None and config.entropy_coefficient:
        terms = terms - config.entropy_coefficient * entropy
    nll_weight = zero if dense.nll_weight is None else dense.nll_weight
    nll = torch.where(nll_weight != 0, -logprob, 0.0)
    loss = (dense.token_weight * terms + nll_weight * nll).sum()
    sums = {
        "tokens": torch.ones_like(logprob),
        "clipped_high": high,
        "clipped_low": low,
        "kl_k1": -clamped,
        "kl_k3": torch.expm1(clamped) - clamped,
        "ratio": ratio,
        "kl_ref": kl,
        "entropy": zero if entropy is None else entropy,
        "nll": nll,
        "nll_tokens": nll_weight != 0,
    }
    metrics = {name: values.sum() for name, values in sums.items()}
    return loss, metrics | {"ratio_max": torch.cat((ratio, zero.new_zeros(1))).amax()}


def _surrogate(
    config: PolicyLossConfig,
    logprob: Tensor,
    log_ratio: Tensor,
    ratio: Tensor,
    one: Tensor,
    advantage: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """f with its gradient (the loss is -A f), and which tokens are clipped above and below."""
    positive, negative = advantage > 0, advantage < 0
    never = torch.zeros_like(positive)
    lower, upper = 1.0 - config.low, 1.0 + config.high
    if config.surrogate == "reinforce":
        return logprob, never, never
    if config.surrogate == "weighted":
        return ratio * logprob, never, never
    if config.surrogate == "topr":
        return torch.where(negative, ratio.clamp(max=1.0), 1.0) * logprob, negative & (ratio > 1), never
    if config.surrogate == "cispo":
        if not config.cispo_mask:
            positive = negative = advantage != 0
        high, low = positive & (ratio > upper), negative & (ratio < lower)
        weight = ratio.clamp(lower, upper)
        return torch.where((high | low) & config.cispo_mask, 0.0, weight) * logprob, high, low
    if config.surrogate == "sapo":
        tau = torch.full_like(ratio, config.tau_negative).masked_fill(positive, config.tau_positive)
        return 4.0 / tau * torch.sigmoid(tau * (ratio * one - 1.0)), never, never
    if config.surrogate == "gmpo":
        high, low = positive & (log_ratio > config.high), negative & (log_ratio < -config.low)
        return torch.where(high | low, ratio, ratio * one), high, low
    # clip and gspo: a clipped branch is its bound as a number, and its bound times `grad_*` for autograd
    high, low = positive & (ratio > upper), negative & (ratio < lower)
    value = torch.where(high, upper * (config.value_high + config.grad_high * (one - 1.0)), ratio * one)
    value = torch.where(low, lower * (config.value_low + config.grad_low * (one - 1.0)), value)
    if config.dual_clip is not None:
        capped = negative & (ratio > config.dual_clip)
        value, high = torch.where(capped, config.dual_clip, value), high | capped
    return value, high, low


def _sequence_ratio(
    dense: TokenInputs, config: PolicyLossConfig, log_ratio: Tensor, sequence: Tensor
) -> Tensor:
    """Geometric mean of the ratios of each token's sequence, repeated; gmpo clips them before the mean."""
    if config.surrogate == "gmpo":
        capped = torch.where(dense.advantage > 0, log_ratio.clamp(max=config.high), log_ratio)
        log_ratio = torch.where(dense.advantage < 0, log_ratio.clamp(min=-config.low), capped)
    means = torch.empty_like(log_ratio)
    for one in sequence.unique():
        means[sequence == one] = log_ratio[sequence == one].mean()
    return _clamped(means).exp()


def _kl(config: PolicyLossConfig, gap: Tensor, shift: Tensor, ratio: Tensor, one: Tensor) -> Tensor:
    """The estimator's value with its gradient; both are taken at a gap of at most MAX_LOG_RATIO."""
    gap = _clamped(gap) - shift
    k3 = torch.expm1(gap) - gap
    if config.kl == "k1":
        return -gap
    if config.kl == "k2":
        return 0.5 * gap * gap
    if config.kl == "k3_straight_through":
        k2 = 0.5 * gap * gap
        return k3.detach() + k2 - k2.detach()
    if config.kl == "k3_unbiased":
        return ratio * one * k3
    return k3 if config.kl == "k3" else k3.detach()


def _clamped(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _scattered(values: Tensor, inputs: TokenInputs) -> Tensor:
    """Values of the trained tokens, put back among zeros."""
    return torch.zeros_like(inputs.logprob).masked_scatter_(inputs.mask, values)

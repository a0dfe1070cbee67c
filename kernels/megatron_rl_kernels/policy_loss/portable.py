"""`policy_loss` in plain torch: closed forms of loss and gradient with all metrics, in blocks that fit the cache.

Nothing here is differentiated. The formulas are derived in README.md.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_rl_kernels.policy_loss.config import MAX_LOG_RATIO, PolicyLossConfig
from megatron_rl_kernels.policy_loss.terms import (
    METRICS,
    TokenInputs,
    TokenTerms,
    merge_metrics,
    token_blocks,
)

# tokens of one block: a dozen float32 rows of this length stay in a core's second-level cache
BLOCK_TOKENS = 16384

# value f, gradient weight w, clipped high, clipped low: a token's loss is -A f, its gradient -A w
_Surrogate = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


def token_terms(inputs: TokenInputs, config: PolicyLossConfig) -> TokenTerms:
    """What N tokens add to the loss, its gradients and its metrics; N = 0 allowed. Any chunk of a batch may be
    passed: loss and metrics of chunks merge by `+` and `merge_metrics`, gradients by concatenation.

    For gspo and gmpo `inputs.sequence_log_ratio` is required, from whole sequences (`sequence_log_ratio`).
    Arguments are not checked, tensors may require gradients (none is recorded), inputs are not written.
    """
    inputs = inputs.map(lambda tensor: tensor.detach())
    num_tokens = inputs.logprob.numel()
    grad = torch.empty_like(inputs.logprob, memory_format=torch.contiguous_format)
    grad_entropy = (
        torch.empty_like(grad) if config.entropy_coefficient and inputs.entropy is not None else None
    )
    blocks = list(token_blocks(num_tokens, BLOCK_TOKENS))
    sums = grad.new_zeros((len(blocks), 1 + len(METRICS)), dtype=torch.float64)
    for index, (start, stop) in enumerate(blocks):
        rows = _block(inputs.block(start, stop), config, grad[start:stop])
        for column, row in rows.items():
            sums[index, column] = row.amax() if column == 1 + METRICS.index("ratio_max") else row.sum()
        if grad_entropy is not None:
            grad_entropy[start:stop] = torch.where(
                inputs.mask[start:stop], inputs.token_weight[start:stop] * -config.entropy_coefficient, 0.0
            )
    return TokenTerms(
        loss=sums[:, 0].sum(), grad=grad, grad_entropy=grad_entropy, metrics=merge_metrics(sums[:, 1:])
    )


def sequence_log_ratio(inputs: TokenInputs, cu_seqlens: Tensor, config: PolicyLossConfig) -> Tensor:
    """[N] mean over the trained tokens of each token's sequence of logprob - old_logprob; gmpo clips each first.

    cu_seqlens [S + 1], from 0 to N. Sums are float64, in the order of the tokens. 0 for a sequence without
    trained tokens.
    """
    log_ratio = _selected(inputs.mask, inputs.logprob.detach() - inputs.old_logprob)
    if config.surrogate == "gmpo":
        advantage = _selected(inputs.mask, inputs.advantage)
        capped = torch.where(advantage > 0, log_ratio.clamp(max=config.high), log_ratio)
        log_ratio = torch.where(advantage < 0, capped.clamp(min=-config.low), capped)
    offsets = cu_seqlens.long()
    sums, counts = (
        torch.segment_reduce(values.double(), "sum", offsets=offsets, unsafe=True)
        for values in (log_ratio, inputs.mask)
    )
    means = (sums / counts.clamp(min=1)).to(log_ratio.dtype)
    # output_size spares the device a round trip to learn N
    return means.repeat_interleave(offsets.diff(), output_size=log_ratio.numel())


def _block(inputs: TokenInputs, config: PolicyLossConfig, grad: Tensor) -> dict[int, Tensor]:
    """Fill `grad` and return the rows to sum up: 0 is the loss, 1 + i is metric i."""
    mask = inputs.mask
    logprob, advantage, weight = (
        _selected(mask, one) for one in (inputs.logprob, inputs.advantage, inputs.token_weight)
    )
    # select before exp: a masked position may hold inf or NaN, and 0 * NaN is NaN
    log_ratio = _selected(mask, inputs.logprob - inputs.old_logprob).clamp_(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    token_ratio = log_ratio.exp()
    ratio = token_ratio
    if inputs.sequence_log_ratio is not None:
        ratio = _selected(mask, inputs.sequence_log_ratio).clamp_(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp_()
    value, slope, high, low = _SURROGATES[config.surrogate](config, logprob, log_ratio, ratio, advantage)
    pull = weight * -advantage
    if inputs.correction is not None:
        pull *= _selected(mask, inputs.correction)
    loss = pull * value
    torch.mul(pull, slope, out=grad)
    rows = {
        "tokens": mask,
        "kl_k1": -log_ratio,
        "kl_k3": torch.expm1(log_ratio) - log_ratio,
        "ratio": _selected(mask, ratio),
        "ratio_max": _selected(mask, ratio),
    }
    if high is not None:
        rows["clipped_high"] = high
    if low is not None:
        rows["clipped_low"] = low
    if inputs.ref_logprob is not None:
        gap = _selected(mask, inputs.ref_logprob - inputs.logprob).clamp_(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        kl, kl_slope = _KLS[config.kl](gap, token_ratio)
        rows["kl_ref"] = kl
        if config.kl != "none":
            loss += weight * kl * config.kl_coefficient
            grad += weight * kl_slope * config.kl_coefficient
    if inputs.entropy is not None:
        entropy = rows["entropy"] = _selected(mask, inputs.entropy)
        if config.entropy_coefficient:
            loss -= weight * entropy * config.entropy_coefficient
    if inputs.nll_weight is not None:
        nll_weight = _selected(mask, inputs.nll_weight)
        counted = nll_weight != 0
        rows["nll"], rows["nll_tokens"] = -_selected(counted, logprob), counted
        loss -= nll_weight * _selected(counted, logprob)
        grad -= nll_weight
    rows["grad_abs"] = grad.abs()
    return {0: loss} | {1 + METRICS.index(name): row for name, row in rows.items()}


def _log_linear(
    config: PolicyLossConfig, logprob: Tensor, log_ratio: Tensor, ratio: Tensor, advantage: Tensor
) -> _Surrogate:
    """f = weight * logprob with a constant weight: reinforce, weighted, topr, cispo."""
    high = low = None
    if config.surrogate == "reinforce":
        weight = torch.ones_like(ratio)
    elif config.surrogate == "weighted":
        weight = ratio
    elif config.surrogate == "topr":
        high = (advantage < 0) & (ratio > 1)
        weight = torch.where(advantage < 0, ratio.clamp(max=1.0), 1.0)
    else:
        lower, upper = 1.0 - config.low, 1.0 + config.high
        weight = ratio.clamp(lower, upper)
        above, below = (
            (advantage > 0, advantage < 0) if config.cispo_mask else (advantage != 0, advantage != 0)
        )
        high, low = above & (ratio > upper), below & (ratio < lower)
        if config.cispo_mask:
            weight = weight.masked_fill(high | low, 0.0)
    return weight * logprob, weight, high, low


def _clip(
    config: PolicyLossConfig, logprob: Tensor, log_ratio: Tensor, ratio: Tensor, advantage: Tensor
) -> _Surrogate:
    """PPO's clip and its relatives that keep a gradient; of the sequence's ratio for gspo."""
    lower, upper = 1.0 - config.low, 1.0 + config.high
    high, low = (advantage > 0) & (ratio > upper), (advantage < 0) & (ratio < lower)
    value = ratio.masked_fill(high, upper * config.value_high).masked_fill_(low, lower * config.value_low)
    slope = ratio.masked_fill(high, upper * config.grad_high).masked_fill_(low, lower * config.grad_low)
    if config.dual_clip is not None:
        capped = (advantage < 0) & (ratio > config.dual_clip)
        value.masked_fill_(capped, config.dual_clip)
        slope.masked_fill_(capped, 0.0)
        high = high | capped
    return value, slope, high, low


def _sapo(
    config: PolicyLossConfig, logprob: Tensor, log_ratio: Tensor, ratio: Tensor, advantage: Tensor
) -> _Surrogate:
    tau = torch.full_like(ratio, config.tau_negative).masked_fill(advantage > 0, config.tau_positive)
    gate = torch.sigmoid(tau * (ratio - 1.0))
    return 4.0 / tau * gate, 4.0 * gate * (1.0 - gate) * ratio, None, None


def _gmpo(
    config: PolicyLossConfig, logprob: Tensor, log_ratio: Tensor, ratio: Tensor, advantage: Tensor
) -> _Surrogate:
    high, low = (advantage > 0) & (log_ratio > config.high), (advantage < 0) & (log_ratio < -config.low)
    return ratio, ratio.masked_fill(high | low, 0.0), high, low


_SURROGATES: dict[str, Callable[..., _Surrogate]] = {
    "reinforce": _log_linear,
    "weighted": _log_linear,
    "topr": _log_linear,
    "cispo": _log_linear,
    "clip": _clip,
    "gspo": _clip,
    "sapo": _sapo,
    "gmpo": _gmpo,
}


def _k3(gap: Tensor) -> Tensor:
    return torch.expm1(gap) - gap


# (value, d value / d logprob) from gap = ref_logprob - logprob and the token's ratio
_KLS: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "none": lambda gap, ratio: (_k3(gap), gap),
    "k1": lambda gap, ratio: (-gap, torch.ones_like(gap)),
    "k2": lambda gap, ratio: (0.5 * gap * gap, -gap),
    "k3": lambda gap, ratio: (_k3(gap), -torch.expm1(gap)),
    "k3_straight_through": lambda gap, ratio: (_k3(gap), -gap),
    "k3_unbiased": lambda gap, ratio: (ratio * _k3(gap), -ratio * gap),
}


def _selected(mask: Tensor, values: Tensor) -> Tensor:
    """Values where the mask is True, else 0."""
    return torch.where(mask, values, 0.0)

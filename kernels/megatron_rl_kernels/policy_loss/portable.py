"""`policy_loss` in plain torch: closed forms of loss and gradient with all metrics, in blocks that fit the cache.

Nothing here is differentiated; README.md derives the formulas. Two habits of torch on CPUs shape the code. What reads
or writes booleans is not vectorised and costs 4 to 8 float operations: conditions are float 0 or 1 (exact as factors
of finite numbers), and masked values are cleared by a bitwise `and`, which, unlike a product, also clears NaN. A new
tensor costs as much as filling it: rows of a block come from `_Scratch` and are used again by the next block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_rl_kernels.policy_loss.config import MAX_LOG_RATIO, PolicyLossConfig
from megatron_rl_kernels.policy_loss.terms import TokenInputs, TokenTerms, merge_metrics

# tokens of one block: long enough that the cost of a call hides, short enough that rows stay near the core
BLOCK_TOKENS = 32768

_INTEGER = {torch.float32: torch.int32, torch.float64: torch.int64}


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
    scratch = _Scratch(grad, min(BLOCK_TOKENS, num_tokens))
    sums = grad.new_zeros((-(-num_tokens // BLOCK_TOKENS), len(_Rows._fields)))
    grads = grad.split(BLOCK_TOKENS)
    for index, block in enumerate(inputs.split(BLOCK_TOKENS)):
        scratch.start(len(grads[index]))
        weight = _fill_rows(scratch.rows, scratch, block, config, grads[index])
        torch.sum(scratch.all_rows, dim=1, out=sums[index])
        torch.amax(scratch.rows.ratio, dim=0, out=sums[index, _RATIO_MAX])
        if grad_entropy is not None:
            start = index * BLOCK_TOKENS
            torch.mul(weight, -config.entropy_coefficient, out=grad_entropy[start : start + len(weight)])
    parts = sums.double()
    parts[:, _NEGATED] *= -1.0
    return TokenTerms(
        loss=parts[:, 0].sum(), grad=grad, grad_entropy=grad_entropy, metrics=merge_metrics(parts[:, 1:])
    )


def sequence_log_ratio(inputs: TokenInputs, cu_seqlens: Tensor, config: PolicyLossConfig) -> Tensor:
    """[N] mean over the trained tokens of each token's sequence of logprob - old_logprob; gmpo clips each first.

    cu_seqlens [S + 1], from 0 to N. Sums are float64, in the order of the tokens. 0 for a sequence without
    trained tokens.
    """
    log_ratio = torch.where(inputs.mask, inputs.logprob.detach() - inputs.old_logprob, 0.0)
    if config.surrogate == "gmpo":
        capped = torch.where(inputs.advantage > 0, log_ratio.clamp(max=config.high), log_ratio)
        log_ratio = torch.where(inputs.advantage < 0, capped.clamp(min=-config.low), capped)
    offsets = cu_seqlens.long()
    sums, counts = (
        torch.segment_reduce(values.double(), "sum", offsets=offsets, unsafe=True)
        for values in (log_ratio, inputs.mask)
    )
    means = (sums / counts.clamp(min=1)).to(log_ratio.dtype)
    # output_size spares the device a round trip to learn N
    return means.repeat_interleave(offsets.diff(), output_size=log_ratio.numel())


class _Rows(NamedTuple):
    """What is summed up over the tokens of a block: the loss, then METRICS in their order; each [n].

    `ratio_max` stays 0. Where the kind of loss or a missing input leaves a row out, it stays 0 too.
    """

    loss: Tensor
    tokens: Tensor
    clipped_high: Tensor
    clipped_low: Tensor
    kl_k1: Tensor
    kl_k3: Tensor
    ratio: Tensor
    ratio_max: Tensor
    grad_abs: Tensor
    kl_ref: Tensor
    entropy: Tensor
    nll: Tensor
    nll_tokens: Tensor


_RATIO_MAX = _Rows._fields.index("ratio_max")
# rows that hold the log-ratio and the log-prob themselves
_NEGATED = [_Rows._fields.index("kl_k1"), _Rows._fields.index("nll")]


class _Scratch:
    """Memory of one block: its `_Rows`, and rows for whatever else it needs until the next block starts."""

    def __init__(self, like: Tensor, size: int) -> None:
        self._memory = like.new_zeros((len(_Rows._fields), size)), like.new_empty((_NUM_FREE, size))
        self._integer = _INTEGER[like.dtype]
        self._size = -1
        self.start(size)

    def start(self, size: int) -> None:
        """Take back all rows and make them `size` tokens long."""
        self._used = 0
        if size != self._size:
            self._size = size
            self.all_rows, free = (memory[:, :size] for memory in self._memory)
            self.rows = _Rows(*self.all_rows.unbind())
            self._free = free.unbind()
            self._free_integers = free.view(self._integer).unbind()

    def row(self) -> Tensor:
        """[size], holding anything."""
        self._used += 1
        return self._free[self._used - 1]

    def bits(self, ones: Tensor) -> Tensor:
        """Integers as wide as the floats: all ones where `ones` is 1, else 0."""
        self._used += 1
        return self._free_integers[self._used - 1].copy_(ones).neg_()

    def select(self, bits: Tensor, values: Tensor) -> Tensor:
        torch.bitwise_and(values.view(self._integer), bits, out=self._free_integers[self._used])
        return self.row()

    def log_ratio(self, bits: Tensor, minuend: Tensor, subtrahend: Tensor, *, out: Tensor) -> Tensor:
        """Clamped difference. Select before exp: a masked position may hold inf or NaN, and 0 * NaN is NaN."""
        gap = torch.sub(minuend, subtrahend, out=out)
        return _select(bits, gap, out=gap).clamp_(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    def above(self, values: Tensor, bound: float) -> Tensor:
        """1 where values > bound, else 0."""
        return torch.gt(values, bound, out=self.row())

    def below(self, values: Tensor, bound: float) -> Tensor:
        """1 where values < bound, else 0."""
        return torch.lt(values, bound, out=self.row())

    def kept(self, values: Tensor, high: Tensor, low: Tensor) -> Tensor:
        """Values, and exact 0 where high or low is 1."""
        dropped = torch.add(high, low, out=self.row())
        return torch.addcmul(values, values, dropped, value=-1.0, out=dropped)


# the longest path of _fill_rows takes fewer
_NUM_FREE = 24


class _Token(NamedTuple):
    """What a surrogate reads, [n] each: finite and neutral where masked."""

    logprob: Tensor  # read only by those with f = weight * logprob
    log_ratio: Tensor  # clamped
    ratio: Tensor  # of the token, or of its sequence
    advantage: Tensor


def _fill_rows(
    rows: _Rows, scratch: _Scratch, inputs: TokenInputs, config: PolicyLossConfig, grad: Tensor
) -> Tensor:
    """Fill `rows` and `grad` for one block; returns the selected token weights."""
    # torch vectorises conversions from uint8, not from bool
    mask = inputs.mask.view(torch.uint8)
    bits = scratch.bits(mask)
    rows.tokens.copy_(mask)
    weight = scratch.select(bits, inputs.token_weight)
    log_ratio = scratch.log_ratio(bits, inputs.logprob, inputs.old_logprob, out=rows.kl_k1)
    token_ratio = ratio = torch.exp(log_ratio, out=scratch.row())
    if inputs.sequence_log_ratio is not None:
        shared = scratch.select(bits, inputs.sequence_log_ratio)
        ratio = shared.clamp_(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp_()
    _k3(log_ratio, token_ratio, out=rows.kl_k3)
    _select(bits, ratio, out=rows.ratio)
    reads_logprob = config.surrogate in _LOG_LINEAR or inputs.nll_weight is not None
    logprob = scratch.select(bits, inputs.logprob) if reads_logprob else inputs.logprob
    advantage = scratch.select(bits, inputs.advantage)
    token = _Token(logprob, log_ratio, ratio, advantage)
    value, slope = _SURROGATES[config.surrogate](config, token, scratch, rows.clipped_high, rows.clipped_low)
    pull = torch.mul(weight, advantage, out=scratch.row()).neg_()
    if inputs.correction is not None:
        pull *= scratch.select(bits, inputs.correction)
    torch.mul(pull, value, out=rows.loss)
    torch.mul(pull, slope, out=grad)
    if inputs.ref_logprob is not None:
        gap = scratch.log_ratio(bits, inputs.ref_logprob, inputs.logprob, out=scratch.row())
        slope = _KLS[config.kl](gap, token_ratio, scratch, rows.kl_ref)
        if config.kl != "none":
            rows.loss.addcmul_(weight, rows.kl_ref, value=config.kl_coefficient)
            grad.addcmul_(weight, slope, value=config.kl_coefficient)
    if inputs.entropy is not None:
        _select(bits, inputs.entropy, out=rows.entropy)
        if config.entropy_coefficient:
            rows.loss.addcmul_(weight, rows.entropy, value=-config.entropy_coefficient)
    if inputs.nll_weight is not None:
        nll_weight = scratch.select(bits, inputs.nll_weight)
        torch.ne(nll_weight, 0.0, out=rows.nll_tokens)
        _select(scratch.bits(rows.nll_tokens), logprob, out=rows.nll)
        rows.loss.addcmul_(nll_weight, rows.nll, value=-1.0)
        grad -= nll_weight
    torch.abs(grad, out=rows.grad_abs)
    return weight


def _select(bits: Tensor, values: Tensor, *, out: Tensor) -> Tensor:
    """Values where `bits` is all ones, exact 0 where it is 0, whatever was there."""
    torch.bitwise_and(values.view(bits.dtype), bits, out=out.view(bits.dtype))
    return out


def _k3(gap: Tensor, exp_gap: Tensor, *, out: Tensor) -> Tensor:
    """exp(gap) - 1 - gap. exp(x) - 1 = tanh(x / 2) (exp(x) + 1) keeps its digits near 0; expm1 is not vectorised."""
    half = torch.mul(gap, 0.5, out=out).tanh_()
    return half.addcmul_(half, exp_gap).sub_(gap)


# ---- surrogates: (f, gradient weight). They set `high` and `low` to 1 for a clipped token; those that never clip leave
# them 0. What they return is theirs to overwrite or a field of `token`, which nobody writes.


def _reinforce(
    config: PolicyLossConfig, token: _Token, scratch: _Scratch, high: Tensor, low: Tensor
) -> tuple[Tensor, Tensor]:
    return token.logprob, scratch.row().fill_(1.0)


def _weighted(
    config: PolicyLossConfig, token: _Token, scratch: _Scratch, high: Tensor, low: Tensor
) -> tuple[Tensor, Tensor]:
    return torch.mul(token.ratio, token.logprob, out=scratch.row()), token.ratio


def _topr(
    config: PolicyLossConfig, token: _Token, scratch: _Scratch, high: Tensor, low: Tensor
) -> tuple[Tensor, Tensor]:
    negative = scratch.below(token.advantage, 0.0)
    torch.gt(token.ratio, 1.0, out=high).mul_(negative)
    weight = torch.clamp(token.ratio, max=1.0, out=scratch.row()).mul_(negative)
    weight.add_(negative.neg_().add_(1.0))
    return torch.mul(weight, token.logprob, out=scratch.row()), weight


def _cispo(
    config: PolicyLossConfig, token: _Token, scratch: _Scratch, high: Tensor, low: Tensor
) -> tuple[Tensor, Tensor]:
    lower, upper = 1.0 - config.low, 1.0 + config.high
    torch.gt(token.ratio, upper, out=high)
    torch.lt(token.ratio, lower, out=low)
    weight = torch.clamp(token.ratio, lower, upper, out=scratch.row())
    if config.cispo_mask:
        high.mul_(scratch.above(token.advantage, 0.0))
        low.mul_(scratch.below(token.advantage, 0.0))
        weight = scratch.kept(weight, high, low)
    else:
        # counted only where there is something to clip
        some = torch.ne(token.advantage, 0.0, out=scratch.row())
        high.mul_(some)
        low.mul_(some)
    return torch.mul(weight, token.logprob, out=scratch.row()), weight


def _clip(
    config: PolicyLossConfig, token: _Token, scratch: _Scratch, high: Tensor, low: Tensor
) -> tuple[Tensor, Tensor]:
    """PPO's clip and its relatives that keep a gradient; with the sequence's ratio it is gspo."""
    lower, upper = 1.0 - config.low, 1.0 + config.high
    negative = scratch.below(token.advantage, 0.0)
    torch.gt(token.ratio, upper, out=high).mul_(scratch.above(token.advantage, 0.0))
    torch.lt(token.ratio, lower, out=low).mul_(negative)
    # of the summands below at most one is not 0, so sums are exact
    value = scratch.kept(token.ratio, high, low)
    capped = None
    if config.dual_clip is not None:
        capped = scratch.above(token.ratio, config.dual_clip).mul_(negative)
        value.addcmul_(value, capped, value=-1.0)
    slope = scratch.row().copy_(value)
    for clipped, bound, of_value, of_slope in (
        (high, upper, config.value_high, config.grad_high),
        (low, lower, config.value_low, config.grad_low),
    ):
        value.add_(clipped, alpha=bound * of_value)
        if of_slope:
            slope.add_(clipped, alpha=bound * of_slope)
    if capped is not None and config.dual_clip is not None:
        value.add_(capped, alpha=config.dual_clip)
        high.add_(capped)
    return value, slope


def _sapo(
    config: PolicyLossConfig, token: _Token, scratch: _Scratch, high: Tensor, low: Tensor
) -> tuple[Tensor, Tensor]:
    positive = scratch.above(token.advantage, 0.0)
    tau = torch.mul(positive, config.tau_positive, out=scratch.row())
    tau.add_(positive.neg_().add_(1.0), alpha=config.tau_negative)
    shifted = torch.sub(token.ratio, 1.0, out=scratch.row()).mul_(tau)
    gate = torch.sigmoid(shifted, out=scratch.row())
    # 1 - gate would lose its digits where the gate is almost open
    slope = shifted.neg_().sigmoid_().mul_(gate).mul_(token.ratio).mul_(4.0)
    return gate.div_(tau).mul_(4.0), slope


def _gmpo(
    config: PolicyLossConfig, token: _Token, scratch: _Scratch, high: Tensor, low: Tensor
) -> tuple[Tensor, Tensor]:
    torch.gt(token.log_ratio, config.high, out=high).mul_(scratch.above(token.advantage, 0.0))
    torch.lt(token.log_ratio, -config.low, out=low).mul_(scratch.below(token.advantage, 0.0))
    return token.ratio, scratch.kept(token.ratio, high, low)


_LOG_LINEAR = ("reinforce", "weighted", "topr", "cispo")
_SURROGATES: dict[
    str, Callable[[PolicyLossConfig, _Token, _Scratch, Tensor, Tensor], tuple[Tensor, Tensor]]
] = {
    "reinforce": _reinforce,
    "weighted": _weighted,
    "topr": _topr,
    "cispo": _cispo,
    "clip": _clip,
    "gspo": _clip,
    "sapo": _sapo,
    "gmpo": _gmpo,
}


# ---- KL estimators of gap = ref_logprob - logprob and the token's ratio: fill `value`, return d value / d logprob


def _kl_none(gap: Tensor, ratio: Tensor, scratch: _Scratch, value: Tensor) -> Tensor:
    """k3 as a metric."""
    _k3(gap, torch.exp(gap, out=scratch.row()), out=value)
    return gap


def _kl_k1(gap: Tensor, ratio: Tensor, scratch: _Scratch, value: Tensor) -> Tensor:
    torch.neg(gap, out=value)
    return scratch.row().fill_(1.0)


def _kl_k2(gap: Tensor, ratio: Tensor, scratch: _Scratch, value: Tensor) -> Tensor:
    torch.mul(gap, gap, out=value).mul_(0.5)
    return gap.neg_()


def _kl_k3(gap: Tensor, ratio: Tensor, scratch: _Scratch, value: Tensor) -> Tensor:
    _k3(gap, torch.exp(gap, out=scratch.row()), out=value)
    return gap.add_(value).neg_()


def _kl_k3_straight_through(gap: Tensor, ratio: Tensor, scratch: _Scratch, value: Tensor) -> Tensor:
    _k3(gap, torch.exp(gap, out=scratch.row()), out=value)
    return gap.neg_()


def _kl_k3_unbiased(gap: Tensor, ratio: Tensor, scratch: _Scratch, value: Tensor) -> Tensor:
    _k3(gap, torch.exp(gap, out=scratch.row()), out=value).mul_(ratio)
    return gap.mul_(ratio).neg_()


_KLS: dict[str, Callable[[Tensor, Tensor, _Scratch, Tensor], Tensor]] = {
    "none": _kl_none,
    "k1": _kl_k1,
    "k2": _kl_k2,
    "k3": _kl_k3,
    "k3_straight_through": _kl_k3_straight_through,
    "k3_unbiased": _kl_k3_unbiased,
}

"""Triton kernels of `policy_loss`: mean log-ratios of sequences, the loss of a block of tokens, the sum over blocks.

Every token is read once. Loops and trees have a fixed order and nothing is atomic, so bits do not vary between runs.
`tl.minimum` and `tl.maximum` drop NaN; clamps are written with `tl.where`, so that a NaN of a trained token is seen.
"""

from __future__ import annotations

import triton
import triton.language as tl

# rows of the partial sums: the loss, then the metrics in the order of METRICS; a power of two
NUM_ROWS = tl.constexpr(16)


@triton.jit
def sequence_log_ratio_kernel(
    logprob_ptr,  # [N] f32, read only
    old_ptr,  # [N] f32, read only
    advantage_ptr,  # [N] f32, read only
    mask_ptr,  # [N] u8, read only
    cu_seqlens_ptr,  # [S + 1] i32, read only
    out_ptr,  # [N] f32, written: the mean log-ratio of the token's sequence
    lower,
    upper,
    CLIP: tl.constexpr,  # gmpo: clip each log-ratio in the direction its advantage asks for
    BLOCK: tl.constexpr,
):
    """One program per sequence: lanes add up their share of the tokens, then the lanes are added up."""
    sequence = tl.program_id(0).to(tl.int64)
    begin = tl.load(cu_seqlens_ptr + sequence)
    end = tl.load(cu_seqlens_ptr + sequence + 1)
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    count = tl.zeros([BLOCK], tl.float32)
    for start in range(begin, end, BLOCK):
        token = (start + lanes).to(tl.int64)
        inside = token < end
        kept = tl.load(mask_ptr + token, mask=inside, other=0) != 0
        log_ratio = _selected(logprob_ptr, token, inside, kept) - _selected(old_ptr, token, inside, kept)
        if CLIP:
            advantage = _selected(advantage_ptr, token, inside, kept)
            log_ratio = tl.where((advantage > 0) & (log_ratio > upper), upper, log_ratio)
            log_ratio = tl.where((advantage < 0) & (log_ratio < lower), lower, log_ratio)
        total += log_ratio
        count += kept.to(tl.float32)
    trained = tl.sum(count, axis=0)
    mean = tl.sum(total, axis=0) / tl.where(trained > 0, trained, 1.0)
    for start in range(begin, end, BLOCK):
        token = (start + lanes).to(tl.int64)
        tl.store(out_ptr + token, tl.zeros([BLOCK], tl.float32) + mean, mask=token < end)


@triton.jit
def policy_loss_kernel(
    logprob_ptr,  # [N] f32, read only
    old_ptr,  # [N] f32, read only
    advantage_ptr,  # [N] f32, read only
    mask_ptr,  # [N] u8, read only
    weight_ptr,  # [N] f32, read only
    entropy_ptr,  # [N] f32 or None, read only
    ref_ptr,  # [N] f32 or None, read only
    correction_ptr,  # [N] f32 or None, read only
    nll_weight_ptr,  # [N] f32 or None, read only
    sequence_ptr,  # [N] f32 or None, read only: log-ratios of sequences
    grad_ptr,  # [N] f32, written
    grad_entropy_ptr,  # [N] f32 or None, written
    part_ptr,  # [NUM_ROWS, blocks] f32, written
    num_tokens,
    lower,  # bounds as numbers: the ratio's, but the log-ratio's for gmpo
    upper,
    value_at_lower,  # f and gradient weight of a clipped token
    value_at_upper,
    slope_at_lower,
    slope_at_upper,
    dual_clip,
    tau_positive,
    tau_negative,
    kl_coefficient,
    entropy_coefficient,
    SURROGATE: tl.constexpr,
    DUAL_CLIP: tl.constexpr,
    CISPO_MASK: tl.constexpr,
    KL: tl.constexpr,
    MAX_LOG_RATIO: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per block of tokens: gradients, and one partial sum (or maximum) per row."""
    block = tl.program_id(0).to(tl.int64)
    token = block * BLOCK + tl.arange(0, BLOCK)
    inside = token < num_tokens
    kept = tl.load(mask_ptr + token, mask=inside, other=0) != 0
    logprob = _selected(logprob_ptr, token, inside, kept)
    old = _selected(old_ptr, token, inside, kept)
    advantage = _selected(advantage_ptr, token, inside, kept)
    weight = _selected(weight_ptr, token, inside, kept)
    log_ratio = _clamped(logprob - old, MAX_LOG_RATIO)
    token_ratio = tl.exp(log_ratio)
    ratio = token_ratio
    if sequence_ptr is not None:
        shared = _selected(sequence_ptr, token, inside, kept)
        ratio = tl.exp(_clamped(shared, MAX_LOG_RATIO))
    if (SURROGATE == "clip") | (SURROGATE == "gspo"):
        value, slope, is_high, is_low = _clip(
            ratio, advantage, lower, upper, value_at_lower, value_at_upper, slope_at_lower, slope_at_upper
        )
        if DUAL_CLIP:
            value, slope, is_high = _dual_clip(ratio, advantage, value, slope, is_high, dual_clip)
    elif SURROGATE == "sapo":
        value, slope, is_high, is_low = _sapo(ratio, advantage, tau_positive, tau_negative)
    elif SURROGATE == "gmpo":
        value, slope, is_high, is_low = _gmpo(ratio, log_ratio, advantage, lower, upper)
    else:
        slope, is_high, is_low = _constant_weight(ratio, advantage, lower, upper, SURROGATE, CISPO_MASK)
        value = slope * logprob
    pull = -weight * advantage
    if correction_ptr is not None:
        pull *= _selected(correction_ptr, token, inside, kept)
    loss = pull * value
    grad = pull * slope
    if ref_ptr is not None:
        gap = _clamped(_selected(ref_ptr, token, inside, kept) - logprob, MAX_LOG_RATIO)
        kl, kl_slope = _kl(gap, token_ratio, KL)
        _store_sum(part_ptr, 9, block, kl)
        if KL != "none":
            loss += kl_coefficient * weight * kl
            grad += kl_coefficient * weight * kl_slope
    if entropy_ptr is not None:
        entropy = _selected(entropy_ptr, token, inside, kept)
        _store_sum(part_ptr, 10, block, entropy)
        if grad_entropy_ptr is not None:
            loss -= entropy_coefficient * weight * entropy
            tl.store(grad_entropy_ptr + token, -entropy_coefficient * weight, mask=inside)
    if nll_weight_ptr is not None:
        nll_weight = _selected(nll_weight_ptr, token, inside, kept)
        loss += nll_weight * _store_nll(part_ptr, block, nll_weight, logprob)
        grad -= nll_weight
    tl.store(grad_ptr + token, grad, mask=inside)
    _store_sum(part_ptr, 0, block, loss)
    _store_sum(part_ptr, 1, block, kept.to(tl.float32))
    _store_sum(part_ptr, 2, block, is_high.to(tl.float32))
    _store_sum(part_ptr, 3, block, is_low.to(tl.float32))
    _store_ratios(part_ptr, block, log_ratio, token_ratio, tl.where(kept, ratio, 0.0))
    _store_sum(part_ptr, 8, block, tl.abs(grad))


@triton.jit
def merge_parts_kernel(
    part_ptr,  # [NUM_ROWS, blocks] f32, read only
    out_ptr,  # [NUM_ROWS] f32, written
    num_blocks,
    MAX_ROW: tl.constexpr,  # the row that holds maxima
    BLOCK: tl.constexpr,
):
    """One program per row adds up the blocks in a fixed order."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, num_blocks, BLOCK):
        column = start + lanes
        part = tl.load(part_ptr + row * num_blocks + column, mask=column < num_blocks, other=0.0)
        if row == MAX_ROW:
            total = tl.where((part > total) | (part != part), part, total)
        else:
            total += part
    if row == MAX_ROW:
        tl.store(out_ptr + row, _maximum(total, tl.sum(total, axis=0)))
    else:
        tl.store(out_ptr + row, tl.sum(total, axis=0))


@triton.jit
def _selected(ptr, token, inside, kept):
    """0 where masked, whatever is there. Loads depend on `inside` alone, so that they are 16 bytes wide."""
    return tl.where(kept, tl.load(ptr + token, mask=inside, other=0.0).to(tl.float32), 0.0)


@triton.jit
def _store_sum(part_ptr, ROW: tl.constexpr, block, values):
    tl.store(part_ptr + ROW * tl.num_programs(0).to(tl.int64) + block, tl.sum(values, axis=0))


@triton.jit
def _store_nll(part_ptr, block, nll_weight, logprob):
    """-logprob where it has a weight, else 0."""
    nll = tl.where(nll_weight != 0, -logprob, 0.0)
    _store_sum(part_ptr, 11, block, nll)
    _store_sum(part_ptr, 12, block, (nll_weight != 0).to(tl.float32))
    return nll


@triton.jit
def _store_ratios(part_ptr, block, log_ratio, token_ratio, seen):
    """Estimates of the KL to the old policy, and the ratio that the surrogate sees."""
    _store_sum(part_ptr, 4, block, -log_ratio)
    _store_sum(part_ptr, 5, block, _k3(log_ratio, token_ratio))
    _store_sum(part_ptr, 6, block, seen)
    largest = _maximum(seen, tl.sum(seen, axis=0))
    tl.store(part_ptr + 7 * tl.num_programs(0).to(tl.int64) + block, largest)


@triton.jit
def _maximum(values, total):
    """Of finite values, and NaN where `total`, their sum, is one: `tl.max` would drop it."""
    return tl.where(total == total, tl.max(values, axis=0), total)


@triton.jit
def _clamped(log_ratio, MAX_LOG_RATIO: tl.constexpr):
    log_ratio = tl.where(log_ratio > MAX_LOG_RATIO, MAX_LOG_RATIO, log_ratio)
    return tl.where(log_ratio < -MAX_LOG_RATIO, -MAX_LOG_RATIO, log_ratio)


@triton.jit
def _k3(gap, exp_gap):
    """exp(gap) - 1 - gap; a series where the difference would cancel (error below 4e-7 of the result)."""
    series = 0.5 + gap * (1.0 / 6 + gap * (1.0 / 24 + gap * (1.0 / 120 + gap * (1.0 / 720))))
    return tl.where(tl.abs(gap) < 0.25, gap * gap * series, exp_gap - 1.0 - gap)


@triton.jit
def _clip(ratio, advantage, lower, upper, value_at_lower, value_at_upper, slope_at_lower, slope_at_upper):
    """(f, gradient weight, clipped above, clipped below); a ratio equal to its bound is not clipped."""
    is_high = (advantage > 0) & (ratio > upper)
    is_low = (advantage < 0) & (ratio < lower)
    value = tl.where(is_high, value_at_upper, tl.where(is_low, value_at_lower, ratio))
    slope = tl.where(is_high, slope_at_upper, tl.where(is_low, slope_at_lower, ratio))
    return value, slope, is_high, is_low


@triton.jit
def _dual_clip(ratio, advantage, value, slope, is_high, dual_clip):
    is_capped = (advantage < 0) & (ratio > dual_clip)
    return tl.where(is_capped, dual_clip, value), tl.where(is_capped, 0.0, slope), is_high | is_capped


@triton.jit
def _sapo(ratio, advantage, tau_positive, tau_negative):
    tau = tl.where(advantage > 0, tau_positive, tau_negative)
    shifted = tau * (ratio - 1.0)
    # the two sides of the sigmoid without overflow, and without 1 - gate where the gate is almost open
    small = tl.exp(-tl.abs(shifted))
    large_side, small_side = 1.0 / (1.0 + small), small / (1.0 + small)
    gate = tl.where(shifted > 0, large_side, small_side)
    closed = tl.where(shifted > 0, small_side, large_side)
    never = (advantage > 0) & (advantage < 0)
    return 4.0 / tau * gate, 4.0 * gate * closed * ratio, never, never


@triton.jit
def _gmpo(ratio, log_ratio, advantage, lower, upper):
    is_high = (advantage > 0) & (log_ratio > upper)
    is_low = (advantage < 0) & (log_ratio < lower)
    return ratio, tl.where(is_high | is_low, 0.0, ratio), is_high, is_low


@triton.jit
def _constant_weight(ratio, advantage, lower, upper, SURROGATE: tl.constexpr, CISPO_MASK: tl.constexpr):
    """(gradient weight, clipped above, clipped below) of those with f = weight * logprob."""
    is_high = (advantage > 0) & (advantage < 0)
    is_low = is_high
    weight = ratio
    if SURROGATE == "reinforce":
        weight = tl.where(is_high, ratio, 1.0)
    if SURROGATE == "topr":
        is_high = (advantage < 0) & (ratio > 1.0)
        weight = tl.where(advantage < 0, tl.where(is_high, 1.0, ratio), 1.0)
    if SURROGATE == "cispo":
        weight = tl.where(ratio > upper, upper, tl.where(ratio < lower, lower, ratio))
        if CISPO_MASK:
            is_high = (advantage > 0) & (ratio > upper)
            is_low = (advantage < 0) & (ratio < lower)
            weight = tl.where(is_high | is_low, 0.0, weight)
        else:
            is_high = (advantage != 0) & (ratio > upper)
            is_low = (advantage != 0) & (ratio < lower)
    return weight, is_high, is_low


@triton.jit
def _kl(gap, ratio, KL: tl.constexpr):
    """(value, d value / d logprob) of the estimator for gap = ref_logprob - logprob; k3 as a metric for none."""
    value = _k3(gap, tl.exp(gap))
    slope = -gap
    if KL == "k1":
        value = -gap
        slope = tl.where(gap == gap, 1.0, gap)
    if KL == "k2":
        value = 0.5 * gap * gap
    if KL == "k3":
        slope = -(gap + value)
    if KL == "k3_unbiased":
        value *= ratio
        slope *= ratio
    return value, slope

# mypy: disable-error-code="no-untyped-def"
"""Row kernels of `logprob_from_logits`: statistics in one read of a row, the merge of shards, the gradient.

Maxima are of raw logits; sums are of 2^((logit - maximum) * log2(e) / temperature): subtracting first keeps the digits
under an offset that all logits share. A maximum of -inf is replaced by 0 before it is subtracted.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_rl_kernels.triton_tools import LN2, LOG2E

_LOG2E = tl.constexpr(LOG2E)
_LN2 = tl.constexpr(LN2)
# the logarithm of an impossible probability: far below any other, and 0 times it is 0
_LOWEST = tl.constexpr(-1e30)
# rows of the statistics of one shard
_TOP = tl.constexpr(0)
_SUM_EXP = tl.constexpr(1)
_MOMENT = tl.constexpr(2)
_TARGET_LOGIT = tl.constexpr(3)
_OWNED = tl.constexpr(4)


@triton.jit
def row_statistics_kernel(
    logits_ptr,  # [N, V_local] bf16/f16/f32, row stride `row_stride`, read only
    target_ptr,  # [N] i64, read only
    temperature_ptr,  # [N] f32, read only; not read unless ROW_TEMPERATURE
    stats_ptr,  # [5, N] f32, written
    num_tokens,
    num_columns,
    row_stride,
    vocab_start,
    temperature,
    ROW_TEMPERATURE: tl.constexpr,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program folds one row, BLOCK columns at a time; lanes keep sums of their own until the end of the row."""
    row = tl.program_id(0).to(tl.int64)
    if ROW_TEMPERATURE:
        temperature = tl.load(temperature_ptr + row)
    scale = _LOG2E / temperature
    row_ptr = logits_ptr + row * row_stride
    top = float("-inf")
    sum_exp = tl.zeros([BLOCK], tl.float32)
    moment = tl.zeros([BLOCK], tl.float32)
    for start in range(0, num_columns, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        logits = tl.load(row_ptr + columns, mask=columns < num_columns, other=float("-inf")).to(tl.float32)
        new_top = tl.maximum(top, tl.max(logits, axis=0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        # sums so far are empty where the maximum so far is -inf: any finite shift will do
        shift = tl.where(top == float("-inf"), 0.0, tl.maximum((top - base) * scale, _LOWEST))
        decay = tl.exp2(shift)
        shifted = (logits - base) * scale
        exp = tl.exp2(shifted)
        if ENTROPY:
            moment = decay * (moment + shift * sum_exp) + exp * tl.maximum(shifted, _LOWEST)
        sum_exp = decay * sum_exp + exp
        top = new_top
    base = tl.where(top == float("-inf"), 0.0, top)
    local = tl.load(target_ptr + row) - vocab_start
    owned = (local >= 0) & (local < num_columns)
    target_logit = tl.load(row_ptr + local, mask=owned, other=0.0).to(tl.float32)
    stats_ptr += row
    tl.store(stats_ptr + _TOP * num_tokens, top)
    tl.store(stats_ptr + _SUM_EXP * num_tokens, tl.sum(sum_exp, axis=0))
    tl.store(stats_ptr + _MOMENT * num_tokens, tl.sum(moment, axis=0))
    tl.store(stats_ptr + _TARGET_LOGIT * num_tokens, tl.where(owned, (target_logit - base) * scale, 0.0))
    tl.store(stats_ptr + _OWNED * num_tokens, tl.where(owned, 1.0, 0.0))


@triton.jit
def merge_kernel(
    stats_ptr,  # [SHARDS, 5, N] f32, read only
    temperature_ptr,  # [N] f32, read only; not read unless ROW_TEMPERATURE
    values_ptr,  # [4, N] f32, written: log-prob, entropy, maximum, log of the sum
    num_tokens,
    temperature,
    SHARDS: tl.constexpr,
    ROW_TEMPERATURE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK rows: statistics of all shards added up in the order of shards, relative to the common maximum."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    inside = rows < num_tokens
    if ROW_TEMPERATURE:
        temperature = tl.load(temperature_ptr + rows, mask=inside, other=1.0)
    scale = _LOG2E / temperature
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    shard_ptr = stats_ptr + rows
    for _shard in tl.static_range(SHARDS):
        top = tl.maximum(top, tl.load(shard_ptr + _TOP * num_tokens, mask=inside, other=float("-inf")))
        shard_ptr += 5 * num_tokens
    base = tl.where(top == float("-inf"), 0.0, top)
    sum_exp = tl.zeros([BLOCK], tl.float32)
    moment = tl.zeros([BLOCK], tl.float32)
    target_logit = tl.zeros([BLOCK], tl.float32)
    owners = tl.zeros([BLOCK], tl.float32)
    shard_ptr = stats_ptr + rows
    for _shard in tl.static_range(SHARDS):
        shard_top = tl.load(shard_ptr + _TOP * num_tokens, mask=inside, other=float("-inf"))
        shard_sum = tl.load(shard_ptr + _SUM_EXP * num_tokens, mask=inside, other=0.0)
        shard_moment = tl.load(shard_ptr + _MOMENT * num_tokens, mask=inside, other=0.0)
        shard_target = tl.load(shard_ptr + _TARGET_LOGIT * num_tokens, mask=inside, other=0.0)
        owned = tl.load(shard_ptr + _OWNED * num_tokens, mask=inside, other=0.0)
        shift = tl.maximum((shard_top - base) * scale, _LOWEST)
        decay = tl.exp2(shift)
        sum_exp += decay * shard_sum
        moment += decay * (shard_moment + shift * shard_sum)
        target_logit += tl.where(owned > 0, shard_target + shift, 0.0)
        owners += owned
        shard_ptr += 5 * num_tokens
    sum_exp = tl.where(top == float("-inf"), 1.0, sum_exp)
    log2_sum = tl.log2(sum_exp)
    # a target that no shard owns (or two do) must not look like a log-prob
    logprob = tl.where(owners == 1, (target_logit - log2_sum) * _LN2, float("nan"))
    values_ptr += rows
    tl.store(values_ptr, logprob, mask=inside)
    tl.store(values_ptr + num_tokens, (log2_sum - moment / sum_exp) * _LN2, mask=inside)
    tl.store(values_ptr + 2 * num_tokens, top, mask=inside)
    tl.store(values_ptr + 3 * num_tokens, log2_sum * _LN2, mask=inside)


@triton.jit
def row_gradient_kernel(
    logits_ptr,  # [N, V_local] bf16/f16/f32, row stride `row_stride`, read only unless it is `grad_ptr`
    grad_ptr,  # [N, V_local] dtype of the logits, row stride `grad_stride`, written
    target_ptr,  # [N] i64, read only
    temperature_ptr,  # [N] f32, read only; not read unless ROW_TEMPERATURE
    top_ptr,  # [N] f32, read only
    log_sum_ptr,  # [N] f32, read only
    entropy_ptr,  # [N] f32, read only; not read unless PULL
    grad_logprob_ptr,  # [N] f32, read only
    grad_entropy_ptr,  # [N] f32, read only; not read unless PULL
    num_columns,
    width,
    row_stride,
    grad_stride,
    vocab_start,
    temperature,
    ROW_TEMPERATURE: tl.constexpr,
    PULL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program writes BLOCK columns of one row, 0 from `num_columns` to `width`; idle rows are not read."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if ROW_TEMPERATURE:
        temperature = tl.load(temperature_ptr + row)
    top = tl.load(top_ptr + row)
    grad = tl.load(grad_logprob_ptr + row)
    has_grad = grad != 0
    if PULL:
        pull = tl.load(grad_entropy_ptr + row)
        has_grad = has_grad | (pull != 0)
    is_live = has_grad & (top != float("-inf"))
    # columns that have a gradient: none of an idle row, so that it is not read
    reads = columns < tl.where(is_live, num_columns, 0)
    logits = tl.load(logits_ptr + row * row_stride + columns, mask=reads, other=float("-inf")).to(tl.float32)
    base = tl.where(top == float("-inf"), 0.0, top)
    # nats: the entropy is in nats too
    logprobs = (logits - base) / temperature - tl.load(log_sum_ptr + row)
    weight = -grad
    if PULL:
        weight -= pull * (tl.maximum(logprobs, _LOWEST) + tl.load(entropy_ptr + row))
    local = tl.load(target_ptr + row) - vocab_start
    at_target = tl.where(columns == local, grad, 0.0)
    out = (tl.exp2(logprobs * _LOG2E) * weight + at_target) / temperature
    # padded columns too, which may have the number of a target of another shard
    out = tl.where(reads, out, 0.0)
    tl.store(grad_ptr + row * grad_stride + columns, out.to(grad_ptr.dtype.element_ty), mask=columns < width)

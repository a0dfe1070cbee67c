"""Triton kernels of `linear_logprob`: statistics of logits that stay in registers, and the gradient of a block of them.

Operands come through tensor descriptors, which read zeros beyond their bounds. Running numbers are in units of the
product, relative to the running maximum: scaling the difference, not the logit, keeps an offset shared by all logits
from costing digits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_rl_kernels.triton_tools import LN2, LOG2E, dot

_LOG2E = tl.constexpr(LOG2E)
_LN2 = tl.constexpr(LN2)
# finite, so that 0 * this is 0; exp2 of it is 0
_LOWEST = tl.constexpr(-1.0e30)


@triton.jit
def forward_statistics(
    hidden,          # descriptor [N, H] bf16/f16/f32, blocks [BM, BK], read only
    weight,          # descriptor [num_rows, H] same dtype, blocks [BN, BK], read only
    target_ptr,      # [N] int64 global ids, read only
    inv_ptr,         # [N] or [1] f32, 1 / temperature, read only
    inv_stride,      # 1 or 0
    out_ptr,         # [num_splits, 5, N] f32 statistics in nats, see stats.py, written
    num_tokens,      # N
    num_rows,        # real rows of this shard
    hidden_size,     # H
    vocab_start,     # global id of row 0
    split_rows,      # rows per split, a multiple of BN
    num_splits,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    ENTROPY: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """One program: BM tokens against one run of `split_rows` rows of the head."""
    token_block, split = _grouped(tl.program_id(0), tl.cdiv(num_tokens, BM), num_splits, GROUP)
    rows = token_block * BM + tl.arange(0, BM)
    exists = rows < num_tokens
    start = split * split_rows
    end = tl.minimum(start + split_rows, num_rows)
    local = _local_target(target_ptr, rows, exists, vocab_start, num_rows)
    inv = tl.load(inv_ptr + rows * inv_stride, mask=exists, other=1.0)
    scale = inv * _LOG2E
    top = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    moment = tl.zeros((BM,), tl.float32)
    at_target = tl.zeros((BM,), tl.float32)
    for first in range(start, end, BN):
        z = _product(hidden, weight, token_block * BM, first, hidden_size, BM, BN, BK, UPCAST)
        if PARTS == 1:
            cols = first + tl.arange(0, BN)
            top, total, moment, at_target = _fold(
                z, cols, end, local, scale, top, total, moment, at_target, ENTROPY
            )
        else:
            HALF: tl.constexpr = BN // 2
            left, right = tl.split(tl.permute(tl.reshape(z, (BM, 2, HALF)), (0, 2, 1)))
            cols = first + tl.arange(0, HALF)
            top, total, moment, at_target = _fold(
                left, cols, end, local, scale, top, total, moment, at_target, ENTROPY
            )
            top, total, moment, at_target = _fold(
                right, cols + HALF, end, local, scale, top, total, moment, at_target, ENTROPY
            )
    owns = (local >= start) & (local < end)
    base = tl.where(top == float("-inf"), 0.0, top)
    out = out_ptr + split.to(tl.int64) * 5 * num_tokens + rows
    tl.store(out, top * inv, mask=exists)
    tl.store(out + num_tokens, total, mask=exists)
    tl.store(out + 2 * num_tokens, moment * _LN2, mask=exists)
    tl.store(out + 3 * num_tokens, tl.where(owns, (at_target - base) * inv, 0.0), mask=exists)
    tl.store(out + 4 * num_tokens, owns.to(tl.float32), mask=exists)


@triton.jit
def merge_splits(
    parts_ptr,   # [num_splits, 5, N] f32 statistics of disjoint splits, read only
    out_ptr,     # [5, N] f32 statistics of their union, written
    num_splits,
    num_tokens,  # N
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Add splits up in ascending order, so that the bits do not vary; the arithmetic of stats.merge_parts."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = rows < num_tokens
    n = num_tokens
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    part = parts_ptr + rows
    for _ in range(num_splits):
        top = tl.maximum(top, tl.load(part, mask=exists, other=float("-inf")))
        part += 5 * n
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros((BLOCK,), tl.float32)
    moment = tl.zeros((BLOCK,), tl.float32)
    at_target = tl.zeros((BLOCK,), tl.float32)
    owners = tl.zeros((BLOCK,), tl.float32)
    part = parts_ptr + rows
    for _ in range(num_splits):
        shift = tl.load(part, mask=exists, other=float("-inf")) - base
        scale = tl.exp2(shift * _LOG2E)
        shift = tl.maximum(shift, _LOWEST)
        part_total = tl.load(part + n, mask=exists, other=0.0)
        part_moment = tl.load(part + 2 * n, mask=exists, other=0.0)
        part_target = tl.load(part + 3 * n, mask=exists, other=0.0)
        owns = tl.load(part + 4 * n, mask=exists, other=0.0)
        total += scale * part_total
        moment += scale * (part_moment + shift * part_total)
        at_target += tl.where(owns > 0.0, part_target + shift, 0.0)
        owners += owns
        part += 5 * n
    out = out_ptr + rows
    tl.store(out, top, mask=exists)
    tl.store(out + n, total, mask=exists)
    tl.store(out + 2 * n, moment, mask=exists)
    tl.store(out + 3 * n, at_target, mask=exists)
    tl.store(out + 4 * n, owners, mask=exists)


@triton.jit
def gradient_of_logits(
    hidden,        # descriptor [n, H] bf16/f16/f32, blocks [BM, BK], read only
    weight,        # descriptor [b, H] same dtype, blocks [BN, BK], read only
    target_ptr,    # [n] int64 global ids, read only
    base_ptr,      # [n] f32 nats, read only
    inv_ptr,       # [n] or [1] f32, 1 / temperature, read only
    inv_stride,    # 1 or 0
    grad_ptr,      # [n] f32, read only; this and the next as in autograd.TokenRows
    slope_ptr,     # [n] f32, read only
    pull_ptr,      # [n] f32, read only; unused without ENTROPY
    offset_ptr,    # [n] f32 nats, read only; unused without ENTROPY
    out_ptr,       # [n, b] dtype of hidden, row stride out_stride, written
    out_stride,
    num_tokens,    # n
    num_columns,   # b
    hidden_size,   # H
    first_column,  # global id of column 0
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    ENTROPY: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """One program: a BM x BN block of dz = grad onehot - e (slope + pull (d + offset)), d = z - base, e = exp(d)."""
    column_blocks = tl.cdiv(num_columns, BN)
    token_block, column_block = _grouped(tl.program_id(0), tl.cdiv(num_tokens, BM), column_blocks, GROUP)
    rows = token_block * BM + tl.arange(0, BM)
    exists = rows < num_tokens
    first = column_block * BN
    z = _product(hidden, weight, token_block * BM, first, hidden_size, BM, BN, BK, UPCAST)
    local = _local_target(target_ptr, rows, exists, first_column, num_columns)
    inv = tl.load(inv_ptr + rows * inv_stride, mask=exists, other=1.0)
    base = tl.load(base_ptr + rows, mask=exists, other=0.0)
    grad = tl.load(grad_ptr + rows, mask=exists, other=0.0)
    slope = tl.load(slope_ptr + rows, mask=exists, other=0.0)
    pull = slope
    if ENTROPY:
        pull = tl.load(pull_ptr + rows, mask=exists, other=0.0)
        # the part of pull (d + offset) that is the same in all columns
        slope += pull * tl.load(offset_ptr + rows, mask=exists, other=0.0)
    out = out_ptr + rows.to(tl.int64)[:, None] * out_stride
    if PARTS == 1:
        cols = first + tl.arange(0, BN)
        dz = _differentiate(z, cols, local, inv, base, grad, slope, pull, ENTROPY)
        inside = exists[:, None] & (cols < num_columns)[None, :]
        tl.store(out + cols[None, :], dz.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        HALF: tl.constexpr = BN // 2
        left, right = tl.split(tl.permute(tl.reshape(z, (BM, 2, HALF)), (0, 2, 1)))
        cols = first + tl.arange(0, HALF)
        dz = _differentiate(left, cols, local, inv, base, grad, slope, pull, ENTROPY)
        inside = exists[:, None] & (cols < num_columns)[None, :]
        tl.store(out + cols[None, :], dz.to(out_ptr.dtype.element_ty), mask=inside)
        cols += HALF
        dz = _differentiate(right, cols, local, inv, base, grad, slope, pull, ENTROPY)
        inside = exists[:, None] & (cols < num_columns)[None, :]
        tl.store(out + cols[None, :], dz.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _grouped(program, row_blocks, column_blocks, GROUP: tl.constexpr):
    """(row block, column block) of a program: GROUP row blocks go through all columns before the next group starts."""
    per_group = GROUP * column_blocks
    first = program // per_group * GROUP
    size = tl.minimum(row_blocks - first, GROUP)
    inner = program % per_group
    return first + inner % size, inner // size


@triton.jit
def _local_target(target_ptr, rows, exists, first, count):
    """[BM] int32: the target's column among `count` from the global id `first` on, else -1."""
    local = tl.load(target_ptr + rows, mask=exists, other=-1) - first
    # decided in int64: an id of 2^32 + 3 is not column 3
    return tl.where((local >= 0) & (local < count), local, -1).to(tl.int32)


@triton.jit
def _product(
    hidden, weight, row, column, hidden_size,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """[BM, BN] float32: rows of `hidden` from `row` on times rows of `weight` from `column` on."""
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, hidden_size, BK):
        acc = dot(hidden.load([row, k]), weight.load([column, k]).T, acc, UPCAST)
    return acc


@triton.jit
def _fold(z, cols, end, local, scale, top, total, moment, at_target, ENTROPY: tl.constexpr):
    """Add the columns `cols` below `end` to the running statistics, which are relative to `top`."""
    inside = (cols < end)[None, :]
    # a column at or beyond `end` never matches: local is a row of this shard, and only its last tile reaches further
    at_target += tl.sum(tl.where(cols[None, :] == local[:, None], z, 0.0), 1)
    z = tl.where(inside, z, float("-inf"))
    new_top = tl.maximum(top, tl.max(z, 1))
    # a row that has seen -inf alone: -inf minus -inf would be NaN
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    shifted = (z - base[:, None]) * scale[:, None]
    exp = tl.exp2(shifted)
    shift = (top - base) * scale
    factor = tl.exp2(shift)
    if ENTROPY:
        here = tl.sum(exp * tl.maximum(shifted, _LOWEST), 1)
        moment = factor * (moment + tl.maximum(shift, _LOWEST) * total) + here
    total = factor * total + tl.sum(exp, 1)
    return new_top, total, moment, at_target


@triton.jit
def _differentiate(z, cols, local, inv, base, grad, slope, pull, ENTROPY: tl.constexpr):
    """[BM, columns] dz of products z; slope holds what is the same in all columns."""
    # one fused multiply-add: without a temperature the difference is exact
    shifted = z * inv[:, None] - base[:, None]
    exp = tl.exp2(shifted * _LOG2E)
    weight = slope[:, None]
    if ENTROPY:
        weight += pull[:, None] * tl.maximum(shifted, _LOWEST)
    return tl.where(cols[None, :] == local[:, None], grad[:, None], 0.0) - exp * weight

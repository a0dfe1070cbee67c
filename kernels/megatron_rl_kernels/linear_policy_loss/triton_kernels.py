"""Triton kernels of `linear_policy_loss`: logits to exp with statistics, merge of these, exp to gradient in place.

The exp is kept relative to the largest logit of its row in its tile of columns: bfloat16 has the range for that, and
a softmax of it is off by one rounding, where a softmax of rounded logits is off by e to the rounding error.
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
def exp_of_logits(
    hidden,        # descriptor [n, H] bf16/f32, blocks [BM, BK], read only
    weight,        # descriptor [num_rows, H] same dtype, blocks [BN, BK], read only
    column_ptr,    # [n] int64 row of weight that is the target, anything else if another shard's, read only
    inv_ptr,       # [n] f32, 1 / temperature, read only
    exp,           # descriptor [n, tiles * BN] bf16/f32, blocks [BM, BN], written; 0 beyond num_rows
    parts_ptr,     # [tiles, 4, n] f32, written: per row and tile, in nats, the largest logit m (-inf: none), sum
                   # exp(z - m), sum exp(z - m) (z - m), target logit - m (0 if elsewhere)
    num_tokens,    # n
    num_rows,      # real rows of this shard
    hidden_size,   # H
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    KEEP: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """One program: BM tokens against BN rows of the head. KEEP: write the exp, too."""
    token_block, tile = _grouped(tl.program_id(0), tl.cdiv(num_tokens, BM), tl.cdiv(num_rows, BN), GROUP)
    z = tl.zeros((BM, BN), tl.float32)
    for k in range(0, hidden_size, BK):
        z = dot(hidden.load([token_block * BM, k]), weight.load([tile * BN, k]).T, z, UPCAST)
    rows = token_block * BM + tl.arange(0, BM)
    exists = rows < num_tokens
    cols = tile * BN + tl.arange(0, BN)
    z = tl.where((cols < num_rows)[None, :], z, float("-inf"))
    inv = tl.load(inv_ptr + rows, mask=exists, other=1.0)
    top = tl.max(z, 1)
    # a row of -inf alone: -inf minus -inf would be NaN
    base = tl.where(top == float("-inf"), 0.0, top)
    z = (z - base[:, None]) * (inv * _LOG2E)[:, None]
    # decided in int64: an id of 2^32 + 3 is not column 3; a padded column is no target
    column = tl.load(column_ptr + rows, mask=exists, other=-1)
    owns = (column >= tile * BN) & (column < tl.minimum(tile * BN + BN, num_rows))
    here = tl.where(owns, column - tile * BN, -1).to(tl.int32)
    at_target = tl.sum(tl.where(tl.arange(0, BN)[None, :] == here[:, None], z, 0.0), 1)
    e = tl.exp2(z)
    out = parts_ptr + tile.to(tl.int64) * 4 * num_tokens + rows
    tl.store(out, top * inv, mask=exists)
    tl.store(out + num_tokens, tl.sum(e, 1), mask=exists)
    tl.store(out + 2 * num_tokens, tl.sum(e * tl.maximum(z, _LOWEST), 1) * _LN2, mask=exists)
    tl.store(out + 3 * num_tokens, at_target * _LN2, mask=exists)
    if KEEP:
        exp.store([token_block * BM, tile * BN], e.to(exp.dtype))


@triton.jit
def merge_tiles(
    parts_ptr,   # [tiles, 4, n] f32 as `exp_of_logits` writes them, read only
    column_ptr,  # [n] int64, read only
    out_ptr,     # [5, n] f32 statistics of this shard, see linear_logprob/stats.py, written
    num_tiles,
    num_tokens,  # n
    num_rows,
    BN: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """One program: ROWS tokens, tiles in ascending order, TILES at once, so that the bits do not vary."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = (rows < num_tokens)[None, :]
    n = num_tokens
    tile = tl.arange(0, TILES)
    at = parts_ptr + tile.to(tl.int64)[:, None] * 4 * n + rows[None, :]
    step = 4 * n.to(tl.int64) * TILES
    tops = tl.full((TILES, ROWS), float("-inf"), tl.float32)
    part = at
    for first in range(0, num_tiles, TILES):
        inside = exists & (first + tile < num_tiles)[:, None]
        tops = tl.maximum(tops, tl.load(part, mask=inside, other=float("-inf")))
        part += step
    top = tl.max(tops, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    column = tl.load(column_ptr + rows, mask=rows < num_tokens, other=-1)
    owns = (column >= 0) & (column < num_rows)
    home = tl.where(owns, column // BN, -1).to(tl.int32)
    total = tl.zeros((TILES, ROWS), tl.float32)
    moment = tl.zeros((TILES, ROWS), tl.float32)
    at_target = tl.zeros((TILES, ROWS), tl.float32)
    part = at
    for first in range(0, num_tiles, TILES):
        inside = exists & (first + tile < num_tiles)[:, None]
        shift = tl.load(part, mask=inside, other=float("-inf")) - base[None, :]
        scale = tl.exp2(shift * _LOG2E)
        shift = tl.maximum(shift, _LOWEST)
        part_total = tl.load(part + n, mask=inside, other=0.0)
        part_moment = tl.load(part + 2 * n, mask=inside, other=0.0)
        part_target = tl.load(part + 3 * n, mask=inside, other=0.0)
        total += scale * part_total
        moment += scale * (part_moment + shift * part_total)
        at_target += tl.where((first + tile)[:, None] == home[None, :], part_target + shift, 0.0)
        part += step
    out = out_ptr + rows
    exists = rows < num_tokens
    tl.store(out, top, mask=exists)
    tl.store(out + n, tl.sum(total, 0), mask=exists)
    tl.store(out + 2 * n, tl.sum(moment, 0), mask=exists)
    tl.store(out + 3 * n, tl.sum(at_target, 0), mask=exists)
    tl.store(out + 4 * n, owns.to(tl.float32), mask=exists)


@triton.jit
def exp_to_gradient(
    exp_ptr,      # [n, tiles * BN] bf16/f32, row stride exp_stride, the exp on entry and dz on return
    exp_stride,
    parts_ptr,    # [tiles, 4, n] f32 as `exp_of_logits` writes them, read only
    column_ptr,   # [n] int64, read only
    top_ptr,      # [n] f32, base of log_sum over all shards, read only
    log_sum_ptr,  # [n] f32, read only
    logprob_ptr,  # [n] f32 of the target, read only
    grad_ptr,     # [n] f32, d loss / d log-prob / temperature, read only
    pull_ptr,     # [n] f32, d loss / d entropy / temperature, read only; unused without ENTROPY
    entropy_ptr,  # [n] f32, read only; unused without ENTROPY
    num_tokens,   # n
    num_rows,
    BN: tl.constexpr,
    ROWS: tl.constexpr,
    ENTROPY: tl.constexpr,
):  # fmt: skip
    """One program: ROWS x BN of dz = grad (onehot - p) - pull p (l + entropy), l = log p; all in nats."""
    tile = tl.program_id(0)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    exists = rows < num_tokens
    cols = tile * BN + tl.arange(0, BN)
    at = exp_ptr + rows.to(tl.int64)[:, None] * exp_stride + cols[None, :]
    e = tl.load(at, mask=exists[:, None], other=0.0).to(tl.float32)
    tile_top = tl.load(
        parts_ptr + tile.to(tl.int64) * 4 * num_tokens + rows, mask=exists, other=float("-inf")
    )
    top = tl.load(top_ptr + rows, mask=exists, other=0.0)
    shift = tile_top - top - tl.load(log_sum_ptr + rows, mask=exists, other=0.0)
    grad = tl.load(grad_ptr + rows, mask=exists, other=0.0)
    column = tl.load(column_ptr + rows, mask=exists, other=-1)
    owns = (column >= tile * BN) & (column < tl.minimum(tile * BN + BN, num_rows))
    here = tl.where(owns, column - tile * BN, -1).to(tl.int32)
    is_target = tl.arange(0, BN)[None, :] == here[:, None]
    # the target's own number was never rounded
    logprob = tl.load(logprob_ptr + rows, mask=exists, other=0.0)
    prob = tl.where(is_target, tl.exp2(logprob * _LOG2E)[:, None], e * tl.exp2(shift * _LOG2E)[:, None])
    dz = grad[:, None] * (tl.where(is_target, 1.0, 0.0) - prob)
    if ENTROPY:
        pull = tl.load(pull_ptr + rows, mask=exists, other=0.0)
        entropy = tl.load(entropy_ptr + rows, mask=exists, other=0.0)
        of_exp = tl.log2(tl.where(e > 0.0, e, 1.0)) * _LN2 + shift[:, None]
        logprobs = tl.where(is_target, logprob[:, None], of_exp)
        # 0 * -inf where nothing is left of a probability
        dz -= pull[:, None] * tl.where(prob > 0.0, prob * (logprobs + entropy[:, None]), 0.0)
    tl.store(at, dz.to(exp_ptr.dtype.element_ty), mask=exists[:, None])


@triton.jit
def _grouped(program, row_blocks, column_blocks, GROUP: tl.constexpr):
    """(row block, column block) of a program: GROUP row blocks go through all columns before the next group starts."""
    per_group = GROUP * column_blocks
    first = program // per_group * GROUP
    size = tl.minimum(row_blocks - first, GROUP)
    inner = program % per_group
    return first + inner % size, inner // size

# mypy: disable-error-code="no-untyped-def"
"""The kernel of `rope`: all heads of a token share one read of its angles; backward is the same kernel, turned back."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rope_kernel(
    x_ptr,  # [T, heads, D] bf16/f16/f32, strides `token_stride`, `head_stride`, 1, read only
    cos_ptr,  # [T, R / 2] dtype of x, contiguous, read only
    sin_ptr,  # [T, R / 2] dtype of x, contiguous, read only
    out_ptr,  # [T, heads, D] dtype of x, contiguous, written
    heads,
    head_dim,  # D
    half,  # R / 2
    token_stride,
    head_stride,
    INTERLEAVED: tl.constexpr,
    BACK: tl.constexpr,
    PASSES: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """HEADS heads of one token. PASSES: the features from R on, BLOCK of them, are copied. BACK: the other way."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, PAIRS)
    cos = tl.load(cos_ptr + token * half + pair, mask=pair < half, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + token * half + pair, mask=pair < half, other=0.0).to(tl.float32)[None, :]
    if BACK:
        sin = -sin
    x_ptr += token * token_stride + head.to(tl.int64) * head_stride
    out_ptr += token * heads * head_dim + head * head_dim
    dtype = out_ptr.dtype.element_ty
    if INTERLEAVED:
        # whole pairs are loaded and stored: every second feature would take one access each
        feature = tl.arange(0, 2 * PAIRS)[None, :]
        inside = (head < heads) & (feature < 2 * half)
        both = tl.load(x_ptr + feature, mask=inside, other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(both, [HEADS, PAIRS, 2]))
        turned = tl.join(first * cos - second * sin, second * cos + first * sin)
        tl.store(out_ptr + feature, tl.reshape(turned, [HEADS, 2 * PAIRS]).to(dtype), mask=inside)
    else:
        feature = pair[None, :]
        inside = (head < heads) & (feature < half)
        first = tl.load(x_ptr + feature, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(x_ptr + half + feature, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_ptr + feature, (first * cos - second * sin).to(dtype), mask=inside)
        tl.store(out_ptr + half + feature, (second * cos + first * sin).to(dtype), mask=inside)
    if PASSES:
        rest = 2 * half + tl.arange(0, BLOCK)[None, :]
        inside = (head < heads) & (rest < head_dim)
        tl.store(out_ptr + rest, tl.load(x_ptr + rest, mask=inside, other=0.0), mask=inside)

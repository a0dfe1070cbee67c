# mypy: disable-error-code="no-untyped-def"
"""Kernels of `swiglu`: one pass each way. silu(gate) is rounded before the product, as eager code rounds it."""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_rl_kernels.triton_tools import LOG2E

_LOG2E = tl.constexpr(LOG2E)


@triton.jit
def swiglu_kernel(
    x_ptr,  # [M, 2F] bf16/f16/f32, row stride `x_stride`, read only: [gate | up]
    out_ptr,  # [M, F] dtype of x, contiguous, written
    width,  # F
    x_stride,
    BLOCK: tl.constexpr,
):
    """BLOCK columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    x_ptr += row * x_stride
    gate = tl.load(x_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + width + columns, mask=inside, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    silu = (gate / (1.0 + tl.exp2(-gate * _LOG2E))).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * width + columns, (silu * up).to(dtype), mask=inside)


@triton.jit
def swiglu_gradient_kernel(
    grad_ptr,  # [M, F] dtype of x, row stride `grad_stride`, read only
    x_ptr,  # [M, 2F] bf16/f16/f32, row stride `x_stride`, read only: [gate | up]
    grad_x_ptr,  # [M, 2F] dtype of x, contiguous, written
    width,  # F
    grad_stride,
    x_stride,
    BLOCK: tl.constexpr,
):
    """BLOCK columns of one row: with s = sigmoid(gate), dgate = g up s (1 + gate (1 - s)), dup = g silu(gate)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    x_ptr += row * x_stride
    gate = tl.load(x_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + width + columns, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + row * grad_stride + columns, mask=inside, other=0.0).to(tl.float32)
    dtype = grad_x_ptr.dtype.element_ty
    sigmoid = 1.0 / (1.0 + tl.exp2(-gate * _LOG2E))
    grad_gate = grad * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    grad_up = grad * (gate * sigmoid).to(dtype).to(tl.float32)
    grad_x_ptr += row * 2 * width
    tl.store(grad_x_ptr + columns, grad_gate.to(dtype), mask=inside)
    tl.store(grad_x_ptr + width + columns, grad_up.to(dtype), mask=inside)

# mypy: disable-error-code="no-untyped-def"
"""Kernels of `rmsnorm`: rows in one pass, and the weight's gradient in two stages whose order is fixed."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rmsnorm_kernel(
    x_ptr,  # [M, H] bf16/f16/f32, row stride `x_stride`, read only
    residual_ptr,  # [M, H] dtype of x, row stride `residual_stride`, read only; not read unless RESIDUAL
    weight_ptr,  # [H] dtype of x, read only
    out_ptr,  # [M, H] dtype of x, contiguous, written
    summed_ptr,  # [M, H] dtype of x, contiguous, written if RESIDUAL
    rstd_ptr,  # [M] f32, written
    num_rows,
    hidden,
    x_stride,
    residual_stride,
    eps,
    RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """ROWS rows of x, or of x + residual, each normalised in float32, rounded, then times the weight."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = (rows < num_rows)[:, None] & (columns < hidden)[None, :]
    at = rows[:, None] * hidden + columns[None, :]
    x = tl.load(x_ptr + rows[:, None] * x_stride + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    if RESIDUAL:
        residual_at = rows[:, None] * residual_stride + columns[None, :]
        x += tl.load(residual_ptr + residual_at, mask=inside, other=0.0).to(tl.float32)
        summed = x.to(dtype)
        tl.store(summed_ptr + at, summed, mask=inside)
        x = summed.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, axis=1) / hidden + eps)
    weight = tl.load(weight_ptr + columns, mask=columns < hidden, other=0.0).to(tl.float32)
    normed = (x * rstd[:, None]).to(dtype).to(tl.float32)
    tl.store(out_ptr + at, (normed * weight[None, :]).to(dtype), mask=inside)
    tl.store(rstd_ptr + rows, rstd, mask=rows < num_rows)


@triton.jit
def rmsnorm_gradient_kernel(
    grad_ptr,  # [M, H] dtype of x, row stride `grad_stride`, read only
    grad_summed_ptr,  # [M, H] dtype of x, row stride `grad_summed_stride`, read only; not read unless RESIDUAL
    x_ptr,  # [M, H] bf16/f16/f32, row stride `x_stride`, read only
    weight_ptr,  # [H] dtype of x, read only
    rstd_ptr,  # [M] f32, read only
    grad_x_ptr,  # [M, H] dtype of x, contiguous, written
    partial_ptr,  # [programs, H] f32, written: gradient of the weight from the rows of each program
    num_rows,
    hidden,
    grad_stride,
    grad_summed_stride,
    x_stride,
    tiles_per_program,
    RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`tiles_per_program` tiles of ROWS rows: with u = x rstd, dx = rstd (g w - u mean(g w u)), dw = sum g u."""
    program = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + columns, mask=columns < hidden, other=0.0).to(tl.float32)
    grad_weight = tl.zeros([BLOCK], tl.float32)
    dtype = grad_x_ptr.dtype.element_ty
    for tile in range(0, tiles_per_program):
        rows = (program * tiles_per_program + tile) * ROWS + tl.arange(0, ROWS)
        inside = (rows < num_rows)[:, None] & (columns < hidden)[None, :]
        x_at = rows[:, None] * x_stride + columns[None, :]
        x = tl.load(x_ptr + x_at, mask=inside, other=0.0).to(tl.float32)
        grad_at = rows[:, None] * grad_stride + columns[None, :]
        grad = tl.load(grad_ptr + grad_at, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + rows, mask=rows < num_rows, other=0.0)
        unit = x * rstd[:, None]
        # what forward multiplied: the normalised value after its rounding
        grad_weight += tl.sum(grad * unit.to(dtype).to(tl.float32), axis=0)
        grad *= weight[None, :]
        mean = tl.sum(grad * unit, axis=1) / hidden
        grad = (grad - unit * mean[:, None]) * rstd[:, None]
        if RESIDUAL:
            summed_at = rows[:, None] * grad_summed_stride + columns[None, :]
            grad += tl.load(grad_summed_ptr + summed_at, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_x_ptr + rows[:, None] * hidden + columns[None, :], grad.to(dtype), mask=inside)
    tl.store(partial_ptr + program * hidden + columns, grad_weight, mask=columns < hidden)


@triton.jit
def sum_partials_kernel(
    partial_ptr,  # [P, H] f32, contiguous, read only
    out_ptr,  # [H] any float, written
    num_partials,
    hidden,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK columns: all partials added up, ROWS at a time, in an order that depends on P alone."""
    columns = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, num_partials, ROWS):
        rows = start + tl.arange(0, ROWS).to(tl.int64)
        inside = (rows < num_partials)[:, None] & (columns < hidden)[None, :]
        total += tl.load(partial_ptr + rows[:, None] * hidden + columns[None, :], mask=inside, other=0.0)
    tl.store(out_ptr + columns, tl.sum(total, axis=0).to(out_ptr.dtype.element_ty), mask=columns < hidden)

"""Launches and autograd function of the `rmsnorm` kernels."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_rl_kernels.rmsnorm.triton_kernels import (
    rmsnorm_gradient_kernel,
    rmsnorm_kernel,
    sum_partials_kernel,
)

# elements of a tile: short rows (heads) share one, longer ones have it to themselves
_TILE = 4096
# beyond, the sums of the backward leave the registers
_MAX_HIDDEN = 16384
# programs that sum the weight's gradient: four per multiprocessor of the largest device, the same number on every
# device, so that the bits are the same too
_PROGRAMS = 512


class TritonRmsnorm(torch.autograd.Function):
    """(x, residual or None, weight, eps) -> (normed, x + residual or None). Saves what it normalised, and rstd."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor | None]:
        hidden = x.shape[-1]
        if hidden > _MAX_HIDDEN:
            raise ValueError(
                f"rmsnorm: impl = 'triton' takes rows of at most {_MAX_HIDDEN}, got x {tuple(x.shape)}; pass "
                "impl = 'portable'"
            )
        flat, other = _rows(x), None if residual is None else _rows(residual)
        # in their final shape: autograd refuses to write in place to a view that a function returns
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        summed = x if other is None else torch.empty_like(out)
        rstd = torch.empty(len(flat), dtype=torch.float32, device=x.device)
        rows, block, warps = _tile(hidden)
        if len(flat):
            rmsnorm_kernel[(triton.cdiv(len(flat), rows),)](
                flat,
                flat if other is None else other,
                weight,
                out,
                flat if other is None else summed,
                rstd,
                len(flat),
                hidden,
                flat.stride(0),
                0 if other is None else other.stride(0),
                eps,
                RESIDUAL=other is not None,
                ROWS=rows,
                BLOCK=block,
                num_warps=warps,
            )
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(summed, weight, rstd)
        return out, None if residual is None else summed

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: Tensor | None, grad_summed: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        has_residual = ctx.needs_input_grad[1]
        if grad is None:
            return grad_summed, grad_summed if has_residual else None, None, None
        x, weight, rstd = ctx.saved_tensors
        grad_x, grad_weight = _gradients(grad, grad_summed, _rows(x), weight, rstd)
        grad_x = grad_x.view(x.shape)
        return grad_x, grad_x if has_residual else None, grad_weight, None


def _gradients(
    grad: Tensor, grad_summed: Tensor | None, x: Tensor, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    num_rows, hidden = x.shape
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return grad_x, torch.zeros_like(weight)
    rows, block, warps = _tile(hidden)
    num_tiles = triton.cdiv(num_rows, rows)
    tiles_per_program = triton.cdiv(num_tiles, _PROGRAMS)
    programs = triton.cdiv(num_tiles, tiles_per_program)
    partial = torch.empty((programs, hidden), dtype=torch.float32, device=x.device)
    grad = _rows(grad)
    other = grad if grad_summed is None else _rows(grad_summed)
    rmsnorm_gradient_kernel[(programs,)](
        grad,
        other,
        x,
        weight,
        rstd,
        grad_x,
        partial,
        num_rows,
        hidden,
        grad.stride(0),
        other.stride(0),
        x.stride(0),
        tiles_per_program,
        RESIDUAL=grad_summed is not None,
        ROWS=rows,
        BLOCK=block,
        num_warps=warps,
    )
    grad_weight = torch.empty_like(weight)
    sum_partials_kernel[(triton.cdiv(hidden, 64),)](
        partial, grad_weight, programs, hidden, ROWS=32, BLOCK=64, num_warps=4
    )
    return grad_x, grad_weight


def _rows(x: Tensor) -> Tensor:
    """[M, H] with contiguous rows; a copy only where strides leave no other way."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.shape[1] == 1 or flat.stride(1) == 1 else flat.contiguous()


def _tile(hidden: int) -> tuple[int, int, int]:
    """Rows and columns of a tile, and warps: 16 elements per lane, and at most 32 of the longest rows."""
    block = max(16, triton.next_power_of_2(hidden))
    rows = max(1, _TILE // block)
    return rows, block, min(max(rows * block // 512, 4), 32)

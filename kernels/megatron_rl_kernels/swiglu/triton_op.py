"""Launches and autograd function of the `swiglu` kernels."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_rl_kernels.swiglu.triton_kernels import swiglu_gradient_kernel, swiglu_kernel

# 8 elements, so one load of 16 bytes in half precision, per lane of 4 warps
_BLOCK = 1024


class TritonSwiglu(torch.autograd.Function):
    """x [..., 2F] -> [..., F]. Saves x alone; backward makes silu(gate) again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        flat = _rows(x)
        width = flat.shape[1] // 2
        out = torch.empty((len(flat), width), dtype=x.dtype, device=x.device)
        if len(flat):
            block = _block(width)
            swiglu_kernel[(len(flat), triton.cdiv(width, block))](
                flat, out, width, flat.stride(0), BLOCK=block, num_warps=4
            )
        ctx.save_for_backward(flat)
        ctx.shape = x.shape
        return out.view(*x.shape[:-1], width)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (flat,) = ctx.saved_tensors
        width = flat.shape[1] // 2
        grad = _rows(grad)
        grad_x = torch.empty(flat.shape, dtype=flat.dtype, device=flat.device)
        if len(flat):
            block = _block(width)
            swiglu_gradient_kernel[(len(flat), triton.cdiv(width, block))](
                grad, flat, grad_x, width, grad.stride(0), flat.stride(0), BLOCK=block, num_warps=4
            )
        return grad_x.view(ctx.shape)


def _block(width: int) -> int:
    return max(128, min(_BLOCK, triton.next_power_of_2(width)))


def _rows(x: Tensor) -> Tensor:
    """[M, ...] with contiguous rows; a copy only where strides leave no other way."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.shape[1] == 1 or flat.stride(1) == 1 else flat.contiguous()

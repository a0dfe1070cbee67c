"""`rope` in plain torch, for any device. Keeps the angles alone; backward turns the gradient back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class PortableRope(torch.autograd.Function):
    """(x [T, heads, D], cos [T, R / 2], sin [T, R / 2], interleaved) -> [T, heads, D]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _turned(x, cos, sin, interleaved)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(grad, cos, -sin, ctx.interleaved), None, None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    dtype = torch.promote_types(x.dtype, torch.float32)
    cos, sin = cos[:, None].to(dtype), sin[:, None].to(dtype)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    half = cos.shape[-1]
    first, second = (part.to(dtype) for part in _pairs(x, half, interleaved))
    to_first, to_second = _pairs(out, half, interleaved)
    # both products are rounded before they are added, as plain torch and megatron-core do it: addcmul would fuse them
    to_first.copy_((first * cos).sub_(second * sin))
    to_second.copy_((second * cos).add_(first * sin))
    out[..., 2 * half :] = x[..., 2 * half :]
    return out


def _pairs(x: Tensor, half: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    if interleaved:
        return x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
    return x[..., :half], x[..., half : 2 * half]

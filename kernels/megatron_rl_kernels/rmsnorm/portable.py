"""`rmsnorm` in plain torch, for any device. Keeps x and one number per row for backward, no normalised copy."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def rmsnorm_portable(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Without a gradient to prepare this is torch's own call, which has the same bits and starts sooner."""
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        normed: Tensor = PortableRmsnorm.apply(x, weight, eps)
        return normed
    return F.rms_norm(_wide(x), weight.shape, eps=eps).to(x.dtype) * weight


class PortableRmsnorm(torch.autograd.Function):
    """(x [..., H], weight [H], eps) -> [..., H]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = _wide(x)
        rstd = wide.square().mean(dim=-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, rstd)
        # for float32 `to` returns the new product itself, which may be written
        return (wide * rstd).to(x.dtype).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, rstd = ctx.saved_tensors
        hidden = x.shape[-1]
        unit = _wide(x) * rstd
        wide_grad = _wide(grad)
        # the row sum of grad * weight * unit is a product of this with the weight
        pull = (wide_grad * unit).reshape(-1, hidden)
        grad_weight = None
        if ctx.needs_input_grad[1]:
            # what forward multiplied: the normalised value after its rounding
            rounded = pull if x.dtype == unit.dtype else (wide_grad * unit.to(x.dtype)).reshape(-1, hidden)
            grad_weight = rounded.sum(dim=0).to(weight.dtype)
        grad_x = None
        if ctx.needs_input_grad[0]:
            mean = torch.mv(pull, _wide(weight)).div_(-hidden).view(rstd.shape)
            grad_x = (wide_grad * weight).addcmul_(unit, mean).mul_(rstd).to(x.dtype)
        return grad_x, grad_weight, None


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))

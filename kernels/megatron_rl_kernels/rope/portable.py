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
    num_turned = 2 * cos.shape[-1]
    cos, sin = cos[:, None].to(dtype), sin[:, None].to(dtype)
    turned = x[..., :num_turned].to(dtype)
    # each feature's partner in its place, and what it is multiplied with: whole rows are read and written faster
    # than their halves. Both products are rounded before they are added, as plain torch and megatron-core do it:
    # addcmul would fuse them
    if interleaved:
        partner = turned.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        cos, sin = cos.repeat_interleave(2, dim=-1), torch.stack([-sin, sin], dim=-1).flatten(-2)
    else:
        partner = turned.roll(num_turned // 2, dims=-1)
        cos, sin = torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)
    out = (turned * cos).add_(partner.mul_(sin)).to(x.dtype)
    return out if num_turned == x.shape[-1] else torch.cat([out, x[..., num_turned:]], dim=-1)

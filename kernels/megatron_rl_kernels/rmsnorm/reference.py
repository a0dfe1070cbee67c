"""The meaning of `rmsnorm`: plain autograd, works in float64."""

from __future__ import annotations

import torch
from torch import Tensor


def rmsnorm_reference(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) in float32, rounded to the dtype of x, then times `weight`; x [..., H], weight [H]."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight


def rmsnorm_residual_reference(
    x: Tensor, residual: Tensor, weight: Tensor, *, eps: float
) -> tuple[Tensor, Tensor]:
    """(rmsnorm of x + residual, x + residual), the sum rounded to the dtype of x before it is normalised."""
    summed = x + residual
    return rmsnorm_reference(summed, weight, eps=eps), summed

"""The meaning of `rope`: pairs of features of a head as complex numbers, turned; plain autograd, works in float64."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate_reference(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """x [T, heads, D] with the pairs of its first 2 * cos.shape[1] features turned by the angles of the token.

    Pair i is (i, i + R / 2), or (2 i, 2 i + 1) if `interleaved`; features from R on pass. Products and their sum are
    made in float32, then rounded.
    """
    half = cos.shape[1]
    wide = x[..., : 2 * half].to(torch.promote_types(x.dtype, torch.float32))
    cos, sin = cos[:, None].to(wide.dtype), sin[:, None].to(wide.dtype)
    pairs = wide.unflatten(-1, (half, 2) if interleaved else (2, half))
    first, second = pairs.unbind(dim=-1 if interleaved else -2)
    turned = torch.stack(
        (first * cos - second * sin, second * cos + first * sin), dim=-1 if interleaved else -2
    )
    return torch.cat((turned.flatten(-2).to(x.dtype), x[..., 2 * half :]), dim=-1)

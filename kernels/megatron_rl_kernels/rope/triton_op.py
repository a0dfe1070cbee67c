"""Launch and autograd function of the `rope` kernel."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_rl_kernels.rope.triton_kernels import rope_kernel

# pairs of one program: 16 per lane of 4 warps
_PAIRS = 2048


class TritonRope(torch.autograd.Function):
    """(x [T, heads, D], cos [T, R / 2], sin [T, R / 2], interleaved) -> [T, heads, D]. Saves the angles alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _turned(x, cos, sin, interleaved, back=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(grad, cos, sin, ctx.interleaved, back=True), None, None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, *, back: bool) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    if x.stride(2) != 1:
        x = x.contiguous()
    tokens, heads, head_dim = x.shape
    half = cos.shape[1]
    pairs = triton.next_power_of_2(half)
    at_once = max(1, min(triton.next_power_of_2(heads), _PAIRS // pairs))
    rope_kernel[(tokens, triton.cdiv(heads, at_once))](
        x,
        cos.contiguous(),
        sin.contiguous(),
        out,
        heads,
        head_dim,
        half,
        x.stride(0),
        x.stride(1),
        INTERLEAVED=interleaved,
        BACK=back,
        PASSES=head_dim > 2 * half,
        HEADS=at_once,
        PAIRS=pairs,
        BLOCK=triton.next_power_of_2(max(head_dim - 2 * half, 1)),
        num_warps=4,
    )
    return out

"""Rotary position embedding of packed sequences: pairs of features of each head turn by position times frequency.

`reference` defines the op; README.md has its conventions and limits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl_kernels.dispatch import Impl, choose_impl
from megatron_rl_kernels.rope.angles import RopeAngles, rope_angles
from megatron_rl_kernels.rope.portable import PortableRope
from megatron_rl_kernels.rope.reference import rotate_reference

__all__ = ["RopeAngles", "rope", "rope_angles", "rotate", "rotate_reference"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def rope(
    x: Tensor, positions: Tensor, inv_freq: Tensor, *, interleaved: bool = False, impl: Impl | None = None
) -> Tensor:
    """Queries or keys x [T, heads, D] turned by positions [T] int64 times inv_freq [R / 2] float32, R <= D.

    `rope_angles` and `rotate` in one: where several tensors have the same tokens, call those, the first one once.
    """
    return rotate(x, rope_angles(positions, inv_freq, dtype=x.dtype), interleaved=interleaved, impl=impl)


def rotate(x: Tensor, angles: RopeAngles, *, interleaved: bool = False, impl: Impl | None = None) -> Tensor:
    """x [T, heads, D], any strides, turned by the angles of its tokens; a new tensor. Differentiable in x.

    Features (i, i + R / 2) are a pair (Llama, Qwen and megatron-core's default), or (2 i, 2 i + 1) if `interleaved`;
    those from R on pass unchanged. Products are made and added in float32 and rounded once. Backward keeps the angles
    alone. Raises ValueError or TypeError for arguments that do not fit.
    """
    _check(x, angles)
    offered: list[Impl] = ["reference", "portable"]
    # kernels compute in float32, which would not be what float64 asks for
    if x.dtype != torch.float64:
        offered.append("triton")
    chosen = choose_impl("rope", impl, device=x.device, offered=offered)
    if chosen == "reference":
        return rotate_reference(x, *angles, interleaved=interleaved)
    if chosen == "triton":
        # needs Triton, which CPU machines may lack
        from megatron_rl_kernels.rope.triton_op import TritonRope

        out: Tensor = TritonRope.apply(x, *angles, interleaved)
    else:
        out = PortableRope.apply(x, *angles, interleaved)
    return out


def _check(x: Tensor, angles: RopeAngles) -> None:
    cos, sin = angles
    if x.ndim != 3 or cos.ndim != 2 or cos.shape != sin.shape or len(cos) != len(x):
        raise ValueError(
            f"rope: got x {tuple(x.shape)}, cos {tuple(cos.shape)}, sin {tuple(sin.shape)}; expected x [T, heads, D] "
            "and cos, sin [T, R / 2]"
        )
    if 2 * cos.shape[1] > x.shape[2]:
        raise ValueError(
            f"rope: got x {tuple(x.shape)}, cos {tuple(cos.shape)}; a head of {x.shape[2]} features has at most "
            f"{x.shape[2] // 2} frequencies"
        )
    if x.dtype not in _DTYPES or not x.dtype == cos.dtype == sin.dtype:
        raise TypeError(
            f"rope: got x of {x.dtype}, cos of {cos.dtype}, sin of {sin.dtype}; all must be the same one of "
            + ", ".join(str(dtype) for dtype in _DTYPES)
        )
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        raise ValueError(
            "rope: cos or sin requires a gradient but is a constant here; detach inv_freq or the angles"
        )
    if not x.device == cos.device == sin.device:
        raise ValueError(
            f"rope: got x on {x.device}, cos on {cos.device}, sin on {sin.device}; put them on one device"
        )

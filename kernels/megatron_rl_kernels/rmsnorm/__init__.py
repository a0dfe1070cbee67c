"""Root mean square norm over the last dimension, alone or together with the residual sum before it.

`reference` defines the op: normalised in float32, rounded to the dtype of x, then multiplied, as Hugging Face and vLLM
do. README.md has the derivation of the gradient and the limits.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_rl_kernels.dispatch import Impl, choose_impl
from megatron_rl_kernels.rmsnorm.portable import rmsnorm_portable
from megatron_rl_kernels.rmsnorm.reference import rmsnorm_reference, rmsnorm_residual_reference

__all__ = ["rmsnorm", "rmsnorm_reference", "rmsnorm_residual", "rmsnorm_residual_reference"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# below, the third power of 1 / sqrt(eps), which the gradient of a row of zeros meets, leaves float32
_MIN_EPS = 1e-24


def rmsnorm(x: Tensor, weight: Tensor, *, eps: float, impl: Impl | None = None) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, differentiable in both.

    x [..., H], any strides; weight [H] contiguous, of the same dtype; eps at least 1e-24, so that a row of zeros gives
    zeros. Backward keeps x, weight and one float32 per row. Gradients are summed in float32 and rounded once, that of
    the weight in an order that depends on shapes alone. Raises TypeError or ValueError for arguments that do not fit.
    """
    _check("rmsnorm", x, weight, eps)
    chosen = _choose("rmsnorm", x, impl)
    if chosen == "reference":
        return rmsnorm_reference(x, weight, eps=eps)
    if chosen == "triton":
        return _triton(x, None, weight, eps)[0]
    return rmsnorm_portable(x, weight, eps)


def rmsnorm_residual(
    x: Tensor, residual: Tensor, weight: Tensor, *, eps: float, impl: Impl | None = None
) -> tuple[Tensor, Tensor]:
    """(rmsnorm of x + residual, x + residual), where the sum is rounded to the dtype of x before it is normalised.

    x and residual [..., H] of one shape and dtype; else as `rmsnorm`. Both get the same gradient.
    """
    _check("rmsnorm_residual", x, weight, eps)
    if residual.shape != x.shape or residual.dtype != x.dtype or residual.device != x.device:
        raise ValueError(
            f"rmsnorm_residual: got residual {tuple(residual.shape)} of {residual.dtype} on {residual.device}; must be "
            f"as x, {tuple(x.shape)} of {x.dtype} on {x.device}"
        )
    chosen = _choose("rmsnorm_residual", x, impl)
    if chosen == "reference":
        return rmsnorm_residual_reference(x, residual, weight, eps=eps)
    if chosen == "triton":
        normed, summed = _triton(x, residual, weight, eps)
        assert summed is not None
        return normed, summed
    summed = x + residual
    return rmsnorm_portable(summed, weight, eps), summed


def _triton(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor | None]:
    # needs Triton, which CPU machines may lack
    from megatron_rl_kernels.rmsnorm.triton_op import TritonRmsnorm

    normed, summed = TritonRmsnorm.apply(x, residual, weight, eps)
    return normed, summed


def _choose(name: str, x: Tensor, impl: Impl | None) -> Impl:
    offered: list[Impl] = ["reference", "portable"]
    # kernels compute in float32, which would not be what float64 asks for
    if x.dtype != torch.float64:
        offered.append("triton")
    return choose_impl(name, impl, device=x.device, offered=offered)


def _check(name: str, x: Tensor, weight: Tensor, eps: float) -> None:
    if x.ndim < 1 or weight.shape != x.shape[-1:] or weight.numel() == 0:
        raise ValueError(
            f"{name}: got {_described(x, weight)}; expected x [..., H] and weight [H], H at least 1"
        )
    if x.dtype not in _DTYPES or weight.dtype != x.dtype:
        allowed = ", ".join(str(dtype) for dtype in _DTYPES)
        raise TypeError(f"{name}: got {_described(x, weight)}; both must be the same one of {allowed}")
    if weight.device != x.device:
        raise ValueError(f"{name}: got x on {x.device}, weight on {weight.device}; put them on one device")
    if not weight.is_contiguous():
        raise ValueError(f"{name}: weight has stride {weight.stride()}; pass weight.contiguous()")
    if not (math.isfinite(eps) and eps >= _MIN_EPS):
        raise ValueError(
            f"{name}: eps = {eps}, must be finite and at least {_MIN_EPS:g}: a row of zeros would have no norm"
        )


def _described(x: Tensor, weight: Tensor) -> str:
    return f"x {tuple(x.shape)} of {x.dtype}, weight {tuple(weight.shape)} of {weight.dtype}"

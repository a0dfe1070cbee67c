"""RMS norms of a CPU engine by vLLM's C++ kernels, one pass each.

On CPU vLLM takes its definitions in plain torch and leaves them to a compiler, which our engines start without: half a
dozen passes over memory for each norm. float32 alone: the kernels round once, at the end, where the trainer and Hugging
Face round a narrower type before they multiply with the weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

_NAME = "megatron_rl"
_VECTOR = 8  # float32 values that the kernels take at a time; they refuse rows that end within them
# for `kernel_config.ir_op_priority`; vLLM appends its own
PRIORITY = {"rms_norm": [_NAME], "fused_add_rms_norm": [_NAME]}


def register() -> None:
    """Offer the kernels to vLLM under the name in `PRIORITY`; safe to call twice."""
    from vllm import ir

    if _NAME in ir.ops.rms_norm.impls:
        return
    ir.ops.rms_norm.register_impl(_NAME, supports_args=_fits_norm)(_norm)
    ir.ops.fused_add_rms_norm.register_impl(_NAME, supports_args=_fits_added, inplace=True)(_norm_added)


def _norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype)
    torch.ops._C.rms_norm(out, x, weight, epsilon)
    return out


def _norm_added(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Writes into both."""
    torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
    return x, x_residual


def _fits_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    return (
        variance_size is None
        and x.shape[-1] % _VECTOR == 0
        and _is_plain(x)
        and (weight is None or _is_plain(weight))
    )


def _fits_added(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> bool:
    return _is_plain(x_residual) and _fits_norm(x, weight, epsilon, variance_size)


def _is_plain(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.is_contiguous()

"""silu(gate) * up of a gated MLP, from the two halves of one tensor.

`reference` defines the op, README.md has its limits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl_kernels.dispatch import Impl, choose_impl
from megatron_rl_kernels.swiglu.portable import swiglu_portable
from megatron_rl_kernels.swiglu.reference import swiglu_reference

__all__ = ["swiglu", "swiglu_reference"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def swiglu(x: Tensor, *, impl: Impl | None = None) -> Tensor:
    """silu(gate) * up for x [..., 2F] = [gate | up], as megatron-core's fc1 lays it out; returns [..., F], same dtype.

    silu is computed in float32 and rounded before the product, as Hugging Face and vLLM do; gradients are rounded once.
    Any strides. `triton` keeps x alone for backward, `portable` also silu(gate). Raises ValueError for an odd last
    dimension and TypeError for a dtype that is not floating.
    """
    if x.ndim < 1 or x.shape[-1] < 2 or x.shape[-1] % 2:
        raise ValueError(f"swiglu: got x {tuple(x.shape)}; expected [..., 2F], gate and up of F columns each")
    if x.dtype not in _DTYPES:
        raise TypeError(
            f"swiglu: got x of {x.dtype}; must be one of " + ", ".join(str(dtype) for dtype in _DTYPES)
        )
    offered: list[Impl] = ["reference", "portable"]
    # kernels compute in float32, which would not be what float64 asks for
    if x.dtype != torch.float64:
        offered.append("triton")
    chosen = choose_impl("swiglu", impl, device=x.device, offered=offered)
    if chosen == "reference":
        return swiglu_reference(x)
    if chosen == "triton":
        # needs Triton, which CPU machines may lack
        from megatron_rl_kernels.swiglu.triton_op import TritonSwiglu

        out: Tensor = TritonSwiglu.apply(x)
        return out
    return swiglu_portable(x)

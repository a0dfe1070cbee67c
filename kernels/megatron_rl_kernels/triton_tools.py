"""What every Triton kernel here shares: the matrix product, and whether the interpreter runs it.

The interpreter computes bfloat16 on bit patterns (triton-lang/triton#4972), so kernels cast to float32 right after each
load and `dot` multiplies in float32 there. On a device float32 products are kept exact (`ieee`, never tf32).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

# decided when this module is imported, as for every `triton.jit`
INTERPRETED: bool = bool(triton.knobs.runtime.interpret)

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453


@triton.jit
def dot(a, b, acc, UPCAST: tl.constexpr):
    """acc + a @ b in float32. UPCAST: multiply float32 copies (the interpreter, or float32 operands)."""
    if UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


def check_last_stride(op: str, **tensors: Tensor) -> None:
    """Raise ValueError for a tensor whose last dimension is not contiguous."""
    for name, tensor in tensors.items():
        if tensor.ndim and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(
                f"{op}: {name} {tuple(tensor.shape)} has stride {tensor.stride()}, its last dimension must be "
                f"contiguous; pass {name}.contiguous()"
            )

"""`swiglu` in plain torch, for any device.

Autograd keeps silu(gate) beside x: making it again in backward costs a third exponential, which on a CPU is more than
the memory of one of its layers is worth.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def swiglu_portable(x: Tensor) -> Tensor:
    """silu(gate) * up, with x [..., 2F] = [gate | up]."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up

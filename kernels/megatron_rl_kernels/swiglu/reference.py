"""The meaning of `swiglu`: plain autograd, works in float64."""

from __future__ import annotations

import torch
from torch import Tensor


def swiglu_reference(x: Tensor) -> Tensor:
    """gate * sigmoid(gate) * up, with x [..., 2F] = [gate | up]; the left factor is rounded before the product."""
    gate, up = x.chunk(2, dim=-1)
    wide = gate.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.sigmoid(wide)).to(x.dtype) * up

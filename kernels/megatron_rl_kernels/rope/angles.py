"""Cosines and sines of the rotary embedding: one of each per token and frequency, shared by all heads and layers."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class RopeAngles(NamedTuple):
    """Of T tokens; rounded to the dtype that is rotated, as Hugging Face, vLLM and megatron-core round them."""

    cos: Tensor  # [T, R / 2]
    sin: Tensor  # [T, R / 2]


def rope_angles(positions: Tensor, inv_freq: Tensor, *, dtype: torch.dtype) -> RopeAngles:
    """cos and sin of positions [T] int64 times inv_freq [R / 2], radians per position.

    Positions restart at 0 in each packed sequence. The angle is a float32 product (float64 for float64 frequencies),
    so that its rounding at far positions is that of the other implementations too. Make them once per micro-batch.
    Raises ValueError or TypeError for other shapes and for positions that are no integers.
    """
    if positions.ndim != 1 or inv_freq.ndim != 1 or len(inv_freq) == 0:
        raise ValueError(
            f"rope: got positions {tuple(positions.shape)}, inv_freq {tuple(inv_freq.shape)}; expected [T] and [R / 2]"
        )
    if positions.dtype not in (torch.int64, torch.int32) or inv_freq.dtype not in (
        torch.float32,
        torch.float64,
    ):
        raise TypeError(
            f"rope: got positions of {positions.dtype}, inv_freq of {inv_freq.dtype}; must be torch.int64 and "
            "torch.float32: half precision has too few digits for an angle"
        )
    if positions.device != inv_freq.device:
        raise ValueError(
            f"rope: got positions on {positions.device}, inv_freq on {inv_freq.device}; put them on one device"
        )
    angle = positions[:, None].to(inv_freq.dtype) * inv_freq
    return RopeAngles(angle.cos().to(dtype), angle.sin().to(dtype))

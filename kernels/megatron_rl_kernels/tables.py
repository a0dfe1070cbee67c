"""Tile sizes of the Triton kernels, by device generation and element size: chosen once, by hand, not while running.

Every rank picks the same entry, so that all run the same sums in the same order. `GENERATIONS` maps the major number
of a CUDA device's compute capability to the key of a table; "interpreter" is Triton on the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Generation = Literal["interpreter", "sm_90", "other"]
ElementSize = Literal[2, 4]

GENERATIONS: dict[int, Generation] = {9: "sm_90"}


@dataclass(frozen=True, slots=True)
class MatmulTile:
    """One program's block of a product [m, k] x [n, k], and how it is scheduled."""

    m: int
    n: int
    k: int
    parts: int  # 1, or 2: columns are worked off in halves, which takes fewer registers
    group: int  # row blocks whose programs run next to each other and share operands in the L2 cache
    num_warps: int
    num_stages: int


Table = dict[tuple[Generation, ElementSize], MatmulTile]

LINEAR_LOGPROB_FORWARD: Table = {
    ("interpreter", 2): MatmulTile(128, 256, 256, 2, 2, 8, 1),
    ("interpreter", 4): MatmulTile(128, 256, 256, 2, 2, 8, 1),
    ("sm_90", 2): MatmulTile(128, 256, 64, 2, 16, 8, 3),
    ("sm_90", 4): MatmulTile(64, 64, 32, 1, 16, 8, 3),
    ("other", 2): MatmulTile(128, 128, 64, 1, 16, 8, 3),
    ("other", 4): MatmulTile(64, 64, 32, 1, 16, 8, 3),
}

LINEAR_LOGPROB_BACKWARD: Table = {
    ("interpreter", 2): MatmulTile(128, 256, 256, 2, 2, 8, 1),
    ("interpreter", 4): MatmulTile(128, 256, 256, 2, 2, 8, 1),
    ("sm_90", 2): MatmulTile(128, 256, 64, 2, 16, 8, 3),
    ("sm_90", 4): MatmulTile(64, 64, 32, 1, 16, 8, 3),
    ("other", 2): MatmulTile(128, 128, 64, 1, 16, 8, 3),
    ("other", 4): MatmulTile(64, 64, 32, 1, 16, 8, 3),
}


def generation(device: torch.device) -> Generation:
    """The key of `device` in the tables; "interpreter" for a CPU."""
    if device.type != "cuda":
        return "interpreter"
    return GENERATIONS.get(torch.cuda.get_device_capability(device)[0], "other")

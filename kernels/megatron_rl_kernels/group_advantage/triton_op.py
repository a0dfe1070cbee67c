"""Launches the Triton kernels of `group_advantage`."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl_kernels.group_advantage.groups import Groups
from megatron_rl_kernels.group_advantage.triton_kernels import batch_std_kernel, group_kernel

# groups have 4 to 64 rollouts
_BLOCK = 64
_BATCH_BLOCK = 1024


def group_advantage_triton(
    reward: Tensor, groups: Groups, *, mode: str, unbiased: bool, eps: float
) -> Tensor:
    """As `group_advantage_portable`, with float32 sums. Raises TypeError for float64."""
    if reward.dtype != torch.float32:
        raise TypeError(
            f"group_advantage: impl 'triton' takes float32, got reward of {reward.dtype}; convert it or pass "
            "impl='portable'"
        )
    reward = reward.contiguous()
    advantage = torch.empty_like(reward)
    if len(reward) == 0:
        return advantage
    group_kernel[(len(groups.offsets) - 1,)](
        reward,
        groups.order,
        groups.offsets,
        advantage,
        float(eps),
        MODE=mode if mode in ("std", "leave_one_out") else "mean",
        UNBIASED=unbiased,
        BLOCK=_BLOCK,
        num_warps=1,
    )
    if mode in ("batch_std", "centred_batch_std"):
        # the kernel finishes reading before it writes
        spread = reward if mode == "batch_std" else advantage
        batch_std_kernel[(1,)](
            spread, advantage, len(reward), float(eps), UNBIASED=unbiased, BLOCK=_BATCH_BLOCK
        )
    return advantage

"""`group_advantage` in plain torch: sums over segments of sorted rewards, in float64 and in a fixed order."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl_kernels.group_advantage.groups import Groups


def group_advantage_portable(
    reward: Tensor, groups: Groups, *, mode: str, unbiased: bool, eps: float
) -> Tensor:
    """[B] advantages in the dtype of `reward`. Bits depend on neither the run nor the order of the groups."""
    rewards = reward.double() if groups.order is None else reward.double()[groups.order]
    counts = groups.offsets.diff()
    centred = rewards - (_sums(rewards, groups) / counts)[groups.index]
    # the mean of equal numbers may differ from them in the last bit. A group of one is a group of equal numbers, and
    # infinities are none
    low, high = (_extreme(rewards, groups, how) for how in ("amin", "amax"))
    varied = ((low != high) | low.isinf())[groups.index]
    advantage = torch.where(varied, centred, 0.0)
    if mode == "std":
        deviation = (_sums(advantage.square(), groups) / (counts - int(unbiased)).clamp(min=1)).sqrt()
        advantage = advantage / (deviation[groups.index] + eps)
    elif mode == "leave_one_out":
        # a quotient of whole numbers would be float32
        advantage = advantage * (counts.double() / (counts - 1).clamp(min=1))[groups.index]
    elif mode == "batch_std":
        advantage = advantage / (_batch_std(rewards, unbiased) + eps)
    elif mode == "centred_batch_std":
        advantage = advantage / (_batch_std(advantage, unbiased) + eps)
    # 0 / 0 where eps is 0
    advantage = torch.where(varied, advantage, 0.0).to(reward.dtype)
    if groups.order is None:
        return advantage
    return torch.empty_like(advantage).index_copy_(0, groups.order, advantage)


def _sums(values: Tensor, groups: Groups) -> Tensor:
    return torch.segment_reduce(values, "sum", offsets=groups.offsets, unsafe=True)


def _extreme(values: Tensor, groups: Groups, how: str) -> Tensor:
    # the order does not matter to an extreme, so a scatter is deterministic
    empty = values.new_zeros(len(groups.offsets) - 1)
    return empty.scatter_reduce(0, groups.index, values, how, include_self=False)


def _batch_std(values: Tensor, unbiased: bool) -> Tensor:
    centred = values - values.mean()
    return (centred.square().sum() / max(len(values) - int(unbiased), 1)).sqrt()

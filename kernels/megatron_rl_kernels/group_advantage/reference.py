"""The meaning of `group_advantage`: one group after the other, by the printed formulas; works in float64."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from megatron_rl_kernels.group_advantage.groups import Groups


def group_advantage_reference(
    reward: Tensor, groups: Groups, *, mode: str, unbiased: bool, eps: float
) -> Tensor:
    """[B] advantages in the dtype of `reward`, which is read as it is, without a wider sum. Waits for the device."""
    order = torch.arange(len(reward), device=reward.device) if groups.order is None else groups.order
    bounds = groups.offsets.tolist()
    members = [order[start:stop] for start, stop in itertools.pairwise(bounds) if stop > start]
    advantage = torch.zeros_like(reward)
    for one in members:
        rewards = reward[one]
        size = len(one)
        # the mean of equal numbers may differ from them in the last bit
        is_equal = bool((rewards == rewards[0]).all()) and bool(rewards[0].isfinite())
        if not is_equal:
            centred = rewards - rewards.mean()
            if mode == "std":
                centred = centred / (_std(rewards, unbiased) + eps)
            if mode == "leave_one_out":
                # reward minus the mean of the other rewards
                centred = rewards - (rewards.sum() - rewards) / (size - 1)
            advantage[one] = centred
    if mode in ("batch_std", "centred_batch_std") and bool((advantage != 0).any()):
        advantage = advantage / (_std(reward if mode == "batch_std" else advantage, unbiased) + eps)
    return advantage


def _std(values: Tensor, unbiased: bool) -> Tensor:
    return (values - values.mean()).square().sum().div(len(values) - int(unbiased)).sqrt()

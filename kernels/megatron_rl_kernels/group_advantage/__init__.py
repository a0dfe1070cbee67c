"""Advantages of rollouts from their rewards and those of their group. Constants of the loss: no gradient.

`reference` defines the op, `portable` runs it on any device, `triton` in one or two kernels.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from megatron_rl_kernels.dispatch import Impl, choose_impl
from megatron_rl_kernels.group_advantage.groups import Groups, groups_by_id, groups_of_size
from megatron_rl_kernels.group_advantage.portable import group_advantage_portable
from megatron_rl_kernels.group_advantage.reference import group_advantage_reference

__all__ = ["Mode", "group_advantage"]

# the sum of the squares of as many as there may be is finite in float32
MAX_REWARD = 1e15

Mode = Literal["mean", "std", "leave_one_out", "batch_std", "centred_batch_std"]


def group_advantage(
    reward: Tensor,
    *,
    mode: Mode,
    group_ids: Tensor | None = None,
    group_size: int | None = None,
    unbiased: bool = False,
    eps: float = 1e-6,
    validate: bool = True,
    impl: Impl | None = None,
) -> Tensor:
    """[B] advantages in the order and dtype of `reward` [B] (float32, or float64 but not for Triton).

    mean               reward - mean of the group                                   (Dr. GRPO, arXiv 2503.20783)
    std                that / (std of the group + eps)                              (GRPO, arXiv 2402.03300)
    leave_one_out      reward - mean of the others of the group                     (RLOO, arXiv 2402.14740)
    batch_std          reward - mean of the group / (std of all rewards + eps)      (arXiv 2508.08221)
    centred_batch_std  the same with the std of reward - mean of the group          (REINFORCE++, arXiv 2501.03262)

    Groups are `group_ids` [B] int64 (equal ids, any values, in any order) or consecutive `group_size`s, one of the
    two. `unbiased` divides the sum of squares by n - 1 instead of n. "All rewards" are those passed: gather them over
    data-parallel ranks first. A group of equal rewards gets exact zeros, with an eps of 0 too.

    `validate` raises ValueError for a group of one (it has no baseline) and a reward that is not finite or beyond 1e15
    (whose square may leave float32), for which it waits for the device. Without it nothing waits, a group of one gets
    0, and a reward that is not finite spoils its group, or the whole batch in the last two modes. Raises TypeError or
    ValueError for arguments without meaning.
    """
    _check_reward(reward)
    if mode not in get_args(Mode):
        raise ValueError(f"group_advantage: mode = {mode!r}, must be one of {', '.join(get_args(Mode))}")
    if not (math.isfinite(eps) and eps >= 0):
        raise ValueError(f"group_advantage: eps = {eps}, must be finite and not negative")
    groups = _groups(reward, group_ids, group_size)
    reward = reward.detach()
    if validate:
        _check_values(reward, groups)
    chosen = choose_impl(
        "group_advantage", impl, device=reward.device, offered=("reference", "portable", "triton")
    )
    if chosen == "reference":
        return group_advantage_reference(reward, groups, mode=mode, unbiased=unbiased, eps=eps)
    if chosen == "triton":
        # heavy, and needed by this implementation alone
        from megatron_rl_kernels.group_advantage.triton_op import group_advantage_triton

        return group_advantage_triton(reward, groups, mode=mode, unbiased=unbiased, eps=eps)
    return group_advantage_portable(reward, groups, mode=mode, unbiased=unbiased, eps=eps)


def _check_reward(reward: Tensor) -> None:
    if reward.ndim != 1 or reward.dtype not in (torch.float32, torch.float64):
        raise TypeError(
            f"group_advantage: reward {tuple(reward.shape)} of {reward.dtype}, must be [B] of float32 or float64"
        )


def _groups(reward: Tensor, group_ids: Tensor | None, group_size: int | None) -> Groups:
    if (group_ids is None) == (group_size is None):
        raise ValueError("group_advantage: pass group_ids [B] int64 or group_size, one of the two")
    num_rollouts = len(reward)
    if group_ids is None:
        if isinstance(group_size, bool) or not isinstance(group_size, int):
            raise TypeError(f"group_advantage: group_size = {group_size!r}, must be an int")
        if group_size < 2:
            raise ValueError(f"group_advantage: group_size = {group_size}, at least 2: one has no baseline")
        if num_rollouts % group_size:
            raise ValueError(
                f"group_advantage: {num_rollouts} rewards are no multiple of group_size = {group_size}; "
                "pass group_ids for groups of several sizes"
            )
        return groups_of_size(num_rollouts, group_size, reward.device)
    if group_ids.dtype != torch.int64:
        raise TypeError(f"group_advantage: group_ids of {group_ids.dtype}, must be torch.int64")
    if group_ids.shape != reward.shape or group_ids.device != reward.device:
        raise ValueError(
            f"group_advantage: group_ids {tuple(group_ids.shape)} on {group_ids.device}, must be like reward: "
            f"{tuple(reward.shape)} on {reward.device}"
        )
    return groups_by_id(group_ids)


def _check_values(reward: Tensor, groups: Groups) -> None:
    single = int((groups.offsets.diff() == 1).sum())
    if single:
        raise ValueError(
            f"group_advantage: {single} groups have one rollout and no baseline; raise the group size, drop them, or "
            "pass validate=False to give them 0"
        )
    wrong = int((~(reward.abs() <= MAX_REWARD)).sum())
    if wrong:
        raise ValueError(
            f"group_advantage: {wrong} rewards are not finite or beyond {MAX_REWARD:g}; fix them, or mask their "
            "rollouts"
        )

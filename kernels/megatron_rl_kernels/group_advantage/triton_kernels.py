"""Triton kernels of `group_advantage`: one program per group, and one program for the spread of the batch.

Rewards are taken relative to the first of their group, so a common offset costs no digits and equal rewards give exact
zeros. Sums run in each lane by position, then over a tree: bits do not vary between runs.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def group_kernel(
    reward_ptr,  # [B] f32, read only
    order_ptr,  # [B] i64 or None, read only: where each sorted rollout is in the batch
    offsets_ptr,  # [G + 1] i64, read only
    out_ptr,  # [B] f32, written
    eps,
    MODE: tl.constexpr,  # mean, std, leave_one_out
    UNBIASED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    group = tl.program_id(0).to(tl.int64)
    begin = tl.load(offsets_ptr + group)
    end = tl.load(offsets_ptr + group + 1)
    if begin == end:
        return
    lanes = tl.arange(0, BLOCK)
    first = tl.load(reward_ptr + _position(order_ptr, begin, True)).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(begin, end, BLOCK):
        inside = start + lanes < end
        position = _position(order_ptr, start + lanes, inside)
        reward = tl.load(reward_ptr + position, mask=inside, other=0.0).to(tl.float32)
        total += tl.where(inside, reward - first, 0.0)
    count = (end - begin).to(tl.float32)
    mean = tl.sum(total, axis=0) / count
    scale = 1.0
    if MODE == "leave_one_out":
        scale = count / tl.where(count > 1, count - 1, 1.0)
    if MODE == "std":
        square = tl.zeros([BLOCK], tl.float32)
        for start in range(begin, end, BLOCK):
            inside = start + lanes < end
            position = _position(order_ptr, start + lanes, inside)
            reward = tl.load(reward_ptr + position, mask=inside, other=0.0).to(tl.float32)
            centred = tl.where(inside, (reward - first) - mean, 0.0)
            square += centred * centred
        degrees = count
        if UNBIASED:
            degrees = tl.where(count > 1, count - 1, 1.0)
        scale = _inverse(tl.sqrt(tl.sum(square, axis=0) / degrees) + eps)
    for start in range(begin, end, BLOCK):
        inside = start + lanes < end
        position = _position(order_ptr, start + lanes, inside)
        reward = tl.load(reward_ptr + position, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_ptr + position, ((reward - first) - mean) * scale, mask=inside)


@triton.jit
def batch_std_kernel(
    spread_ptr,  # [B] f32, read only: what the standard deviation is of
    out_ptr,  # [B] f32, divided in place by that + eps
    num_rollouts,
    eps,
    UNBIASED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for the whole batch: there are thousands of rollouts, not millions."""
    lanes = tl.arange(0, BLOCK)
    first = tl.load(spread_ptr).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, num_rollouts, BLOCK):
        inside = start + lanes < num_rollouts
        value = tl.load(spread_ptr + start + lanes, mask=inside, other=0.0).to(tl.float32)
        total += tl.where(inside, value - first, 0.0)
    mean = tl.sum(total, axis=0) / num_rollouts
    square = tl.zeros([BLOCK], tl.float32)
    for start in range(0, num_rollouts, BLOCK):
        inside = start + lanes < num_rollouts
        value = tl.load(spread_ptr + start + lanes, mask=inside, other=0.0).to(tl.float32)
        centred = tl.where(inside, (value - first) - mean, 0.0)
        square += centred * centred
    degrees = num_rollouts.to(tl.float32)
    if UNBIASED:
        degrees = tl.where(degrees > 1, degrees - 1, 1.0)
    scale = _inverse(tl.sqrt(tl.sum(square, axis=0) / degrees) + eps)
    for start in range(0, num_rollouts, BLOCK):
        inside = start + lanes < num_rollouts
        value = tl.load(out_ptr + start + lanes, mask=inside, other=0.0)
        tl.store(out_ptr + start + lanes, value * scale, mask=inside)


@triton.jit
def _position(order_ptr, sorted_position, inside):
    # one return: compiled functions may not return early
    if order_ptr is None:  # noqa: SIM108
        position = sorted_position
    else:
        position = tl.load(order_ptr + sorted_position, mask=inside, other=0)
    return position


@triton.jit
def _inverse(deviation):
    """0 for 0: where nothing varies, what is scaled is 0 too."""
    return tl.where(deviation == 0, 0.0, 1.0 / tl.where(deviation == 0, 1.0, deviation))

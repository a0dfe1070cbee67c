"""Statistics of a shard of the head -> log-prob, entropy and normaliser of the whole one, over a group if any."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl_kernels.linear_policy_loss.types import TokenValues


def merge_shards(stats: Tensor, group: dist.ProcessGroup | None) -> TokenValues:
    """stats [5, n] of this shard, in nats, each token relative to its own base b (the largest logit or near it):

    b (-inf: no logits), sum exp(z - b), sum exp(z - b) (z - b), target logit - b (0 if not owned), 1 if owned.
    One all-reduce MAX of b and one all-reduce SUM of the rest, so that all ranks get the same bits.
    """
    base, sum_exp, moment, target, owned = stats.unbind(0)
    top = base.clone()
    if is_shared(group, top):
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
    # a shard of padding alone, or with every logit -inf, adds an empty sum
    shift = torch.where(base == float("-inf"), 0.0, base - top)
    scale = torch.where(base == float("-inf"), 0.0, shift.exp())
    sums = torch.stack(
        (
            scale * sum_exp,
            scale * (moment + shift * sum_exp),
            torch.where(owned > 0, target + shift, 0.0),
            owned,
        )
    )
    if is_shared(group, top):
        dist.all_reduce(sums, group=group)
    log_sum = sums[0].log()
    # a target that no shard owns (or two do) must not look like a log-prob
    logprob = (sums[2] - log_sum).masked_fill_(sums[3] != 1, float("nan"))
    return TokenValues(logprob, log_sum - sums[1] / sums[0], top, log_sum)


def merge_blocks(stats: Tensor) -> Tensor:
    """[B, 5, n] of B blocks of columns, each as `merge_shards` takes them -> [5, n]; no blocks: no logits."""
    if stats.shape[0] == 0:
        empty = stats.new_zeros(stats.shape[1:])
        empty[0] = float("-inf")
        return empty
    base, sum_exp, moment, target, owned = stats.unbind(1)
    top = base.amax(0)
    shift = torch.where(base == float("-inf"), 0.0, base - top)
    scale = torch.where(base == float("-inf"), 0.0, shift.exp())
    return torch.stack(
        (
            top,
            (scale * sum_exp).sum(0),
            (scale * (moment + shift * sum_exp)).sum(0),
            torch.where(owned > 0, target + shift, 0.0).sum(0),
            owned.sum(0),
        )
    )


def is_shared(group: dist.ProcessGroup | None, tensor: Tensor) -> bool:
    """Whether `group` has to exchange `tensor`; its size is the same on all ranks, so all of them skip an empty one."""
    return group is not None and tensor.numel() > 0 and group.size() > 1

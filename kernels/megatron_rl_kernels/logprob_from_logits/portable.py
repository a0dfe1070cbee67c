"""`logprob_from_logits` in plain torch, for any device: blocks of the logits are read in float32, folded and dropped.

Beyond the logits and their gradient at most three blocks of _BLOCK_TOKENS x _BLOCK_VOCAB exist at once. The
derivation is in README.md.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl_kernels.logprob_from_logits.shards import RowValues, Shard, compute_dtype

# blocks of 512 KiB in float32: several stay in the cache of one core
_BLOCK_TOKENS = 64
_BLOCK_VOCAB = 2048
# the log-probability of an impossible token: far below any other, and 0 times it is 0
_LOWEST = -1e30
# the exp of it is 0 in float64 too, and the product with an upstream gradient does not overflow
_NO_PROBABILITY = -1e4


def row_values(logits: Tensor, target: Tensor, shard: Shard) -> RowValues:
    """Values of all rows, over all shards: one all-reduce MAX and one all-reduce SUM."""
    stats = _block_statistics(logits, target, shard)
    top = stats[:, 0].amax(dim=0)
    if shard.is_shared(len(target)):
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=shard.group)
    sums = _rescaled_sums(stats, top, shard.temperature)
    if shard.is_shared(len(target)):
        dist.all_reduce(sums, group=shard.group)
    sum_exp, moment, target_logit, owners = sums
    # no token is possible: its own sum is 0, and no other may become NaN by it
    sum_exp = sum_exp.masked_fill(top == float("-inf"), 1.0)
    log_sum = sum_exp.log()
    # a target that no shard owns (or two do) must not look like a log-prob
    logprob = (target_logit - log_sum).masked_fill(owners != 1, float("nan"))
    entropy = log_sum - moment / sum_exp if shard.with_entropy else None
    return RowValues(logprob, entropy, top, log_sum)


def write_gradients(
    out: Tensor,
    logits: Tensor,
    target: Tensor,
    shard: Shard,
    values: RowValues,
    grad_logprob: Tensor | None,
    grad_entropy: Tensor | None,
) -> None:
    """dz = (g (onehot - p) - h p (log p + entropy)) / temperature into `out`, block by block; padding gets 0.

    A row without upstream gradient, or without a possible token, gets 0 whatever its logits are.
    """
    base = _base(values.top)
    grad = torch.zeros_like(base) if grad_logprob is None else grad_logprob.to(base.dtype)
    pull = torch.zeros_like(base) if grad_entropy is None else grad_entropy.to(base.dtype)
    is_idle = ((grad == 0) & (pull == 0) | (values.top == float("-inf")))[:, None]
    grad, pull = (grad / shard.temperature)[:, None], (pull / shard.temperature)[:, None]
    for columns in _slices(shard.num_columns, _BLOCK_VOCAB):
        local = target - (shard.vocab_start + columns.start)
        for rows in _slices(len(target), _BLOCK_TOKENS):
            logprobs = _shifted(logits[rows, columns], base[rows], shard, rows).sub_(
                values.log_sum[rows, None]
            )
            block = logprobs.exp()
            if grad_entropy is None:
                block.mul_(-grad[rows])
            else:
                assert values.entropy is not None
                surprise = logprobs.clamp_(min=_NO_PROBABILITY).add_(values.entropy[rows, None])
                block.mul_(surprise.mul_(-pull[rows]).sub_(grad[rows]))
            _add_at_target(block, local[rows], grad[rows])
            out[rows, columns] = block.masked_fill_(is_idle[rows], 0.0)
    out[:, shard.num_columns :] = 0


def _block_statistics(logits: Tensor, target: Tensor, shard: Shard) -> Tensor:
    """[blocks, 5, N]: maximum, and relative to it the sums of exp, of exp times logit, target logit, ownership."""
    blocks = list(_slices(shard.num_columns, _BLOCK_VOCAB))
    # a shard of padding alone is one block that adds nothing
    stats = logits.new_zeros((max(len(blocks), 1), 5, len(target)), dtype=compute_dtype(logits))
    stats[:, 0] = float("-inf")
    for index, columns in enumerate(blocks):
        local = target - (shard.vocab_start + columns.start)
        for rows in _slices(len(target), _BLOCK_TOKENS):
            block = logits[rows, columns]
            top, sum_exp, moment, target_logit, owned = stats[index, :, rows]
            torch.amax(block.to(top.dtype), dim=1, out=top)
            shifted = _shifted(block, _base(top), shard, rows)
            is_owned, column = _column(local[rows], shifted.shape[1])
            owned.copy_(is_owned)
            target_logit.copy_(torch.where(is_owned, shifted.gather(1, column).squeeze(1), 0.0))
            exp = shifted.exp()
            torch.sum(exp, dim=1, out=sum_exp)
            if shard.with_entropy:
                torch.sum(exp.mul_(shifted.clamp_(min=_LOWEST)), dim=1, out=moment)
    return stats


def _rescaled_sums(stats: Tensor, top: Tensor, temperature: float | Tensor) -> Tensor:
    """Add block statistics [B, 5, N] up to [4, N], each moved from its own maximum to the common one."""
    block_top, sum_exp, moment, target_logit, owned = stats.unbind(dim=1)
    shift = (block_top - _base(top)) / temperature
    scale = shift.exp()
    shift = shift.clamp(min=_LOWEST)
    return torch.stack(
        (
            (scale * sum_exp).sum(dim=0),
            (scale * (moment + shift * sum_exp)).sum(dim=0),
            torch.where(owned > 0, target_logit + shift, 0.0).sum(dim=0),
            owned.sum(dim=0),
        )
    )


def _shifted(block: Tensor, base: Tensor, shard: Shard, rows: slice) -> Tensor:
    """(logits - base) / temperature, a new tensor; subtracting first keeps the digits under a common offset."""
    shifted = block.to(base.dtype) - base[:, None]
    temperature = shard.temperature
    if isinstance(temperature, Tensor):
        return shifted.div_(temperature[rows, None])
    return shifted if temperature == 1.0 else shifted.div_(temperature)


def _base(top: Tensor) -> Tensor:
    """What to subtract: the maximum, and 0 where it is -inf, for -inf minus -inf is not a number."""
    return top.masked_fill(top == float("-inf"), 0.0)


def _add_at_target(block: Tensor, local: Tensor, grad: Tensor) -> None:
    """Add `grad` [n, 1] in the target's column of each row that has its target in this block."""
    is_owned, column = _column(local, block.shape[1])
    at_target = block.gather(1, column) + torch.where(is_owned[:, None], grad, 0.0)
    block.scatter_(1, column, at_target)


def _column(local: Tensor, num_columns: int) -> tuple[Tensor, Tensor]:
    """Whether the target lies in this block [n], and a column [n, 1] that is safe to read in any case."""
    is_owned = (local >= 0) & (local < num_columns)
    return is_owned, local.clamp(0, num_columns - 1)[:, None]


def _slices(total: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, total)) for start in range(0, total, size))

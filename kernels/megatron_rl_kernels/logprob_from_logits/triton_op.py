"""Launches of the kernels of `logprob_from_logits`; shards exchange [5, N] numbers, once, outside of them."""

from __future__ import annotations

import torch
import torch.distributed as dist
import triton
from torch import Tensor

from megatron_rl_kernels.logprob_from_logits.shards import RowValues, Shard
from megatron_rl_kernels.logprob_from_logits.triton_kernels import (
    merge_kernel,
    row_gradient_kernel,
    row_statistics_kernel,
)
from megatron_rl_kernels.triton_tools import check_last_stride

# columns per step of a row, and warps by them: 16 elements per lane keep both sums in registers
_BLOCK = 8192
_WARPS = {8192: 16, 4096: 8, 2048: 4}
_MERGE_ROWS = 256


def row_values(logits: Tensor, target: Tensor, shard: Shard) -> RowValues:
    """Values of all rows; over shards one all-gather of [5, N], which every rank adds up in the same order."""
    check_last_stride("logprob_from_logits", logits=logits)
    num_tokens = len(target)
    values = torch.empty((4, num_tokens), dtype=torch.float32, device=logits.device)
    if num_tokens:
        stats = _gathered(_row_statistics(logits, target, shard), shard)
        temperatures, temperature = _temperature(shard, like=values)
        merge_kernel[(triton.cdiv(num_tokens, _MERGE_ROWS),)](
            stats,
            temperatures,
            values,
            num_tokens,
            temperature,
            SHARDS=len(stats),
            ROW_TEMPERATURE=isinstance(shard.temperature, Tensor),
            BLOCK=_MERGE_ROWS,
            num_warps=4,
        )
    logprob, entropy, top, log_sum = values.unbind()
    return RowValues(logprob, entropy if shard.with_entropy else None, top, log_sum)


def write_gradients(
    out: Tensor,
    logits: Tensor,
    target: Tensor,
    shard: Shard,
    values: RowValues,
    grad_logprob: Tensor | None,
    grad_entropy: Tensor | None,
) -> None:
    """dz of all columns into `out`, which may be `logits`: each program reads and writes columns of its own."""
    num_tokens, width = logits.shape
    if num_tokens == 0 or width == 0:
        return
    if grad_logprob is None:
        grad_logprob = torch.zeros_like(values.top)
    block = _block(width)
    temperatures, temperature = _temperature(shard, like=values.top)
    row_gradient_kernel[(num_tokens, triton.cdiv(width, block))](
        logits,
        out,
        target.contiguous(),
        temperatures,
        values.top,
        values.log_sum,
        values.top if grad_entropy is None else values.entropy,
        grad_logprob.float().contiguous(),
        values.top if grad_entropy is None else grad_entropy.float().contiguous(),
        shard.num_columns,
        width,
        logits.stride(0),
        out.stride(0),
        shard.vocab_start,
        temperature,
        ROW_TEMPERATURE=isinstance(shard.temperature, Tensor),
        PULL=grad_entropy is not None,
        BLOCK=block,
        num_warps=_WARPS.get(block, 2),
    )
    # autograd must see that what others may have saved is gone
    torch.autograd.graph.increment_version(out)


def _row_statistics(logits: Tensor, target: Tensor, shard: Shard) -> Tensor:
    stats = torch.empty((5, len(target)), dtype=torch.float32, device=logits.device)
    block = _block(shard.num_columns)
    temperatures, temperature = _temperature(shard, like=stats)
    row_statistics_kernel[(len(target),)](
        logits,
        target.contiguous(),
        temperatures,
        stats,
        len(target),
        shard.num_columns,
        logits.stride(0),
        shard.vocab_start,
        temperature,
        ROW_TEMPERATURE=isinstance(shard.temperature, Tensor),
        ENTROPY=shard.with_entropy,
        BLOCK=block,
        num_warps=_WARPS.get(block, 2),
    )
    return stats


def _gathered(stats: Tensor, shard: Shard) -> Tensor:
    """[shards, 5, N] in the order of ranks."""
    if not shard.is_shared(stats.shape[1]):
        return stats[None]
    assert shard.group is not None
    parts = stats.new_empty((shard.group.size(), *stats.shape))
    dist.all_gather(list(parts), stats, group=shard.group)
    return parts


def _temperature(shard: Shard, *, like: Tensor) -> tuple[Tensor, float]:
    """Pointer and number, of which the kernel reads one."""
    if isinstance(shard.temperature, Tensor):
        return shard.temperature, 1.0
    return like, shard.temperature


def _block(num_columns: int) -> int:
    return max(128, min(_BLOCK, triton.next_power_of_2(max(num_columns, 1))))

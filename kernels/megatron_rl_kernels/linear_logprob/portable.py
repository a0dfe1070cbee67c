"""`linear_logprob` in plain torch, for any device: blocks of logits are made, folded and dropped.

Nothing of size [N, V] exists, in forward or backward: at most two blocks of `chunk_tokens` x `chunk_vocab`.
The derivation is in kernels/README.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """What the op knows besides its tensors. `num_rows` counts the real (not padded) rows of this shard."""

    temperature: float
    vocab_start: int
    num_rows: int
    group: dist.ProcessGroup | None
    chunk_tokens: int
    chunk_vocab: int
    with_entropy: bool
    reduce_grad_hidden: bool

    def vocab_blocks(self) -> Iterator[slice]:
        return _slices(self.num_rows, self.chunk_vocab)

    def token_chunks(self, num_tokens: int) -> Iterator[slice]:
        return _slices(num_tokens, self.chunk_tokens)


class PortableLinearLogprob(torch.autograd.Function):
    """(hidden, weight, target, head) -> (logprob, entropy or None). Saves [N] numbers, never logits."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor, head: Head
    ) -> tuple[Tensor, Tensor | None]:
        top, (sum_exp, moment, target_logit, owners) = _statistics(hidden, weight, target, head)
        log_sum = sum_exp.log()
        # shifted by the maximum, so that a common offset of the logits does not cost digits
        logprob = target_logit - log_sum
        # a target that no shard owns (or two do) must not look like a log-prob
        logprob = logprob.masked_fill(owners != 1, float("nan"))
        entropy = log_sum - moment / sum_exp if head.with_entropy else None
        ctx.head = head
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, target, top + log_sum, entropy)
        return logprob, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprob: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None]:
        grad_hidden, grad_weight = _gradients(ctx, grad_logprob, grad_entropy)
        head: Head = ctx.head
        if grad_hidden is not None and head.reduce_grad_hidden and _is_shared(head, grad_hidden):
            dist.all_reduce(grad_hidden, group=head.group)
        hidden, weight = ctx.saved_tensors[:2]
        return (
            None if grad_hidden is None else grad_hidden.to(hidden.dtype),
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None,
            None,
        )


def _statistics(hidden: Tensor, weight: Tensor, target: Tensor, head: Head) -> tuple[Tensor, Tensor]:
    """Row maximum [N], and [4, N]: sum of exp, of exp * shifted logit, target logit, owners of the target.

    "Shifted" is relative to the maximum over all shards, as is the target logit. All ranks get the same bits.
    """
    num_tokens = hidden.shape[0]
    blocks = list(head.vocab_blocks())
    stats = hidden.new_empty((len(blocks), 5, num_tokens), dtype=_compute_dtype(hidden))
    for index, rows in enumerate(blocks):
        block = weight[rows].to(stats.dtype)
        local = target - (head.vocab_start + rows.start)
        for tokens in head.token_chunks(num_tokens):
            logits = _scaled_logits(hidden[tokens].to(stats.dtype), block, head.temperature)
            stats[index, :, tokens] = _block_statistics(logits, local[tokens], head.with_entropy)
    # a shard that holds only padding takes part with an empty sum
    top = stats[:, 0].amax(dim=0) if blocks else stats.new_full((num_tokens,), float("-inf"))
    if _is_shared(head, top):
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=head.group)
    sums = _rescaled_sums(stats, top)
    if _is_shared(head, top):
        dist.all_reduce(sums, group=head.group)
    return top, sums


def _block_statistics(logits: Tensor, local: Tensor, with_entropy: bool) -> Tensor:
    """[5, n] statistics of one block [n, b], which is overwritten; `local` [n]: the target's column in it."""
    top = logits.amax(dim=1)
    shifted = logits.sub_(top[:, None])
    owned, column = _column(local, shifted.shape[1])
    target_logit = torch.where(owned, shifted.gather(1, column).squeeze(1), 0.0)
    if with_entropy:
        exp = shifted.exp()
        sum_exp = exp.sum(dim=1)
        moment = exp.mul_(shifted).sum(dim=1)
    else:
        sum_exp = shifted.exp_().sum(dim=1)
        moment = torch.zeros_like(sum_exp)
    return torch.stack((top, sum_exp, moment, target_logit, owned.to(top.dtype)))


def _rescaled_sums(stats: Tensor, top: Tensor) -> Tensor:
    """Add block statistics [B, 5, N] up to [4, N], each moved from its own maximum to the common one."""
    block_top, sum_exp, moment, target_logit, owned = stats.unbind(dim=1)
    shift = block_top - top
    scale = shift.exp()
    return torch.stack(
        (
            (scale * sum_exp).sum(dim=0),
            (scale * (moment + shift * sum_exp)).sum(dim=0),
            torch.where(owned > 0, target_logit + shift, 0.0).sum(dim=0),
            owned.sum(dim=0),
        )
    )


def _gradients(
    ctx: Any, grad_logprob: Tensor | None, grad_entropy: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients, not yet rounded; the one of `hidden` is this shard's part of the sum over vocabulary."""
    hidden, weight, target, lse, entropy = ctx.saved_tensors
    head: Head = ctx.head
    want_hidden, want_weight = ctx.needs_input_grad[:2]
    if grad_logprob is None:
        grad_logprob = torch.zeros_like(lse)
    grad_hidden = hidden.new_zeros(hidden.shape, dtype=lse.dtype) if want_hidden else None
    grad_weight = torch.zeros_like(weight) if want_weight else None
    # vocabulary outside: each block of grad_weight is finished, in full precision, before it is rounded once
    for rows in head.vocab_blocks():
        block = weight[rows].to(lse.dtype)
        grad_block = torch.zeros_like(block)
        for tokens in head.token_chunks(hidden.shape[0]):
            chunk = hidden[tokens].to(lse.dtype)
            local = target[tokens] - (head.vocab_start + rows.start)
            logprobs = _scaled_logits(chunk, block, head.temperature).sub_(lse[tokens, None])
            grad = grad_logprob[tokens, None] / head.temperature
            if grad_entropy is None:
                grad_logits = logprobs.exp_().mul_(-grad)
            else:
                pull = grad_entropy[tokens, None] / head.temperature
                grad_logits = logprobs.exp()
                grad_logits.mul_(logprobs.add_(entropy[tokens, None]).mul_(-pull).sub_(grad))
            _add_at_target(grad_logits, local, grad)
            if grad_hidden is not None:
                grad_hidden[tokens].addmm_(grad_logits, block)
            if grad_weight is not None:
                grad_block.addmm_(grad_logits.T, chunk)
        if grad_weight is not None:
            grad_weight[rows] = grad_block
    return grad_hidden, grad_weight


def _add_at_target(grad_logits: Tensor, local: Tensor, grad: Tensor) -> None:
    """Add `grad` [n, 1] in the target's column of each row that has its target in this block."""
    owned, column = _column(local, grad_logits.shape[1])
    at_target = grad_logits.gather(1, column) + torch.where(owned[:, None], grad, 0.0)
    grad_logits.scatter_(1, column, at_target)


def _column(local: Tensor, num_columns: int) -> tuple[Tensor, Tensor]:
    """Whether the target lies in this block [n], and a column [n, 1] that is safe to read in any case."""
    owned = (local >= 0) & (local < num_columns)
    return owned, local.clamp(0, num_columns - 1)[:, None]


def _scaled_logits(hidden: Tensor, rows: Tensor, temperature: float) -> Tensor:
    logits = hidden @ rows.T
    return logits if temperature == 1.0 else logits.div_(temperature)


def _compute_dtype(hidden: Tensor) -> torch.dtype:
    return torch.promote_types(hidden.dtype, torch.float32)


def _is_shared(head: Head, tensor: Tensor) -> bool:
    # N is the same on all ranks of the group, so all of them skip an empty exchange
    return head.group is not None and tensor.numel() > 0 and head.group.size() > 1


def _slices(total: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, total)) for start in range(0, total, size))

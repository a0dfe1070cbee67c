"""The differentiable op behind every implementation that works in blocks: what it saves, its loop of gradients.

An `Engine` makes the numbers of one block; exchange over ranks, order of blocks and rounding are decided here, once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_rl_kernels.linear_logprob.stats import empty_part, merge_over_group, outcome


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """What the op knows besides its differentiable tensors. `num_rows` counts the real rows of this shard."""

    inv_temperature: float | Tensor  # or [N], in the dtype of the statistics
    vocab_start: int
    num_rows: int
    group: dist.ProcessGroup | None  # None: one shard holds the whole head
    sequence_parallel: bool
    with_entropy: bool
    main_grad: Tensor | None  # [V_local, H] float32; backward adds to it
    chunk_tokens: int
    chunk_vocab: int

    def vocab_blocks(self) -> list[slice]:
        return list(_slices(self.num_rows, self.chunk_vocab))

    def token_chunks(self, num_tokens: int) -> list[slice]:
        return list(_slices(num_tokens, self.chunk_tokens))

    def inv_temperature_of(self, tokens: slice) -> float | Tensor:
        return (
            self.inv_temperature if isinstance(self.inv_temperature, float) else self.inv_temperature[tokens]
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenRows:
    """What backward knows of each token, besides its hidden state; [n] of the statistics' dtype.

    With d = z - base and e = exp(d): dz = grad onehot - e (slope + pull (d + offset)). The division of e by its sum
    is in slope and pull. Nothing here is as large as z, so that an offset shared by all logits costs no digits.
    """

    target: Tensor  # [n] int64, global ids
    base: Tensor
    inv_temperature: float | Tensor
    grad: Tensor  # upstream of the log-prob / temperature, 0 without a target
    slope: Tensor  # grad / sum of e
    pull: Tensor | None  # upstream of the entropy / temperature / sum of e; None: there is no such
    offset: Tensor | None  # entropy - log of the sum of e, where pull is given

    def part(self, tokens: slice) -> TokenRows:
        inv = self.inv_temperature
        return TokenRows(
            target=self.target[tokens],
            base=self.base[tokens],
            inv_temperature=inv if isinstance(inv, float) else inv[tokens],
            grad=self.grad[tokens],
            slope=self.slope[tokens],
            pull=None if self.pull is None else self.pull[tokens],
            offset=None if self.offset is None else self.offset[tokens],
        )


class Engine(Protocol):
    """The block work of one implementation."""

    def statistics(self, hidden: Tensor, weight: Tensor, target: Tensor, head: Head) -> Tensor:
        """[5, N] of this shard's real rows, see stats.py. Tensors are on one device, N and num_rows at least 1."""

    def operand(self, tensor: Tensor) -> Tensor:
        """A block of hidden states or weights as the products below take it."""

    def workspace(self, hidden: Tensor, num_tokens: int, num_columns: int) -> Tensor:
        """[num_tokens, num_columns] for the gradient of a block of logits; contents undefined."""

    def grad_logits(
        self, hidden: Tensor, block: Tensor, rows: TokenRows, first_column: int, out: Tensor
    ) -> None:
        """Write dz [n, b] into `out` for n tokens and b columns, the first of which has the global id given."""

    def add_product(self, out: Tensor, left: Tensor, right: Tensor, *, keep: bool) -> None:
        """out = left @ right in the precision of `out`, plus what `out` held where `keep`."""


class LinearLogprobFunction(torch.autograd.Function):
    """(hidden, weight, target, head, engine) -> (logprob, entropy or None, lse). Saves [N] numbers, never logits."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor, head: Head, engine: Engine
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        everywhere = gather_tokens(hidden, head)
        result = outcome(_statistics(everywhere, weight, target, head, engine))
        entropy = result.entropy if head.with_entropy else None
        ctx.head, ctx.engine = head, engine
        ctx.set_materialize_grads(False)
        lse = result.lse
        ctx.mark_non_differentiable(lse)
        ctx.save_for_backward(hidden, weight, target, result.base, result.sum_exp, entropy, result.has_target)
        return result.logprob, entropy, lse

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprob: Tensor | None, grad_entropy: Tensor | None, grad_lse: None
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        if grad_logprob is None and grad_entropy is None:
            return None, None, None, None, None
        hidden, weight, target, base, sum_exp, entropy, has_target = ctx.saved_tensors
        head: Head = ctx.head
        if grad_logprob is not None:
            # NaN stands where there is no target
            grad_logprob = torch.where(has_target, grad_logprob, 0.0)
        rows, active = _token_rows(head, target, base, sum_exp, entropy, grad_logprob, grad_entropy)
        # a token without gradient may hold anything, inf too: 0 * inf would reach every row of the head
        everywhere = torch.where(active[:, None], gather_tokens(hidden, head), 0.0)
        loop = _GradientLoop(everywhere, weight, rows, head, ctx.engine, *ctx.needs_input_grad[:2])
        loop.run()
        grad_hidden = loop.reduced_grad_hidden()
        return (
            None if grad_hidden is None else grad_hidden.to(hidden.dtype),
            loop.grad_weight,
            None,
            None,
            None,
        )


def is_shared(head: Head) -> bool:
    return head.group is not None and head.group.size() > 1


def gather_tokens(hidden: Tensor, head: Head) -> Tensor:
    """All tokens' hidden states [N, H]: under sequence parallelism each rank brings [N / tp, H], in rank order."""
    if not (head.sequence_parallel and is_shared(head)) or hidden.numel() == 0:
        return hidden
    assert head.group is not None
    gathered = hidden.new_empty((hidden.shape[0] * head.group.size(), hidden.shape[1]))
    dist.all_gather_into_tensor(gathered, hidden.contiguous(), group=head.group)
    return gathered


def _statistics(hidden: Tensor, weight: Tensor, target: Tensor, head: Head, engine: Engine) -> Tensor:
    if hidden.shape[0] and head.num_rows:
        stats = engine.statistics(hidden, weight, target, head)
    else:
        # a shard that holds only padding takes part with an empty sum
        stats = empty_part(hidden.shape[0], dtype=stats_dtype(hidden), device=hidden.device)
    # N is the same on all ranks of the group, so all of them skip an empty exchange
    if is_shared(head) and hidden.shape[0]:
        assert head.group is not None
        stats = merge_over_group(stats, head.group)
    return stats


def stats_dtype(hidden: Tensor) -> torch.dtype:
    return torch.promote_types(hidden.dtype, torch.float32)


def _token_rows(
    head: Head,
    target: Tensor,
    base: Tensor,
    sum_exp: Tensor,
    entropy: Tensor | None,
    grad_logprob: Tensor | None,
    grad_entropy: Tensor | None,
) -> tuple[TokenRows, Tensor]:
    """What the blocks need of each token, and which tokens [N] bool have a gradient at all.

    For the others every number is replaced: with hidden states of 0, e = exp(0) meets slopes of 0.
    """
    grad = torch.zeros_like(base) if grad_logprob is None else grad_logprob.to(base.dtype)
    active = grad != 0
    if grad_entropy is not None:
        active = active | (grad_entropy != 0)
    inv_temperature = head.inv_temperature
    if isinstance(inv_temperature, Tensor):
        inv_temperature = torch.where(active, inv_temperature, 1.0)
    grad = grad * inv_temperature
    sum_exp = torch.where(active, sum_exp, 1.0)
    pull = offset = None
    if grad_entropy is not None:
        assert entropy is not None
        pull = grad_entropy.to(base.dtype) * inv_temperature / sum_exp
        offset = torch.where(active, entropy, 0.0) - sum_exp.log()
    rows = TokenRows(
        target=target,
        base=torch.where(active, base, 0.0),
        inv_temperature=inv_temperature,
        grad=grad,
        slope=grad / sum_exp,
        pull=pull,
        offset=offset,
    )
    return rows, active


@dataclass(slots=True)
class _GradientLoop:
    """Blocks of the vocabulary outside, tokens inside: each block of the head's gradient is finished once."""

    hidden: Tensor
    weight: Tensor
    rows: TokenRows
    head: Head
    engine: Engine
    wants_hidden: bool
    wants_weight: bool
    grad_hidden: Tensor | None = None
    grad_weight: Tensor | None = None
    _pending: tuple[Tensor, dist.Work | None] | None = None
    _block_sum: Tensor | None = None
    _blocks: list[slice] = field(default_factory=list)
    _chunks: list[slice] = field(default_factory=list)

    def run(self) -> None:
        head, hidden = self.head, self.hidden
        self._blocks, self._chunks = head.vocab_blocks(), head.token_chunks(hidden.shape[0])
        self._prepare()
        longest = max((chunk.stop - chunk.start for chunk in self._chunks), default=0)
        widest = max((block.stop - block.start for block in self._blocks), default=0)
        space = self.engine.workspace(hidden, longest, widest)
        for block in self._blocks:
            weights = self.engine.operand(self.weight[block])
            destination = self._destination(block)
            for index, tokens in enumerate(self._chunks):
                states = self.engine.operand(hidden[tokens])
                grad_logits = space[: tokens.stop - tokens.start, : block.stop - block.start]
                first_column = head.vocab_start + block.start
                self.engine.grad_logits(states, weights, self.rows.part(tokens), first_column, grad_logits)
                if self.grad_hidden is not None:
                    self.engine.add_product(self.grad_hidden[tokens], grad_logits, weights, keep=True)
                if block is self._blocks[-1] and tokens is self._chunks[-1]:
                    # on its way while the last block of the head's gradient is made
                    self._start_reduction()
                if destination is not None:
                    keep = index > 0 or self._adds_in_place()
                    self.engine.add_product(destination, grad_logits.T, states, keep=keep)
            self._finish(block)

    def _prepare(self) -> None:
        hidden, weight, head = self.hidden, self.weight, self.head
        dtype = stats_dtype(hidden)
        if self.wants_hidden:
            self.grad_hidden = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
        if not self.wants_weight:
            return
        if head.main_grad is None:
            self.grad_weight = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
            # rows of padding, or all of them where there is no token
            self.grad_weight[head.num_rows if self._chunks else 0 :] = 0
        if not (self._adds_in_place() or self._writes_in_place()):
            widest = min(head.chunk_vocab, head.num_rows)
            self._block_sum = torch.empty((widest, weight.shape[1]), dtype=dtype, device=weight.device)

    def _adds_in_place(self) -> bool:
        # with several token chunks the block is summed first: rounding then does not depend on what was there
        main_grad = self.head.main_grad
        return (
            main_grad is not None and len(self._chunks) <= 1 and main_grad.dtype == stats_dtype(self.hidden)
        )

    def _writes_in_place(self) -> bool:
        return self.grad_weight is not None and self.grad_weight.dtype == stats_dtype(self.hidden)

    def _destination(self, block: slice) -> Tensor | None:
        if not self.wants_weight:
            return None
        if self._block_sum is not None:
            return self._block_sum[: block.stop - block.start]
        whole = self.head.main_grad if self._adds_in_place() else self.grad_weight
        assert whole is not None
        return whole[block]

    def _finish(self, block: slice) -> None:
        if self._block_sum is None or not self._chunks:
            return
        finished = self._block_sum[: block.stop - block.start]
        if self.head.main_grad is not None:
            self.head.main_grad[block].add_(finished)
        elif self.grad_weight is not None:
            self.grad_weight[block] = finished

    def _start_reduction(self) -> None:
        """Sum the hidden states' gradients of all shards, before they are rounded."""
        if self.grad_hidden is None:
            return
        if not is_shared(self.head) or self.grad_hidden.numel() == 0:
            self._pending = (self.grad_hidden, None)
            return
        group = self.head.group
        assert group is not None
        if self.head.sequence_parallel:
            mine = self.grad_hidden.new_empty((self.hidden.shape[0] // group.size(), self.hidden.shape[1]))
            work = dist.reduce_scatter_tensor(mine, self.grad_hidden, group=group, async_op=True)
            self._pending = (mine, work)
        else:
            self._pending = (self.grad_hidden, dist.all_reduce(self.grad_hidden, group=group, async_op=True))

    def reduced_grad_hidden(self) -> Tensor | None:
        """float32 (float64), [N, H], or this rank's [N / tp, H] under sequence parallelism."""
        if self._pending is None:
            # a shard of padding alone made no block
            self._start_reduction()
        if self._pending is None:
            return None
        grad, work = self._pending
        if work is not None:
            work.wait()
        return grad


def _slices(total: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, total)) for start in range(0, total, size))

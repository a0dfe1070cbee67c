"""The block work of `linear_logprob` in plain torch, for any device: blocks of logits are made, folded and dropped.

Products and sums are float32 whatever the inputs (float64 for float64). On a CPU the passes after each product run
over slices that stay in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_rl_kernels.linear_logprob.autograd import Head, TokenRows, stats_dtype
from megatron_rl_kernels.linear_logprob.stats import LOWEST_SHIFT, NUM_STATISTICS, base_of, merge_parts

# of one slice of logits: two of them fit a core's second-level cache
_SLICE_BYTES = 512 * 1024


class PortableEngine:
    """Blocks in torch, see autograd.Engine."""

    def statistics(self, hidden: Tensor, weight: Tensor, target: Tensor, head: Head) -> Tensor:
        num_tokens = hidden.shape[0]
        blocks, chunks = head.vocab_blocks(), head.token_chunks(num_tokens)
        space = self.workspace(hidden, chunks[0].stop, blocks[0].stop)
        parts = space.new_empty((len(blocks), NUM_STATISTICS, num_tokens))
        for index, rows in enumerate(blocks):
            block = self.operand(weight[rows])
            local = target - (head.vocab_start + rows.start)
            for tokens in chunks:
                states = _scaled(self.operand(hidden[tokens]), head.inv_temperature_of(tokens))
                logits = space[: len(states), : len(block)]
                torch.mm(states, block.T, out=logits)
                _fold(logits, local[tokens], head.with_entropy, out=parts[index, :, tokens])
        return merge_parts(parts)

    def operand(self, tensor: Tensor) -> Tensor:
        return tensor.to(stats_dtype(tensor))

    def workspace(self, hidden: Tensor, num_tokens: int, num_columns: int) -> Tensor:
        return torch.empty((num_tokens, num_columns), dtype=stats_dtype(hidden), device=hidden.device)

    def grad_logits(
        self, hidden: Tensor, block: Tensor, rows: TokenRows, first_column: int, out: Tensor
    ) -> None:
        torch.mm(_scaled(hidden, rows.inv_temperature), block.T, out=out)
        for part in _cached_rows(out):
            _differentiate(out[part], rows.part(part))
        _add_at_target(out, rows.target - first_column, rows.grad)

    def add_product(self, out: Tensor, left: Tensor, right: Tensor, *, keep: bool) -> None:
        # with beta = 0 torch does not read `out`
        out.addmm_(left, right, beta=1 if keep else 0)


def _scaled(states: Tensor, inv_temperature: float | Tensor) -> Tensor:
    """Temperature goes on the hidden states, which are fewer than the logits."""
    if isinstance(inv_temperature, float):
        return states if inv_temperature == 1.0 else states * inv_temperature
    return states * inv_temperature[:, None]


def _fold(logits: Tensor, local: Tensor, with_entropy: bool, *, out: Tensor) -> None:
    """Statistics of one block [n, b], which is overwritten, into `out` [5, n]; `local` [n]: the target's column."""
    owned, column = _column(local, logits.shape[1])
    for part in _cached_rows(logits):
        shifted = logits[part]
        top = shifted.amax(dim=1)
        shifted.sub_(base_of(top)[:, None])
        at_target = shifted.gather(1, column[part]).squeeze(1)
        if with_entropy:
            exp = shifted.exp()
            sum_exp = exp.sum(dim=1)
            # exp is 0 where the logit is -inf, and 0 * -inf would be NaN
            moment = exp.mul_(shifted.clamp_(min=LOWEST_SHIFT)).sum(dim=1)
        else:
            sum_exp = shifted.exp_().sum(dim=1)
            moment = torch.zeros_like(sum_exp)
        holds = owned[part]
        torch.stack(
            (top, sum_exp, moment, torch.where(holds, at_target, 0.0), holds.to(top.dtype)),
            out=out[:, part],
        )


def _differentiate(logits: Tensor, rows: TokenRows) -> None:
    """Logits [n, b] -> dz but for the target's column, in place."""
    shifted = logits.sub_(rows.base[:, None])
    if rows.pull is None:
        shifted.exp_().mul_(-rows.slope[:, None])
        return
    assert rows.offset is not None
    exp = shifted.exp()
    # exp is 0 where the logit is -inf, and 0 * -inf would be NaN
    shifted.clamp_(min=LOWEST_SHIFT)
    # -(slope + pull (shifted + offset)) as one product and one sum per logit
    constant = -(rows.slope + rows.pull * rows.offset)
    shifted.mul_(-rows.pull[:, None]).add_(constant[:, None]).mul_(exp)


def _add_at_target(grad_logits: Tensor, local: Tensor, grad: Tensor) -> None:
    """Add `grad` [n] in the target's column of each row that has its target in this block."""
    owned, column = _column(local, grad_logits.shape[1])
    at_target = grad_logits.gather(1, column) + torch.where(owned, grad, 0.0)[:, None]
    grad_logits.scatter_(1, column, at_target)


def _column(local: Tensor, num_columns: int) -> tuple[Tensor, Tensor]:
    """Whether the target lies in this block [n], and a column [n, 1] that is safe to read in any case."""
    owned = (local >= 0) & (local < num_columns)
    return owned, local.clamp(0, num_columns - 1)[:, None]


def _cached_rows(block: Tensor) -> Iterator[slice]:
    num_rows, num_columns = block.shape
    step = num_rows
    if block.device.type == "cpu":
        step = max(1, _SLICE_BYTES // (num_columns * block.element_size()))
    return (slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step))

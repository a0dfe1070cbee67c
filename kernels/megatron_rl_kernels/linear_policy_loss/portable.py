"""The head of one token chunk in plain torch, any device: blocks of columns, finished one by one while in cache.

What stays between the two halves is one [chunk, V_local] workspace, written by the logit product's epilogue and turned
into the gradient of the logits in place. The derivation is in README.md.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_rl_kernels.linear_logprob.stats import (
    MOMENT,
    OWNERS,
    SUM,
    TARGET,
    TOP,
    base_of,
    empty_part,
    merge_parts,
)
from megatron_rl_kernels.linear_policy_loss.types import TokenValues

# columns of a block: 256 tokens of them in float32 are 4 MiB, between a core's second and third level cache
BLOCK_COLUMNS = 4096
# bytes of the workspace where the caller does not say how many tokens a chunk has
WORKSPACE_BYTES = 160 << 20
# far below the underflow of exp, and finite: 0 * -inf would be NaN
_LOWEST = -1e4


def default_chunk_tokens(num_rows: int, dtype: torch.dtype) -> int:
    """Tokens whose logits fill the workspace, a multiple of 32, at least 64."""
    fitting = WORKSPACE_BYTES // (max(num_rows, 1) * torch.finfo(dtype).bits // 8)
    return max(fitting // 32 * 32, 64)


class PortableHead:
    """Logits of a chunk: statistics first, then gradients of the same chunk from what the workspace kept.

    weight [V_local, H]; its first `num_rows` rows are real, the rest is padding. `keep`: gradients will follow.
    `with_entropy_gradient`: so will one of the entropy; then the workspace keeps shifted logits, else their exp.
    """

    def __init__(
        self,
        weight: Tensor,
        *,
        num_rows: int,
        chunk_tokens: int,
        keep: bool,
        with_entropy_gradient: bool,
    ) -> None:
        self._weight = weight
        self._num_rows = num_rows
        self._keeps = keep
        self._keeps_exp = not with_entropy_gradient
        self._dtype = torch.promote_types(weight.dtype, torch.float32)
        width = min(BLOCK_COLUMNS, num_rows)
        self._spare = weight.new_empty(chunk_tokens * width, dtype=self._dtype)
        self._kept = weight.new_empty(chunk_tokens * (num_rows if keep else width), dtype=self._dtype)

    def statistics(self, chunk: Tensor, column: Tensor, temperature: float | Tensor) -> Tensor:
        """[5, n] statistics of this shard, see linear_logprob/stats.py.

        chunk [n, H] hidden states; column [n]: the target's row of `weight`, if it has one; temperature [n] or float.
        """
        self._temperature = temperature[:, None] if isinstance(temperature, Tensor) else temperature
        # dividing n H numbers here spares n V later
        self._chunk = chunk.to(self._dtype) / self._temperature
        self._column = column
        blocks = list(self._blocks())
        stats = self._chunk.new_empty((len(blocks), 5, chunk.shape[0]))
        for out, rows in zip(stats, blocks, strict=True):
            kept, spare = self._buffers(rows)
            logits, exp = (spare, kept) if self._keeps_exp else (kept, spare)
            torch.mm(self._chunk, self._rows(rows).T, out=logits)
            _block_statistics(logits, exp, column - rows.start, out)
            torch.sum(spare.mul_(kept), dim=1, out=out[MOMENT])
        self._tops = list(stats[:, TOP])
        if not blocks:
            return empty_part(chunk.shape[0], dtype=self._dtype, device=chunk.device)
        return merge_parts(stats)

    def gradients(
        self,
        grad: Tensor,
        grad_entropy: Tensor | None,
        values: TokenValues,
        *,
        grad_chunk: Tensor | None,
        grad_weight: Tensor | None,
        is_first: bool,
    ) -> None:
        """Gradients of the chunk given to `statistics` just before; the workspace is used up.

        grad, grad_entropy [n]: d loss / d logprob, / d entropy. `grad_chunk` [n, H] is overwritten with this
        shard's part; `grad_weight` [V_local, H] is overwritten if `is_first`, else added to.
        """
        blocks = list(self._blocks())
        # backwards: the blocks written last are the ones still in cache
        for index in reversed(range(len(blocks))):
            rows = blocks[index]
            kept, spare = self._buffers(rows)
            self._to_gradient(kept, spare, self._tops[index], grad, grad_entropy, values)
            _add_at_target(kept, self._column - rows.start, grad)
            if grad_chunk is not None:
                grad_chunk.addmm_(kept, self._rows(rows), beta=int(index < len(blocks) - 1))
            if grad_weight is not None:
                grad_weight[rows].addmm_(kept.T, self._chunk, beta=int(not is_first))
        if grad_chunk is not None and blocks:
            grad_chunk.div_(self._temperature)
        elif grad_chunk is not None:
            grad_chunk.zero_()

    def _to_gradient(
        self,
        kept: Tensor,
        spare: Tensor,
        top: Tensor,
        grad: Tensor,
        grad_entropy: Tensor | None,
        values: TokenValues,
    ) -> None:
        """d loss / d scaled logits in place, but for the `grad` that the target's column gets on top."""
        shift = base_of(top) - values.top - values.log_sum
        if grad_entropy is None:
            kept.mul_((shift.exp() * -grad)[:, None])
            return
        logprobs = kept.add_(shift[:, None])
        probs = torch.exp(logprobs, out=spare)
        # -(grad + grad_entropy (logprob + entropy)) p
        pull = (grad_entropy * values.entropy + grad)[:, None]
        logprobs.mul_(grad_entropy[:, None]).add_(pull).mul_(probs).neg_()

    def _buffers(self, rows: slice) -> tuple[Tensor, Tensor]:
        """What is kept of this block and a spare of the same shape [n, b], both contiguous."""
        num_tokens, width = self._chunk.shape[0], rows.stop - rows.start
        start = rows.start * num_tokens if self._keeps else 0
        kept = self._kept[start : start + width * num_tokens]
        return kept.view(num_tokens, width), self._spare[: width * num_tokens].view(num_tokens, width)

    def _rows(self, rows: slice) -> Tensor:
        return self._weight[rows].to(self._dtype)

    def _blocks(self) -> Iterator[slice]:
        starts = range(0, self._num_rows, BLOCK_COLUMNS)
        return (slice(start, min(start + BLOCK_COLUMNS, self._num_rows)) for start in starts)


def _block_statistics(logits: Tensor, exp: Tensor, column: Tensor, out: Tensor) -> None:
    """Fill `out` [5, n] but for MOMENT; `logits` [n, b] become relative to their maximum, `exp` their exp."""
    torch.amax(logits, dim=1, out=out[TOP])
    logits.sub_(base_of(out[TOP])[:, None])
    owned = (column >= 0) & (column < logits.shape[1])
    at_target = logits.gather(1, column.clamp(0, logits.shape[1] - 1)[:, None]).squeeze(1)
    out[TARGET] = torch.where(owned, at_target, 0.0)
    out[OWNERS] = owned
    torch.exp(logits.clamp_(min=_LOWEST), out=exp)
    torch.sum(exp, dim=1, out=out[SUM])


def _add_at_target(grad_logits: Tensor, column: Tensor, grad: Tensor) -> None:
    """Add `grad` [n] in the target's column of each row that has its target in this block [n, b]."""
    owned = (column >= 0) & (column < grad_logits.shape[1])
    safe = column.clamp(0, grad_logits.shape[1] - 1)[:, None]
    # one column of each row, so nothing depends on an order, as it would in scatter_add
    grad_logits.scatter_(1, safe, grad_logits.gather(1, safe) + torch.where(owned, grad, 0.0)[:, None])

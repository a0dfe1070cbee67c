"""The autograd function of `logprob_from_logits`: keeps the logits and [N] numbers, leaves the work to a backend."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_rl_kernels.logprob_from_logits.shards import Backend, RowValues, Shard


class LogprobFromLogits(torch.autograd.Function):
    """(logits, target, shard, backend) -> (logprob, entropy or None, lse)."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, shard: Shard, backend: Backend
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        values = backend.row_values(logits, target, shard)
        lse = values.top / shard.temperature + values.log_sum
        ctx.shard, ctx.backend, ctx.is_spent = shard, backend, False
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(lse)
        ctx.save_for_backward(logits, target, *values)
        return values.logprob, values.entropy, lse

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprob: Tensor | None, grad_entropy: Tensor | None, _grad_lse: None
    ) -> tuple[Tensor | None, None, None, None]:
        shard: Shard = ctx.shard
        if ctx.is_spent:
            raise RuntimeError(
                "logprob_from_logits_: backward ran before and overwrote the logits with their gradient; call "
                "logprob_from_logits where backward runs more than once"
            )
        logits, target, *values = ctx.saved_tensors
        if grad_logprob is None and grad_entropy is None:
            return None, None, None, None
        if grad_logprob is not None:
            # no shard has the target: its log-prob says so with NaN and is no function of the logits. NaN logits
            # show in the normaliser too, and stay NaN in the gradient
            is_lost = values[0].isnan() & ~values[-1].isnan()
            grad_logprob = grad_logprob.masked_fill(is_lost, 0.0)
        ctx.is_spent = shard.overwrites_logits
        out = logits.detach() if shard.overwrites_logits else torch.empty_like(logits)
        ctx.backend.write_gradients(
            out, logits, target, shard, RowValues(*values), grad_logprob, grad_entropy
        )
        return out, None, None, None

"""The meaning of `linear_logprob`: plain autograd, works in float64, materialises all logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LinearLogprob:
    """Result for N tokens, in nats: float32 (float64 for float64 inputs)."""

    logprob: Tensor  # [N] of the target token
    entropy: Tensor | None  # [N] of the whole next-token distribution; None where it was not asked for
    lse: Tensor  # [N] log-sum-exp of the logits, without gradient


def linear_logprob_reference(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    vocab_start: int = 0,
    valid_vocab: int | None = None,
    group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    with_entropy: bool = True,
    main_grad: Tensor | None = None,
) -> LinearLogprob:
    """Log-softmax of `hidden @ weight.T / temperature` at `target`, and its entropy.

    Arguments as for `linear_logprob`. Over a group every rank gathers the whole head and all tokens, and computes
    the whole result: nothing is left to add up.
    """
    if main_grad is not None:
        weight = _AddTo.apply(weight, main_grad)
    if group is not None and group.size() > 1:
        weight = _Gather.apply(weight, group)
        first = torch.tensor([vocab_start], device=target.device)
        vocab_start = int(_gathered(first, group)[0])
        if sequence_parallel:
            hidden = _Gather.apply(hidden, group)
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    num_real = weight.shape[0] if valid_vocab is None else valid_vocab - vocab_start
    logits = hidden.to(dtype) @ weight[:num_real].to(dtype).T  # [N, V]
    if isinstance(temperature, Tensor):
        usable = torch.isfinite(temperature) & (temperature > 0)
        temperature = torch.where(usable, temperature, float("nan")).to(dtype)[:, None]
    logprobs = torch.log_softmax(logits / temperature, dim=1)
    local = target - vocab_start
    is_real = (local >= 0) & (local < logprobs.shape[1])
    chosen = logprobs.gather(1, torch.where(is_real, local, 0)[:, None]).squeeze(1)
    # p log p is 0 where p is 0
    weighted = logprobs.exp() * logprobs.masked_fill(logprobs == float("-inf"), 0.0)
    return LinearLogprob(
        logprob=torch.where(is_real, chosen, float("nan")),
        entropy=-weighted.sum(dim=1) if with_entropy else None,
        lse=torch.logsumexp(logits.detach() / temperature, dim=1),
    )


def _gathered(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Rows of all ranks in rank order; ranks may have different numbers of them."""
    lengths = [torch.zeros(1, dtype=torch.int64, device=tensor.device) for _ in range(group.size())]
    dist.all_gather(lengths, torch.tensor([tensor.shape[0]], device=tensor.device), group=group)
    longest = int(torch.cat(lengths).max())
    padded = tensor.new_zeros((longest, *tensor.shape[1:]))
    padded[: tensor.shape[0]] = tensor
    shards = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(shards, padded, group=group)
    return torch.cat([shard[: int(length)] for shard, length in zip(shards, lengths, strict=True)])


class _Gather(torch.autograd.Function):
    """Rows of all ranks; the gradient of this rank's rows is its part of what every rank computes in full."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        length = torch.tensor([tensor.shape[0]], device=tensor.device)
        first = int(_gathered(length, group)[: group.rank()].sum())
        ctx.mine = slice(first, first + tensor.shape[0])
        return _gathered(tensor.detach(), group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad[ctx.mine], None


class _AddTo(torch.autograd.Function):
    """The weight itself; its gradient goes to `main_grad` instead of autograd."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, main_grad: Tensor) -> Tensor:
        ctx.main_grad = main_grad
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        ctx.main_grad.add_(grad)
        return None, None

"""The meaning of `linear_logprob`: plain autograd, works in float64, materialises all logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LinearLogprob:
    """Result for N tokens, in nats. `entropy` is None where it was not asked for."""

    logprob: Tensor           # [N] float32 (float64 for float64 inputs), of the target token
    entropy: Tensor | None    # [N] same dtype, of the whole next-token distribution


def linear_logprob_reference(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    temperature: float = 1.0,
    valid_vocab: int | None = None,
) -> LinearLogprob:
    """Log-softmax of `hidden @ weight.T / temperature` at `target`, and its entropy, for an unsharded head.

    hidden [N, H], weight [V, H], target [N] int64. Rows of `weight` from `valid_vocab` on are padding.
    """
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    rows = weight if valid_vocab is None else weight[:valid_vocab]
    logits = hidden.to(dtype) @ rows.to(dtype).T / temperature  # [N, V]
    logprobs = torch.log_softmax(logits, dim=1)
    entropy = -(logprobs.exp() * logprobs).sum(dim=1)
    return LinearLogprob(logprobs.gather(1, target[:, None]).squeeze(1), entropy)

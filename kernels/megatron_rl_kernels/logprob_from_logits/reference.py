"""The meaning of `logprob_from_logits`: plain autograd over whole rows, works in float64, for unsharded logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LogitsLogprob:
    """Result for N tokens, in nats, float32 (float64 for float64 logits)."""

    logprob: Tensor  # [N], of the target token at the given temperature
    entropy: Tensor | None  # [N], of the whole distribution; None where it was not asked for
    lse: Tensor  # [N], log sum exp(logits / temperature); carries no gradient


def logprob_from_logits_reference(
    logits: Tensor,
    target: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    vocab_start: int = 0,
    valid_vocab: int | None = None,
    with_entropy: bool = True,
) -> LogitsLogprob:
    """Log-softmax of `logits / temperature` at `target`, its entropy and its normaliser; arguments as the op's.

    Columns of logits [N, V] hold the ids from `vocab_start` on, those at or beyond `valid_vocab` are padding. A row
    of -inf alone has log-prob and lse -inf, entropy 0 and no gradient; a target outside the columns gives NaN.
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    columns = logits if valid_vocab is None else logits[:, : max(valid_vocab - vocab_start, 0)]
    scale = temperature[:, None] if isinstance(temperature, Tensor) else temperature
    scaled = columns.to(dtype) / scale  # [N, V]
    is_impossible = scaled == float("-inf")
    is_empty = is_impossible.all(dim=1)
    logprobs = torch.log_softmax(scaled.masked_fill(is_empty[:, None], 0.0), dim=1)
    local = target - vocab_start
    is_owned = (local >= 0) & (local < logprobs.shape[1])
    chosen = logprobs.gather(1, local.clamp(0, logprobs.shape[1] - 1)[:, None]).squeeze(1)
    logprob = chosen.masked_fill(is_empty, float("-inf")).masked_fill(~is_owned, float("nan"))
    entropy = None
    if with_entropy:
        # p log p is 0 where p is 0, by a logit of -inf or by a difference of logits beyond float32
        weighted = logprobs.exp() * logprobs.masked_fill(logprobs == float("-inf"), 0.0)
        entropy = -weighted.sum(dim=1).masked_fill(is_empty, 0.0)
    return LogitsLogprob(logprob, entropy, torch.logsumexp(scaled.detach(), dim=1))

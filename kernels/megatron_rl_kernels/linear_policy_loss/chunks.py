"""Which tokens a call works on and in which chunks: masked tokens are dropped, sequences are kept whole if they can.

A masked token never meets the head: multiplying its row by zero would let an inf in it turn gradients into NaN.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_rl_kernels.linear_policy_loss.types import PolicyInputs


@dataclass(frozen=True, slots=True)
class Chunk:
    """Trained tokens start .. stop; `first_bound`, `last_bound`: entries of cu_seqlens that bound their sequences."""

    start: int
    stop: int
    first_bound: int = 0
    last_bound: int = 0

    @property
    def tokens(self) -> slice:
        return slice(self.start, self.stop)


def keep_trained(inputs: PolicyInputs, dtype: torch.dtype) -> tuple[Tensor, PolicyInputs]:
    """Positions [n] of the trained tokens, and the inputs of these alone in `dtype`; sequences may become empty.

    The one place where the host waits for the device: the number of trained tokens shapes all that follows.
    """
    index = inputs.mask.nonzero().squeeze(1)
    # a mask of the trained ones is all True
    kept = inputs.map(
        lambda tensor: tensor.detach()[index].to(torch.bool if tensor.dtype == torch.bool else dtype)
    )
    if inputs.cu_seqlens is not None:
        before = torch.nn.functional.pad(inputs.mask.cumsum(0), (1, 0))
        kept = replace(kept, cu_seqlens=before[inputs.cu_seqlens.long()].int())
    return index, kept


def plan_tokens(num_tokens: int, chunk_tokens: int) -> list[Chunk]:
    """Chunks of `chunk_tokens`, the last may be shorter."""
    starts = range(0, num_tokens, chunk_tokens)
    return [Chunk(start, min(start + chunk_tokens, num_tokens)) for start in starts]


def plan_sequences(bounds: list[int], chunk_tokens: int) -> list[Chunk] | None:
    """Chunks of whole sequences of at most `chunk_tokens` tokens; None where one sequence is longer than that.

    `bounds`: cu_seqlens of the trained tokens. A chunk takes as many sequences as fit; empty ones go along.
    """
    chunks: list[Chunk] = []
    first = 0
    for last in range(1, len(bounds)):
        if bounds[last] - bounds[last - 1] > chunk_tokens:
            return None
        if bounds[last] - bounds[first] > chunk_tokens:
            chunks.append(Chunk(bounds[first], bounds[last - 1], first, last - 1))
            first = last - 1
    if first < len(bounds) - 1 and bounds[-1] > bounds[first]:
        chunks.append(Chunk(bounds[first], bounds[-1], first, len(bounds) - 1))
    return chunks

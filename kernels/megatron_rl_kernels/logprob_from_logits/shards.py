"""What one shard of `logprob_from_logits` knows besides its tensors, and the row numbers kept for backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """`num_columns` counts the real (not padded) columns of this shard, from its first on."""

    temperature: float | Tensor  # scalar, or [N] float32 (float64 for float64 logits)
    vocab_start: int
    num_columns: int
    group: dist.ProcessGroup | None
    with_entropy: bool
    overwrites_logits: bool

    def is_shared(self, num_tokens: int) -> bool:
        # N is the same on all ranks of the group, so all of them skip an empty exchange
        return self.group is not None and num_tokens > 0 and self.group.size() > 1


class RowValues(NamedTuple):
    """Of N rows over all shards, in the dtype of the results; the same bits on all ranks."""

    logprob: Tensor  # [N] nats
    entropy: Tensor | None  # [N] nats
    top: Tensor  # [N] largest logit, before the temperature; -inf where no token is possible
    log_sum: Tensor  # [N] log of sum exp((logit - top) / temperature); 0 where no token is possible


class Backend(Protocol):
    """The two halves of an implementation: a module is one."""

    def row_values(self, logits: Tensor, target: Tensor, shard: Shard) -> RowValues: ...

    def write_gradients(
        self,
        out: Tensor,
        logits: Tensor,
        target: Tensor,
        shard: Shard,
        values: RowValues,
        grad_logprob: Tensor | None,
        grad_entropy: Tensor | None,
    ) -> None:
        """Write dz of all columns of the shard, padding included, to `out`, which may be `logits` itself."""
        ...


def compute_dtype(logits: Tensor) -> torch.dtype:
    """float32, and float64 for float64 logits."""
    return torch.promote_types(logits.dtype, torch.float32)

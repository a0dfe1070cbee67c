"""What the ops that take a head refuse alike, and which of its rows are real."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor


def real_rows(
    op: str, weight: Tensor, vocab_start: int, valid_vocab: int | None, group: dist.ProcessGroup | None
) -> int:
    """How many rows of this shard, from its first on, are not padding.

    Raises ValueError for bounds without meaning, and for a head of padding alone that is no shard of a group.
    """
    if vocab_start < 0 or (valid_vocab is not None and valid_vocab < 1):
        raise ValueError(
            f"{op}: vocab_start = {vocab_start} must be at least 0, valid_vocab = {valid_vocab} at least 1"
        )
    rows = weight.shape[0]
    num_rows = rows if valid_vocab is None else min(rows, max(valid_vocab - vocab_start, 0))
    if num_rows == 0 and group is None:
        raise ValueError(
            f"{op}: weight {tuple(weight.shape)} has no real row at vocab_start = {vocab_start}, valid_vocab = "
            f"{valid_vocab}; only one shard of several may be all padding: pass group"
        )
    return num_rows


def check_main_grad_memory(op: str, main_grad: Tensor, weight: Tensor) -> None:
    """Raise ValueError for a buffer whose elements share memory, with each other or with the head itself."""
    shared = any(
        size > 1 and stride == 0 for size, stride in zip(main_grad.shape, main_grad.stride(), strict=True)
    )
    if shared:
        raise ValueError(
            f"{op}: main_grad {tuple(main_grad.shape)} of stride {main_grad.stride()} is expanded: its elements share "
            "memory and cannot be added to; pass a buffer with memory for each"
        )
    if main_grad.numel() and main_grad.device.type != "meta" and main_grad.data_ptr() == weight.data_ptr():
        raise ValueError(f"{op}: main_grad is the memory of weight; pass a buffer of its own")

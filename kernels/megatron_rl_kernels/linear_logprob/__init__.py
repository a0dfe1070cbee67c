"""Log-prob of a target token and entropy of the distribution, straight from hidden states and the head.

The fusion keeps memory flat: logits of [N, V] never exist. `reference` defines the op, `portable` runs it.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl_kernels.linear_logprob.portable import Head, PortableLinearLogprob
from megatron_rl_kernels.linear_logprob.reference import LinearLogprob, linear_logprob_reference

__all__ = ["LinearLogprob", "linear_logprob", "linear_logprob_reference"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    temperature: float = 1.0,
    vocab_start: int = 0,
    valid_vocab: int | None = None,
    group: dist.ProcessGroup | None = None,
    reduce_grad_hidden: bool = True,
    chunk_tokens: int = 1024,
    chunk_vocab: int = 4096,
    with_entropy: bool = True,
) -> LinearLogprob:
    """log softmax(hidden @ weight.T / temperature)[target] and entropy, differentiable in hidden and weight.

    hidden [N, H]; weight [V_local, H] of the same dtype: rows vocab_start .. vocab_start + V_local of the
    head; target [N] int64 global token ids, any valid id where the loss is masked (one that no shard owns
    gives NaN). `valid_vocab` is the global number of real rows: rows at or beyond it are padding, take no
    part and get zero gradient; None: all rows are real. Results are float32 (float64 for float64 inputs).

    `group` is the tensor-parallel group (None: `weight` is the whole head). Forward all-reduces [N]
    statistics, MAX once and SUM once, and all ranks get the same bits. Every rank passes the same hidden,
    target and, in backward, upstream gradients. The gradient of `hidden` from one shard is a partial sum:
    `reduce_grad_hidden` adds it up over the group here, in float32; pass False where the caller's gather does
    so (sequence parallel).

    At most two blocks of chunk_tokens x min(chunk_vocab, V_local) logits exist at once; backward recomputes
    them. Raises TypeError or ValueError for arguments that do not fit each other.
    """
    _check_tensors(hidden, weight, target)
    _check_positive(temperature=temperature, chunk_tokens=chunk_tokens, chunk_vocab=chunk_vocab)
    num_rows = _real_rows(weight, vocab_start, valid_vocab)
    if num_rows == 0 and group is None:
        raise ValueError(
            f"linear_logprob: weight {tuple(weight.shape)} has no real row at vocab_start = {vocab_start}, "
            f"valid_vocab = {valid_vocab}; only one shard of several may be all padding: pass group"
        )
    head = Head(
        temperature=temperature,
        vocab_start=vocab_start,
        num_rows=num_rows,
        group=group,
        chunk_tokens=chunk_tokens,
        chunk_vocab=chunk_vocab,
        with_entropy=with_entropy,
        reduce_grad_hidden=reduce_grad_hidden,
    )
    return LinearLogprob(*PortableLinearLogprob.apply(hidden, weight, target, head))


def _check_tensors(hidden: Tensor, weight: Tensor, target: Tensor) -> None:
    where = "linear_logprob: got"
    shapes = f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}, target {tuple(target.shape)}"
    if hidden.ndim != 2 or weight.ndim != 2 or target.ndim != 1:
        raise ValueError(f"{where} {shapes}; expected hidden [N, H], weight [V_local, H], target [N]")
    if hidden.shape[1] != weight.shape[1] or hidden.shape[0] != target.shape[0]:
        raise ValueError(f"{where} {shapes}; H of hidden and weight, N of hidden and target must agree")
    if hidden.dtype not in _DTYPES or weight.dtype != hidden.dtype:
        raise TypeError(
            f"{where} hidden of {hidden.dtype} and weight of {weight.dtype}; both must be the same one of "
            + ", ".join(str(dtype) for dtype in _DTYPES)
        )
    if target.dtype != torch.int64:
        raise TypeError(f"{where} target of {target.dtype}, must be torch.int64")
    if not hidden.device == weight.device == target.device:
        raise ValueError(
            f"{where} hidden on {hidden.device}, weight on {weight.device}, target on {target.device}; "
            "put them on one device"
        )


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"linear_logprob: {name} = {value}, must be finite and above 0")


def _real_rows(weight: Tensor, vocab_start: int, valid_vocab: int | None) -> int:
    """How many rows of this shard, from its first on, are not padding."""
    if vocab_start < 0 or (valid_vocab is not None and valid_vocab < 1):
        raise ValueError(
            f"linear_logprob: vocab_start = {vocab_start} must be at least 0, "
            f"valid_vocab = {valid_vocab} at least 1"
        )
    rows = weight.shape[0]
    return rows if valid_vocab is None else min(rows, max(valid_vocab - vocab_start, 0))

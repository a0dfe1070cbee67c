"""`logprob_from_logits` in C++: the bodies of kernels/csrc on the CPU (`host`) or as CUDA kernels (`cuda`).

A backend as `shards.Backend` describes it. One kernel reads each row once in forward, one reads and writes it once in
backward; shards exchange [4, N] numbers outside of them.
"""

from __future__ import annotations

import ctypes

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl_kernels import native
from megatron_rl_kernels.logprob_from_logits.shards import RowValues, Shard

# logits are float32 or bfloat16; results float32
DTYPES = (torch.float32, torch.bfloat16)


class _Inputs(ctypes.Structure):
    """struct RowInputs."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("logits", "target", "temperatures")),
        *((name, ctypes.c_int64) for name in ("rows", "width", "num_columns", "stride", "vocab_start")),
        ("temperature", ctypes.c_float),
    ]


class _Gradients(ctypes.Structure):
    """struct RowGradients."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("top", "log_sum", "entropy", "grad_logprob", "grad_entropy")),
        ("out_stride", ctypes.c_int64),
    ]


def row_values(logits: Tensor, target: Tensor, shard: Shard) -> RowValues:
    """Values of all rows; over shards one all-gather of [5, N], which every rank adds up in the same order.

    Raises TypeError for logits that are neither float32 nor bfloat16, ValueError for strided columns.
    """
    return _merged(_gathered(_row_statistics(logits, target, shard), shard), shard)


def write_gradients(
    out: Tensor,
    logits: Tensor,
    target: Tensor,
    shard: Shard,
    values: RowValues,
    grad_logprob: Tensor | None,
    grad_entropy: Tensor | None,
) -> None:
    """dz of all columns into `out`, which may be `logits`: a tile is read before it is written, by one thread."""
    _check(out)
    if grad_logprob is None:
        grad_logprob = torch.zeros_like(values.top)
    target = target.contiguous()
    # held here until the call has its addresses
    kept = [values.top, values.log_sum, values.entropy, grad_logprob.float(), grad_entropy]
    kept = [None if tensor is None else tensor.contiguous() for tensor in kept]
    if grad_entropy is None:
        kept[2] = None
    gradients = _Gradients(*(None if tensor is None else tensor.data_ptr() for tensor in kept), out.stride(0))
    native.call(
        native.library_for(logits.device),
        "mrl_row_gradient",
        logits.device,
        ctypes.byref(_inputs(logits, target, shard)),
        ctypes.byref(gradients),
        ctypes.c_int(logits.dtype == torch.bfloat16),
        native.address(out),
    )
    # autograd must see that what others may have saved is gone
    torch.autograd.graph.increment_version(out)


def _row_statistics(logits: Tensor, target: Tensor, shard: Shard) -> Tensor:
    """[5, N] of this shard: maximum, and relative to it sums of exp, of exp times logit, target logit, ownership."""
    _check(logits)
    stats = torch.empty((5, len(target)), dtype=torch.float32, device=logits.device)
    target = target.contiguous()
    native.call(
        native.library_for(logits.device),
        "mrl_row_statistics",
        logits.device,
        ctypes.byref(_inputs(logits, target, shard)),
        ctypes.c_int(logits.dtype == torch.bfloat16),
        native.address(stats),
    )
    return stats


def _gathered(stats: Tensor, shard: Shard) -> Tensor:
    """[shards, 5, N] in the order of ranks."""
    if not shard.is_shared(stats.shape[1]):
        return stats[None]
    assert shard.group is not None
    parts = stats.new_empty((shard.group.size(), *stats.shape))
    dist.all_gather_into_tensor(parts, stats, group=shard.group)
    return parts


def _merged(stats: Tensor, shard: Shard) -> RowValues:
    """Each shard's sums moved from its own maximum to the common one, and added up."""
    top = stats[:, 0].amax(dim=0)
    # -inf minus -inf is not a number, and 0 times -inf neither
    base = top.masked_fill(top == float("-inf"), 0.0)
    shift = (stats[:, 0] - base) / shard.temperature
    scale = shift.exp()
    shift = shift.clamp(min=-1e30)
    sum_exp = (scale * stats[:, 1]).sum(dim=0)
    moment = (scale * (stats[:, 2] + shift * stats[:, 1])).sum(dim=0)
    owned = stats[:, 4]
    target_logit = torch.where(owned > 0, stats[:, 3] + shift, 0.0).sum(dim=0)
    # no token is possible: its own sum is 0, and no other may become NaN by it
    sum_exp = sum_exp.masked_fill(top == float("-inf"), 1.0)
    log_sum = sum_exp.log()
    # a target that no shard owns (or two do) must not look like a log-prob
    logprob = (target_logit - log_sum).masked_fill(owned.sum(dim=0) != 1, float("nan"))
    return RowValues(logprob, log_sum - moment / sum_exp if shard.with_entropy else None, top, log_sum)


def _inputs(logits: Tensor, target: Tensor, shard: Shard) -> _Inputs:
    temperature = shard.temperature
    per_row = isinstance(temperature, Tensor)
    return _Inputs(
        logits=logits.data_ptr(),
        target=target.data_ptr(),
        temperatures=temperature.data_ptr() if isinstance(temperature, Tensor) else None,
        rows=len(target),
        width=logits.shape[1],
        num_columns=shard.num_columns,
        stride=logits.stride(0),
        vocab_start=shard.vocab_start,
        temperature=1.0 if per_row else temperature,
    )


def _check(logits: Tensor) -> None:
    if logits.dtype not in DTYPES:
        raise TypeError(
            f"logprob_from_logits: impl = 'host' and 'cuda' take float32 or bfloat16, got logits of {logits.dtype}; "
            "use impl = 'portable'"
        )
    if logits.shape[1] > 1 and logits.stride(1) != 1:
        raise ValueError(
            f"logprob_from_logits: logits {tuple(logits.shape)} have stride {logits.stride()}, columns must be "
            "contiguous; pass logits.contiguous()"
        )

"""What `linear_policy_loss` refuses, and in which words."""

from __future__ import annotations

import math
from dataclasses import fields

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl_kernels.head_checks import check_main_grad_memory
from megatron_rl_kernels.linear_policy_loss.types import PolicyInputs

OP = "linear_policy_loss"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_arguments(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    inputs: PolicyInputs,
    temperature: float | Tensor,
    *,
    group: dist.ProcessGroup | None,
    sequence_parallel: bool,
    main_grad: Tensor | None,
    loss_scale: float | Tensor,
    chunk_tokens: int | None,
    is_sequence_level: bool,
) -> None:
    """Raise TypeError or ValueError for what does not fit; reads shapes and dtypes, no values on a device."""
    num_ranks = group.size() if sequence_parallel and group is not None else 1
    _check_tensors(hidden, weight, target, num_ranks)
    _check_inputs(inputs, target, is_sequence_level)
    if isinstance(temperature, Tensor):
        if temperature.shape != target.shape or temperature.dtype != torch.float32:
            raise TypeError(
                f"{OP}: temperature {tuple(temperature.shape)} of {temperature.dtype}, must be a number or [N] = "
                f"{list(target.shape)} of float32"
            )
        if temperature.device != target.device:
            raise ValueError(
                f"{OP}: temperature on {temperature.device}, target on {target.device}; move one"
            )
        if temperature.requires_grad:
            raise ValueError(f"{OP}: temperature requires a gradient but is a constant here; detach it")
    elif not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(f"{OP}: temperature = {temperature}, must be finite and above 0")
    if chunk_tokens is not None and not isinstance(chunk_tokens, int):
        raise TypeError(f"{OP}: chunk_tokens = {chunk_tokens!r}, must be an int, or None for the default")
    if chunk_tokens is not None and chunk_tokens < 1:
        raise ValueError(f"{OP}: chunk_tokens = {chunk_tokens}, must be at least 1, or None for the default")
    _check_main_grad(weight, main_grad, loss_scale)


def check_reference(*, vocab_start: int, group: dist.ProcessGroup | None, main_grad: Tensor | None) -> None:
    """The definition knows one unsharded head and autograd's own gradients."""
    if vocab_start or group is not None or main_grad is not None:
        raise ValueError(
            f"{OP}: impl = 'reference' takes the whole head, no group and no main_grad; use impl = 'portable'"
        )


def _check_tensors(hidden: Tensor, weight: Tensor, target: Tensor, num_ranks: int) -> None:
    shapes = f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}, target {tuple(target.shape)}"
    if hidden.ndim != 2 or weight.ndim != 2 or target.ndim != 1:
        raise ValueError(f"{OP}: got {shapes}; expected hidden [N, H], weight [V_local, H], target [N]")
    if hidden.shape[1] != weight.shape[1] or hidden.shape[0] * num_ranks != target.shape[0]:
        shard = f", N / {num_ranks} rows of hidden on each rank" if num_ranks > 1 else ""
        raise ValueError(
            f"{OP}: got {shapes}; H of hidden and weight, N of hidden and target must agree{shard}"
        )
    if hidden.shape[1] == 0:
        raise ValueError(f"{OP}: got {shapes}; H must be at least 1")
    if hidden.dtype not in _DTYPES or weight.dtype != hidden.dtype:
        raise TypeError(
            f"{OP}: got hidden of {hidden.dtype} and weight of {weight.dtype}; both must be the same one of "
            + ", ".join(str(dtype) for dtype in _DTYPES)
        )
    if target.dtype != torch.int64:
        raise TypeError(f"{OP}: got target of {target.dtype}, must be torch.int64")
    if not hidden.device == weight.device == target.device:
        raise ValueError(
            f"{OP}: got hidden on {hidden.device}, weight on {weight.device}, target on {target.device}; "
            "put them on one device"
        )


def _check_inputs(inputs: PolicyInputs, target: Tensor, is_sequence_level: bool) -> None:
    for field in fields(inputs):
        tensor = getattr(inputs, field.name)
        if tensor is None:
            continue
        if tensor.device != target.device:
            raise ValueError(
                f"{OP}: inputs.{field.name} on {tensor.device}, target on {target.device}; move one"
            )
        if field.name == "cu_seqlens":
            continue
        if tensor.requires_grad:
            raise ValueError(
                f"{OP}: inputs.{field.name} requires a gradient but is a constant here; detach it"
            )
        if tensor.shape != target.shape:
            raise ValueError(
                f"{OP}: inputs.{field.name} {tuple(tensor.shape)}, must be like target: {tuple(target.shape)}"
            )
        if field.name == "mask" and tensor.dtype != torch.bool:
            raise TypeError(f"{OP}: inputs.mask of {tensor.dtype}, must be torch.bool")
        if field.name != "mask" and not tensor.dtype.is_floating_point:
            raise TypeError(f"{OP}: inputs.{field.name} of {tensor.dtype}, must be floating point")
    if is_sequence_level:
        _check_sequences(inputs.cu_seqlens, len(target))


def _check_sequences(bounds: Tensor | None, num_tokens: int) -> None:
    if bounds is None:
        raise ValueError(f"{OP}: this surrogate is per sequence; pass inputs.cu_seqlens [S + 1] int32")
    if bounds.ndim != 1 or len(bounds) == 0 or bounds.dtype not in (torch.int32, torch.int64):
        raise TypeError(
            f"{OP}: inputs.cu_seqlens {tuple(bounds.shape)} of {bounds.dtype}, must be [S + 1] of int32 or int64"
        )
    # reading it on a device would wait for that device; there the caller answers for it
    if bounds.device.type == "cpu":
        first, last = int(bounds[0]), int(bounds[-1])
        if first != 0 or last != num_tokens or bool((bounds.diff() < 0).any()):
            raise ValueError(
                f"{OP}: inputs.cu_seqlens runs from {first} to {last}, must rise from 0 to N = {num_tokens}"
            )


def _check_main_grad(weight: Tensor, main_grad: Tensor | None, loss_scale: float | Tensor) -> None:
    if main_grad is None:
        if isinstance(loss_scale, Tensor) or loss_scale != 1.0:
            raise ValueError(
                f"{OP}: loss_scale = {loss_scale} without main_grad; multiply the loss instead, or pass main_grad"
            )
        return
    dtype = torch.promote_types(weight.dtype, torch.float32)
    if main_grad.shape != weight.shape or main_grad.dtype != dtype or main_grad.device != weight.device:
        raise ValueError(
            f"{OP}: main_grad {tuple(main_grad.shape)} of {main_grad.dtype} on {main_grad.device}, must be "
            f"{tuple(weight.shape)} of {dtype} on {weight.device}"
        )
    if main_grad.requires_grad:
        raise ValueError(
            f"{OP}: main_grad requires a gradient; pass the buffer that holds the gradient of weight"
        )
    check_main_grad_memory(OP, main_grad, weight)
    if isinstance(loss_scale, Tensor):
        if loss_scale.ndim or loss_scale.device != weight.device:
            raise ValueError(
                f"{OP}: loss_scale {tuple(loss_scale.shape)} on {loss_scale.device}, must be a number or 0-dim on "
                f"{weight.device}"
            )
    elif not math.isfinite(loss_scale):
        raise ValueError(f"{OP}: loss_scale = {loss_scale}, must be finite")

"""One AdamW step over flat tensors, in place, in one pass: moments, master weights and the copy that the model reads.

`reference` defines the op, `portable` runs it on any device, `triton` on CUDA; `host`, `cuda`: C++ built on demand.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from megatron_rl_kernels.adamw.portable import adamw_portable
from megatron_rl_kernels.adamw.reference import adamw_reference
from megatron_rl_kernels.adamw.update import make_update
from megatron_rl_kernels.dispatch import Impl, choose_impl

__all__ = ["adamw_"]

_OFFERED: tuple[Impl, ...] = ("reference", "portable", "triton", "cuda", "host")
_MASTER_DTYPES = (torch.float32, torch.float64)
_GRAD_DTYPES = (torch.float32, torch.bfloat16, torch.float64)
_WEIGHT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@torch.no_grad()
def adamw_(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    step: int,
    grad_scale: Tensor | float = 1.0,
    weight: Tensor | None = None,
    impl: Impl | None = None,
) -> None:
    """Update `master`, `exp_avg` and `exp_avg_sq` in place; write the rounded result into `weight` if given.

    The first three are contiguous, of one shape and of float32 (float64 for tests); grad of that shape in
    float32 or bfloat16, read only; weight in bfloat16, float16 or float32. No two share memory. `step` counts
    updates from 1 and includes this one. `grad_scale` multiplies the gradient before anything else: a float, or
    a float32 tensor of one element on the same device (loss scale and clip factor without waiting for them).

    AdamW with decoupled weight decay and bias correction (arXiv 1711.05101), as torch.optim.AdamW; formulas in
    `adamw.update.Update`. A not finite gradient makes its own elements not finite and no other: whoever scales or
    clips checks the norm first and leaves the step out. Raises TypeError or ValueError for arguments that do not fit.
    """
    update = make_update(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, step=step)
    _check_dtypes(master, exp_avg, exp_avg_sq, grad, weight)
    named = {"master": master, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "grad": grad}
    if weight is not None:
        named["weight"] = weight
    _check_layout(named)
    _check_apart(named)
    _check_scale(grad_scale, master.device)
    chosen = choose_impl("adamw_", impl, device=master.device, offered=_OFFERED)
    flat = [tensor.detach().view(-1) for tensor in (master, exp_avg, exp_avg_sq, grad)]
    out = None if weight is None else weight.detach().view(-1)
    run = _implementation(chosen)
    run(flat[0], flat[1], flat[2], flat[3], out, update, grad_scale)
    if chosen in ("triton", "cuda", "host"):
        # autograd must see what kernels write behind its back
        for tensor in (*flat[:3], *(() if out is None else (out,))):
            torch.autograd.graph.increment_version(tensor)


def _implementation(impl: Impl) -> Callable[..., None]:
    if impl == "triton":
        # Triton is heavy, and only this implementation needs it
        from megatron_rl_kernels.adamw.triton_op import adamw_triton

        return adamw_triton
    if impl in ("cuda", "host"):
        # may have to build a library first
        from megatron_rl_kernels.adamw.native import adamw_native

        return adamw_native
    return adamw_reference if impl == "reference" else adamw_portable


def _check_dtypes(
    master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, weight: Tensor | None
) -> None:
    if master.dtype not in _MASTER_DTYPES or not master.dtype == exp_avg.dtype == exp_avg_sq.dtype:
        raise TypeError(
            f"adamw_: got master of {master.dtype}, exp_avg of {exp_avg.dtype}, exp_avg_sq of {exp_avg_sq.dtype}; "
            "all three must be torch.float32, or all torch.float64"
        )
    if grad.dtype not in _GRAD_DTYPES or (grad.dtype == torch.float64 and master.dtype != torch.float64):
        raise TypeError(f"adamw_: got grad of {grad.dtype}, must be torch.float32 or torch.bfloat16")
    if weight is not None and weight.dtype not in _WEIGHT_DTYPES:
        allowed = ", ".join(str(dtype) for dtype in _WEIGHT_DTYPES)
        raise TypeError(f"adamw_: got weight of {weight.dtype}, must be one of {allowed}")


def _check_layout(named: dict[str, Tensor]) -> None:
    master = named["master"]
    for name, tensor in named.items():
        if tensor.shape != master.shape or tensor.device != master.device:
            raise ValueError(
                f"adamw_: got {name} {tuple(tensor.shape)} on {tensor.device}, master {tuple(master.shape)} on "
                f"{master.device}; all must have one shape and one device"
            )
        if not tensor.is_contiguous():
            raise ValueError(
                f"adamw_: {name} {tuple(tensor.shape)} has stride {tensor.stride()}, must be contiguous; pass flat "
                "views of contiguous buffers"
            )


def _check_apart(named: dict[str, Tensor]) -> None:
    """Two arguments in the same memory would update each other, and differently in each implementation."""
    spans = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size(), name)
        for name, tensor in named.items()
        if tensor.numel()
    )
    for (_, end, first), (start, _, second) in pairwise(spans):
        if start < end:
            raise ValueError(f"adamw_: {first} and {second} share memory; give each its own")


def _check_scale(scale: Tensor | float, device: torch.device) -> None:
    if isinstance(scale, Tensor):
        if scale.numel() != 1 or scale.dtype != torch.float32 or scale.device != device:
            raise ValueError(
                f"adamw_: got grad_scale {tuple(scale.shape)} of {scale.dtype} on {scale.device}; a tensor must have "
                f"one element of torch.float32 on {device}"
            )
    elif not abs(scale) <= torch.finfo(torch.float32).max:
        raise ValueError(f"adamw_: grad_scale = {scale}, must be finite in float32")

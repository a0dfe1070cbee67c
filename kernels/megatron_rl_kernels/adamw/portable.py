"""`adamw_` in plain torch for any device, block by block, so that a block stays in cache through all its operations."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl_kernels.adamw.update import Update

# four float32 arrays and two scratch blocks of it fit a level-2 cache of 1 MiB
BLOCK = 32768


def adamw_portable(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    weight: Tensor | None,
    update: Update,
    grad_scale: Tensor | float,
) -> None:
    """All flat. Elements are independent, so the block size changes no bit of the result."""
    block = BLOCK if master.device.type == "cpu" else max(master.numel(), 1)
    size = min(block, master.numel())
    denominator = torch.empty(size, dtype=master.dtype, device=master.device)
    as_it_is = isinstance(grad_scale, float) and grad_scale == 1.0 and grad.dtype == master.dtype
    scaled = None if as_it_is else torch.empty_like(denominator)
    for start in range(0, master.numel(), block):
        stop = min(start + block, master.numel())
        _block(
            master[start:stop],
            exp_avg[start:stop],
            exp_avg_sq[start:stop],
            _scaled(grad[start:stop], grad_scale, scaled),
            denominator[: stop - start],
            update,
        )
        if weight is not None:
            weight[start:stop].copy_(master[start:stop])


def _scaled(grad: Tensor, scale: Tensor | float, scratch: Tensor | None) -> Tensor:
    if scratch is None:
        return grad
    scratch = scratch[: grad.numel()]
    # not torch.mul(grad, scale): it would round a bfloat16 product before it is widened
    return scratch.copy_(grad).mul_(scale)


def _block(
    master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, denominator: Tensor, update: Update
) -> None:
    exp_avg.lerp_(grad, update.gain1)
    exp_avg_sq.mul_(update.beta2).addcmul_(grad, grad, value=update.gain2)
    torch.sqrt(exp_avg_sq, out=denominator)
    denominator.mul_(update.root).add_(update.eps)
    if update.decay != 1.0:
        master.mul_(update.decay)
    master.addcdiv_(exp_avg, denominator, value=-update.step_size)

"""Launch of the Triton kernel of `adamw_`."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl_kernels.adamw.triton_kernels import adamw_kernel
from megatron_rl_kernels.adamw.update import Update

# 4 warps x 8 elements a thread: 32 bytes of each float32 array a thread
BLOCK = 1024
NUM_WARPS = 4


def adamw_triton(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    weight: Tensor | None,
    update: Update,
    grad_scale: Tensor | float,
) -> None:
    """All flat, `master` float32. Raises TypeError for another `master`."""
    if master.dtype != torch.float32:
        raise TypeError(
            f"adamw_: impl = 'triton' takes a master of torch.float32, got {master.dtype}; "
            "use impl = 'portable' or 'reference' for float64"
        )
    size = master.numel()
    if size == 0:
        return
    if not isinstance(grad_scale, Tensor):
        grad_scale = torch.full((1,), grad_scale, dtype=torch.float32, device=master.device)
    # the interpreter pays by program, not by element
    block = BLOCK if master.is_cuda else 65536
    adamw_kernel[(-(-size // block),)](
        master,
        exp_avg,
        exp_avg_sq,
        grad,
        weight,
        grad_scale,
        size,
        update.gain1,
        update.beta2,
        update.gain2,
        update.decay,
        update.step_size,
        update.root,
        update.eps,
        WRITE_WEIGHT=weight is not None,
        BLOCK=block,
        num_warps=NUM_WARPS,
    )

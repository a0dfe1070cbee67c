"""`adamw_` in C++: the body of kernels/csrc/adamw.h on the CPU (`host`) or as a CUDA kernel (`cuda`)."""

from __future__ import annotations

import ctypes
from dataclasses import asdict

import torch
from torch import Tensor

from megatron_rl_kernels import native
from megatron_rl_kernels.adamw.update import Update


class _Inputs(ctypes.Structure):
    """struct AdamwInputs."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("master", "exp_avg", "exp_avg_sq", "grad", "weight", "scale")),
        ("size", ctypes.c_int64),
        *(
            (name, ctypes.c_float)
            for name in ("gain1", "beta2", "gain2", "decay", "step_size", "root", "eps")
        ),
    ]


def adamw_native(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    weight: Tensor | None,
    update: Update,
    grad_scale: Tensor | float,
) -> None:
    """All flat. Raises TypeError for a float64 master or a float16 weight, `native.BuildError` without a compiler."""
    device = master.device
    if master.dtype != torch.float32:
        raise TypeError(
            f"adamw_: impl = 'host' and 'cuda' take a master of torch.float32, got {master.dtype}; "
            "use impl = 'portable' or 'reference' for float64"
        )
    if weight is not None and weight.dtype == torch.float16:
        raise TypeError(
            "adamw_: impl = 'host' and 'cuda' write a weight of torch.bfloat16 or torch.float32, got torch.float16; "
            "use impl = 'portable' or 'triton'"
        )
    if not isinstance(grad_scale, Tensor):
        grad_scale = torch.full((1,), grad_scale, dtype=torch.float32, device=device)
    inputs = _Inputs(
        master=master.data_ptr(),
        exp_avg=exp_avg.data_ptr(),
        exp_avg_sq=exp_avg_sq.data_ptr(),
        grad=grad.data_ptr(),
        weight=None if weight is None else weight.data_ptr(),
        scale=grad_scale.data_ptr(),
        size=master.numel(),
        **asdict(update),
    )
    native.call(
        native.library_for(device),
        "mrl_adamw",
        device,
        ctypes.byref(inputs),
        ctypes.c_int(grad.dtype == torch.bfloat16),
        ctypes.c_int(weight is not None and weight.dtype == torch.bfloat16),
    )

"""Facts about the machine: is there an accelerator, which device and which communication backend follow."""

from __future__ import annotations

import torch


def has_accelerator() -> bool:
    """True where this process can compute on a CUDA device."""
    return torch.cuda.is_available()


def device() -> torch.device:
    """Where parameters and batches of this process live: its current CUDA device, else the CPU."""
    if has_accelerator():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def backend() -> str:
    """Name of the torch.distributed backend: "nccl" with an accelerator, else "gloo"."""
    return "nccl" if has_accelerator() else "gloo"


def import_megatron() -> None:
    """Import megatron-core in the way that suits the machine; call it before anything else imports it."""
    if not has_accelerator():
        from megatron_rl.platform import cpu

        cpu.import_uncompiled()


def activate(*, accelerator: bool | None = None) -> bool:
    """Make megatron-core usable here; returns True when that needed the CPU patch.

    Call it before a model is built. With an accelerator nothing is touched, nor megatron-core imported.
    Calling it again changes nothing. `accelerator` overrides what the machine says.
    """
    if has_accelerator() if accelerator is None else accelerator:
        return False
    # imports megatron-core, which a process that only plans must not need
    from megatron_rl.platform import cpu

    cpu.apply()
    return True

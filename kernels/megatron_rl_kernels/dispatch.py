"""Which implementation of an op runs: the one asked for, else the one for the device. Said once in the log.

    reference  the definition, plain autograd; slow, materialises everything; for tests and first-batch checks
    portable   plain torch in blocks, any device; what CPUs use
    triton     CUDA devices, or CPU tensors inside Triton's interpreter (tests)
    cuda       CUDA C++ built on demand from kernels/csrc
    host       the same C++ bodies built for the CPU, one thread each

Nothing falls back: an implementation that cannot take the arguments raises, for it would change numbers in silence.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Literal, get_args

import torch

Impl = Literal["reference", "portable", "triton", "cuda", "host"]

_log = logging.getLogger("megatron_rl_kernels")


def choose_impl(op: str, impl: Impl | None, *, device: torch.device, offered: Sequence[Impl]) -> Impl:
    """`impl` if given, else `triton` on CUDA and `portable` elsewhere.

    Raises ValueError for one that `op` does not have (`offered`), or that cannot run on `device`.
    """
    if impl is None:
        chosen: Impl = "triton" if device.type == "cuda" and "triton" in offered else "portable"
        if problem := _misfit(chosen, device):
            raise ValueError(f"{op}: impl = {chosen!r}, the one for {device.type} tensors, {problem}")
        _say(op, chosen, f"the one for {device.type} tensors")
        return chosen
    if impl not in offered:
        known = "" if impl in get_args(Impl) else ", which does not exist"
        raise ValueError(f"{op}: impl = {impl!r}{known}; this op has {', '.join(offered)}")
    problem = _misfit(impl, device)
    if problem:
        fitting = [one for one in offered if not _misfit(one, device)]
        raise ValueError(f"{op}: impl = {impl!r} {problem}; here it can be {', '.join(fitting)}")
    _say(op, impl, "asked for")
    return impl


def _misfit(impl: Impl, device: torch.device) -> str | None:
    if impl == "triton" and device.type != "cuda":
        # heavy, and only this question needs it
        from megatron_rl_kernels.triton_tools import INTERPRETED

        # the interpreter reads host memory
        runs = INTERPRETED and device.type == "cpu"
        return None if runs else f"needs CUDA tensors (or TRITON_INTERPRET=1), got {device.type}"
    if impl == "cuda" and device.type != "cuda":
        return f"needs CUDA tensors, got {device.type}"
    if impl == "triton" and torch.cuda.is_initialized() and device.index != torch.cuda.current_device():
        # Triton launches on the current device, whatever its arguments live on
        current = torch.cuda.current_device()
        return (
            f"needs tensors of the current device, cuda:{current}, got {device}: call torch.cuda.set_device"
        )
    if impl == "host" and device.type != "cpu":
        return f"needs CPU tensors, got {device.type}"
    return None


@functools.cache
def _say(op: str, impl: Impl, why: str) -> None:
    _log.info("%s runs on %s: %s", op, impl, why)

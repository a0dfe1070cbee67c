"""How a contender is timed and its memory counted, on a CPU or a CUDA device, and what the machine could do.

CPU: one thread; CPU seconds of the process, which other jobs disturb less than wall seconds (both are kept). Memory is
what the process adds to its resident set. CUDA: events around work on a cold L2 cache; memory of torch's allocator.
"""

from __future__ import annotations

import ctypes
import statistics
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bench_kernels_cases import Case, Contender, backward
from torch import Tensor

MIB = 2**20
FLUSH_BYTES = 256 * MIB  # more than the L2 cache of any GPU in use


@dataclass(frozen=True, kw_only=True, slots=True)
class Lap:
    """One forward and the backward after it: seconds (CPU or device), wall seconds, bytes added at the peak."""

    forward_s: float
    backward_s: float
    wall_s: float
    forward_bytes: int
    both_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Ceiling:
    """What this machine reaches in this run: a product of large matrices, a copy of a large tensor."""

    flops_per_s: float
    bytes_per_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Seconds over rounds."""

    median: float
    p10: float
    p90: float

    @staticmethod
    def of(seconds: Sequence[float]) -> Spread:
        return Spread(
            median=statistics.median(seconds), p10=quantile(seconds, 0.1), p90=quantile(seconds, 0.9)
        )


def quantile(values: Sequence[float], share: float) -> float:
    """Linear between neighbours in order."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


class Clock(ABC):
    """Times one lap on its kind of device."""

    device: torch.device

    @abstractmethod
    def lap(self, case: Case, contender: Contender) -> Lap: ...

    @abstractmethod
    def seconds(self, work: Callable[[], Any]) -> float: ...

    def ceiling(self, dtype: torch.dtype, *, size: int, num_bytes: int) -> Ceiling:
        """Best of three of a product of `size`^3 and of a copy of `num_bytes`."""
        left, right = (torch.empty(size, size, device=self.device).normal_().to(dtype) for _ in range(2))
        source = torch.empty(num_bytes, dtype=torch.uint8, device=self.device).fill_(1)
        target = torch.zeros_like(source)
        product = min(self.seconds(lambda: left @ right) for _ in range(4))
        copy = min(self.seconds(lambda: target.copy_(source)) for _ in range(4))
        return Ceiling(flops_per_s=2.0 * size**3 / product, bytes_per_s=2.0 * num_bytes / copy)


def fresh_tensors(case: Case, contender: Contender) -> dict[str, Tensor]:
    tensors = case.fresh()
    for name in contender.destroys:
        tensors[name] = tensors[name].detach().clone().requires_grad_(name in case.leaves)
    return tensors


class CpuClock(Clock):
    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def lap(self, case: Case, contender: Contender) -> Lap:
        tensors = fresh_tensors(case, contender)
        _return_free_memory()
        resident = _status_bytes("VmRSS")
        # resets the peak to what is resident now
        Path("/proc/self/clear_refs").write_text("5")
        wall, began = time.perf_counter(), time.process_time()
        outputs = contender.run(tensors)
        middle = time.process_time()
        forward_bytes = _status_bytes("VmHWM") - resident
        resumed = time.process_time()
        gradients = backward(case, outputs, tensors)
        end = time.process_time()
        kept = sum(gradient.nbytes for gradient in gradients)
        return Lap(
            forward_s=middle - began,
            backward_s=end - resumed,
            wall_s=time.perf_counter() - wall,
            forward_bytes=max(0, forward_bytes),
            both_bytes=max(0, _status_bytes("VmHWM") - resident - kept),
        )

    def seconds(self, work: Callable[[], Any]) -> float:
        began = time.process_time()
        work()
        return time.process_time() - began


class CudaClock(Clock):
    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=self.device)

    def lap(self, case: Case, contender: Contender) -> Lap:
        tensors = fresh_tensors(case, contender)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        self._flush.zero_()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held, wall = torch.cuda.memory_allocated(), time.perf_counter()
        marks[0].record()
        outputs = contender.run(tensors)
        marks[1].record()
        forward_bytes = torch.cuda.max_memory_allocated() - held
        gradients = backward(case, outputs, tensors)
        marks[2].record()
        torch.cuda.synchronize()
        kept = sum(gradient.nbytes for gradient in gradients)
        return Lap(
            forward_s=marks[0].elapsed_time(marks[1]) / 1e3,
            backward_s=marks[1].elapsed_time(marks[2]) / 1e3,
            wall_s=time.perf_counter() - wall,
            forward_bytes=forward_bytes,
            both_bytes=max(0, torch.cuda.max_memory_allocated() - held - kept),
        )

    def seconds(self, work: Callable[[], Any]) -> float:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        self._flush.zero_()
        torch.cuda.synchronize()
        marks[0].record()
        work()
        marks[1].record()
        torch.cuda.synchronize()
        return marks[0].elapsed_time(marks[1]) / 1e3


def clock_for(device: str) -> Clock:
    if device == "cpu":
        torch.set_num_threads(1)
        return CpuClock()
    return CudaClock()


def _return_free_memory() -> None:
    """Free blocks that the allocator keeps would hide what the next lap takes."""
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


def _status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))

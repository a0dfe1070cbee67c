"""How much memory the ranks of a run take."""

from __future__ import annotations

import psutil
import torch
import torch.distributed as dist

from megatron_rl.parallel.collectives import largest
from megatron_rl.platform import device

_GIB = 2**30


def memory_metrics(group: dist.ProcessGroup | None) -> dict[str, float]:
    """`memory/rss_gib`: resident host memory now, of the rank of `group` (None: this one is alone) with the most.

    With a GPU also `memory/gpu_peak_gib`: the most that torch has allocated since the call before. Collective.
    """
    found = {"memory/rss_gib": largest(psutil.Process().memory_info().rss, group) / _GIB}
    if device.has_accelerator():
        found["memory/gpu_peak_gib"] = largest(torch.cuda.max_memory_allocated(), group) / _GIB
        torch.cuda.reset_peak_memory_stats()
    return found

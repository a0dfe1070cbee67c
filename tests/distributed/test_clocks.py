"""Ranks of another machine find out how far their clock is from rank 0's."""

from __future__ import annotations

import os
import time

import pytest

from tests.helpers.distributed import run_distributed

AHEAD_NS = (0, 0, 7_000_000_000)


def _offset(rank: int, world_size: int) -> tuple[int, int]:
    import torch.distributed as dist

    from megatron_rl.parallel.clocks import offset_to_first

    address = f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size)
    found = offset_to_first(
        "another" if AHEAD_NS[rank] else "first",
        rank=rank,
        group=dist.group.WORLD,
        clock=lambda: time.monotonic_ns() + AHEAD_NS[rank],
    )
    dist.destroy_process_group()
    return found.offset_ns, found.error_ns


@pytest.mark.timeout(100)
def test_the_offset_of_another_clock_is_measured_within_its_stated_error() -> None:
    first, same, other = run_distributed(_offset, 3, timeout_s=90)
    assert first == same == (0, 0)
    offset, error = other
    assert 0 < error < 1_000_000_000
    assert abs(offset + AHEAD_NS[2]) <= error

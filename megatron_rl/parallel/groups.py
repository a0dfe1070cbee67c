"""Process groups of one run: torch.distributed, megatron-core's parallel state, and its random generators."""

from __future__ import annotations

import math
from datetime import timedelta

import torch.distributed as dist

from megatron_rl.errors import LayoutError, TrainingError
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.platform import device


def init_process_groups(
    layout: ParallelLayout,
    *,
    rank: int,
    world_size: int,
    master_addr: str,
    master_port: int,
    timeout_s: float,
    seed: int = 1,
) -> None:
    """Join the run and build every group of `layout`; all ranks call it together.

    `timeout_s` bounds each collective. `seed` starts megatron-core's generators (one per tp rank).
    Raises LayoutError when the layout does not fill the world, TrainingError when the ranks do not meet.
    """
    _check_fills_world(layout, world_size)
    device.activate()
    try:
        dist.init_process_group(
            device.backend(),
            init_method=f"tcp://{master_addr}:{master_port}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
    except dist.DistError as error:
        raise TrainingError(_no_meeting(master_addr, master_port, rank, world_size, error)) from error
    build_model_groups(layout, timeout_s=timeout_s, seed=seed)


def _no_meeting(addr: str, port: int, rank: int, world_size: int, error: Exception) -> str:
    reason = str(error).splitlines()[0]
    if rank == 0 and isinstance(error, dist.DistNetworkError):
        return (
            f"process group: rank 0 cannot listen on {addr}:{port} ({reason}); another process may hold the port: "
            "set MASTER_PORT to a free one"
        )
    return (
        f"process group: rank {rank} of {world_size} did not meet the others at {addr}:{port} ({reason}); check "
        "that rank 0 runs, that this address reaches it, and that MASTER_PORT is the same everywhere"
    )


def _check_fills_world(layout: ParallelLayout, world_size: int) -> None:
    if layout.world_size != world_size:
        raise LayoutError(
            f"layout: tp*pp*dp = {layout.tp}*{layout.pp}*{layout.dp} = {layout.world_size}, but {world_size} "
            f"processes were started; start {layout.world_size} processes or change layout.tp / layout.pp"
        )


def build_model_groups(layout: ParallelLayout, *, timeout_s: float, seed: int = 1) -> None:
    """The part of `init_process_groups` that depends on the layout; torch.distributed must be up.

    With `destroy_model_groups` it lets one set of processes go through several layouts.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    _check_fills_world(layout, dist.get_world_size())
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.expert_tp,
        distributed_timeout_minutes=max(1, math.ceil(timeout_s / 60)),
    )
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    assert_ranks_agree(layout)


def assert_ranks_agree(layout: ParallelLayout) -> None:
    """Our rank arithmetic and megatron-core's must be the same: the reshard plan is built from ours."""
    from megatron.core import parallel_state

    theirs = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
    )
    rank = dist.get_rank()
    ours = layout.coord(rank)
    assert ours == theirs, f"(tp, dp, pp) of rank {rank}: {ours} by layout, {theirs} by megatron-core"
    theirs = (
        parallel_state.get_expert_tensor_parallel_rank(),
        parallel_state.get_expert_model_parallel_rank(),
        parallel_state.get_expert_data_parallel_rank(),
    )
    ours = layout.expert_coord(rank)
    assert ours == theirs, f"(etp, ep, replica) of rank {rank}: {ours} by layout, {theirs} by megatron-core"


def destroy_model_groups() -> None:
    """Undo `build_model_groups`; torch.distributed stays up."""
    from megatron.core import parallel_state

    # every rank must be past its last collective before the groups go
    dist.barrier()
    # megatron-core only forgets most of its groups, whose threads would pile up; the first entry is the world
    for group in (parallel_state._global_process_group_list or [None])[1:]:
        dist.destroy_process_group(group)
    parallel_state.destroy_model_parallel()


def new_driver_group() -> dist.ProcessGroup | None:
    """A group of all ranks for waiting on the driving one, whose work on engines no collective time-out fits.

    On the CPU, so that a waiting rank keeps no accelerator kernel alive. None for a single process. Collective.
    """
    return _new_cpu_group(timedelta(days=7))


def new_border_group(*, timeout_s: float) -> dist.ProcessGroup | None:
    """A group of all ranks for a word between two steps. None for a single process. Collective."""
    return _new_cpu_group(timedelta(seconds=timeout_s))


def _new_cpu_group(timeout: timedelta) -> dist.ProcessGroup | None:
    return dist.new_group(backend="gloo", timeout=timeout) if dist.get_world_size() > 1 else None


def destroy_process_groups() -> None:
    """Leave the run; safe to call when it was never joined, and when other ranks are gone."""
    if not dist.is_initialized():
        return
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()

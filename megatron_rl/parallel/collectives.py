"""The few collectives on Python values that the loops need; without torch.distributed, one process is all.

Each waits at most as long as the time-out that the group was made with (run.collective_timeout_s).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist

from megatron_rl.errors import LostPeerError

T = TypeVar("T")


def all_gather_object(obj: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """The picklable `obj` of every rank of `group` (None: all ranks), in rank order, on every rank."""
    if not _is_distributed():
        return [obj]
    gathered: list[T | None] = [None] * dist.get_world_size(group)
    with _named("all_gather_object"):
        dist.all_gather_object(gathered, obj, group=group)
    return gathered  # type: ignore[return-value]


def broadcast_object(obj: T, *, src: int, group: dist.ProcessGroup | None = None) -> T:
    """The picklable `obj` of global rank `src` on every rank of `group`; what other ranks pass is ignored."""
    if not _is_distributed():
        return obj
    box = [obj]
    with _named("broadcast_object"):
        dist.broadcast_object_list(box, src=src, group=group)
    return box[0]


def largest(value: int, group: dist.ProcessGroup | None) -> int:
    """The largest `value` of any rank of `group`, one that works on the CPU; None: this process is alone."""
    if group is None:
        return value
    box = torch.tensor([value], dtype=torch.int64)
    with _named("all_reduce"):
        dist.all_reduce(box, dist.ReduceOp.MAX, group=group)
    return int(box.item())


def is_lost_peer(error: BaseException) -> bool:
    """Whether an error of a collective, ours or one inside torch or megatron-core, says that another rank is gone."""
    if isinstance(error, LostPeerError | dist.DistBackendError | dist.DistNetworkError):
        return True
    return type(error) is RuntimeError and "gloo/transport" in str(error)


def broadcast_outcome(
    work: Callable[[], T] | None, *, src: int, group: dist.ProcessGroup | None, shared: type[Exception]
) -> T:
    """What `work`, None on the other ranks, returns on global rank `src`, on every rank.

    An error of class `shared` that it raises is raised on every rank; with any other, `src` ends alone.
    """
    outcome: T | Exception | None = None
    if work is not None:
        try:
            outcome = work()
        except shared as error:
            outcome = error
    outcome = broadcast_object(outcome, src=src, group=group)
    if isinstance(outcome, shared):
        raise outcome
    return outcome  # type: ignore[return-value]


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


@contextmanager
def _named(operation: str) -> Iterator[None]:
    """Say which rank waited for what, where torch says only that a connection closed or timed out."""
    try:
        yield
    except RuntimeError as error:
        raise LostPeerError(
            f"{operation} on rank {dist.get_rank()} of {dist.get_world_size()} failed: {error}; another rank "
            "stopped or took longer than run.collective_timeout_s: read its log first"
        ) from error

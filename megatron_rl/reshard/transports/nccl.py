"""Messages over NCCL, between members that have GPUs of their own: device memory, one group call per batch.

NCCL refuses a communicator with two members on one GPU, which is what trainer ranks and workers that share
their GPUs are. `nccl_lanes` therefore splits such a group into several communicators without that.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store

from megatron_rl.errors import ReshardError
from megatron_rl.reshard.placement import Placement
from megatron_rl.reshard.transports.base import Membership, first_line, wait_until
from megatron_rl.reshard.transports.staged import Operation, StagedTransport, Started

_WATCHDOG_SLACK_S = 300.0  # NCCL's own watchdog ends the process: our time-out has to come first


def nccl_lanes(placement: Placement, *, relays: bool) -> tuple[tuple[int, ...], ...]:
    """Groups of members, each without two on one device, that hold every pair of trainer rank and worker on
    different devices; with `relays` a last one holds all workers, for what they pass on to each other.

    Two different devices differ in some bit of their number: for each bit, the trainer ranks that have it
    form a group with the workers that do not, and the other way round.
    """
    num_trainers, num_workers = len(placement.trainer_nodes), len(placement.worker_nodes)
    places = {
        m: place for m in range(num_trainers + num_workers) if (place := placement.device(m)) is not None
    }
    trainers = [member for member in places if member < num_trainers]
    workers = [member for member in places if member >= num_trainers]
    among_workers = (tuple(workers),) if relays else ()
    if len(set(places.values())) == len(places):
        return (*trainers, *workers), *among_workers
    numbers = {place: number for number, place in enumerate(sorted(set(places.values())))}
    lanes = []
    for bit in range(max(1, (len(numbers) - 1).bit_length())):
        for value in (0, 1):
            lanes.append(
                tuple(m for m in trainers if numbers[places[m]] >> bit & 1 == value)
                + tuple(m for m in workers if numbers[places[m]] >> bit & 1 != value)
            )
    return *lanes, *among_workers


def lane_of(placement: Placement, lanes: Sequence[Sequence[int]], sender: int, receiver: int) -> int:
    """Position in `lanes` of the group over which `sender` sends to `receiver`."""
    if sender >= len(placement.trainer_nodes):
        return len(lanes) - 1
    return next(index for index, lane in enumerate(lanes) if sender in lane and receiver in lane)


class NcclTransport(StagedTransport):
    """`base.Transport` over an own communicator of `members`; building it waits for every one of them.

    Call it with the member's device as the current one. Raises ReshardError when the others do not come.
    """

    kind = "nccl"

    def __init__(self, member: Membership, store: Store, *, members: Sequence[int], name: str) -> None:
        super().__init__(torch.device("cuda", torch.cuda.current_device()))
        self._member, self._members = member, tuple(members)
        rank, size = self._members.index(member.rank), len(self._members)
        prefix = PrefixStore(f"nccl/{name}", store)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=member.timeout_s + _WATCHDOG_SLACK_S)
        try:
            backend = dist.ProcessGroupNCCL(prefix, rank, size, options)
            # only the outer class starts and ends a batch
            group = dist.ProcessGroup(prefix, rank, size)
            group._set_default_backend(dist.ProcessGroup.BackendType.NCCL)
            backend._set_sequence_number_for_group()
            group._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, backend)
            # batches are sent on the communicator of all, which the first collective sets up
            work = group.allreduce([torch.ones(1, device=self.device)])
            wait_until(
                work.is_completed,
                timeout_s=member.timeout_s,
                what=f"joining {size - 1} members over NCCL by {member.name}",
            )
        except RuntimeError as error:
            raise ReshardError(
                f"weight transfer: {member.name} could not join {size - 1} others over NCCL: {first_line(error)}"
            ) from error

        self._group: dist.ProcessGroup | None = group

    def allocate(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def start(self, operations: Sequence[Operation]) -> Started:
        if self._group is None:
            raise ReshardError(f"weight transfer: {self._member.name} has left the group")
        peers = sorted({self._member.name_of(operation.peer) for operation in operations})
        what = f"{self._member.name} exchanging {len(operations)} messages with {', '.join(peers)}"
        try:
            self._group._start_coalescing(self.device)
            for operation in operations:
                peer = self._members.index(operation.peer)
                if operation.is_send:
                    self._group.send([operation.buffer], peer, 0)
                else:
                    self._group.recv([operation.buffer], peer, 0)
            work = self._group._end_coalescing(self.device)
        except RuntimeError as error:
            raise ReshardError(f"weight transfer: {what} failed: {first_line(error)}") from error
        return _Batch(work, self._member.timeout_s, what)

    def close(self) -> None:
        """Ends also what is under way: a member that waits for one that is gone would wait for ever."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()


class _Batch(Started):
    def __init__(self, work: Any, timeout_s: float, what: str) -> None:
        self._work, self._timeout_s, self._what = work, timeout_s, what

    def wait(self) -> None:
        try:
            # on the host, so that a failure is seen here and not in whatever uses the stream next
            wait_until(self._work.is_completed, timeout_s=self._timeout_s, what=self._what)
            self._work.wait()
        except RuntimeError as error:
            raise ReshardError(f"weight transfer: {self._what} failed: {first_line(error)}") from error

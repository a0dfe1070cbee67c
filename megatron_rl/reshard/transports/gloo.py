"""Messages over gloo, between any two members: sockets and host memory."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store
from torch.distributed.distributed_c10d import ProcessGroupGloo

from megatron_rl.errors import ReshardError
from megatron_rl.reshard.transports.base import Membership, first_line
from megatron_rl.reshard.transports.rendezvous import could_not_join, own_address
from megatron_rl.reshard.transports.staged import Operation, StagedTransport, Started


class GlooTransport(StagedTransport):
    """`base.Transport` over an own gloo group of all members; building it waits for every one of them.

    Where there is an accelerator, buffers are page-locked, so that copies between them and it are fast.
    Raises ReshardError when the others do not come in time.
    """

    kind = "gloo"

    def __init__(self, member: Membership, store: Store) -> None:
        super().__init__(torch.device("cpu"))
        self._member, self._store = member, store
        self._timeout = timedelta(seconds=member.timeout_s)
        address = own_address(member.host, member.port)
        gloo: Any = ProcessGroupGloo  # its stubs leave out the options and the point-to-point calls
        options = gloo._Options()
        # gloo's default device resolves the host name, which on many laptops and containers leads nowhere
        options._devices = [ProcessGroupGloo.create_device(hostname=address)]
        options._timeout, options._threads = self._timeout, 2
        try:
            self._group: Any = ProcessGroupGloo(
                PrefixStore("gloo", store), member.rank, member.world, options
            )
        except RuntimeError as error:
            raise could_not_join(member, error) from error

    def allocate(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())

    def start(self, operations: Sequence[Operation]) -> Started:
        works, group = [], self._group
        if group is None:
            raise ReshardError(f"weight transfer: {self._member.name} has left the group")
        # receives first: a send that finds its receive posted need not wait for it
        for operation in sorted(operations, key=lambda each: each.is_send):
            begin = group.send if operation.is_send else group.recv
            verb = "sending to" if operation.is_send else "receiving from"
            what = (
                f"{self._member.name} {verb} {self._member.name_of(operation.peer)} "
                f"({operation.buffer.numel()} bytes)"
            )
            try:
                works.append((begin([operation.buffer], operation.peer, 0), what))
            except RuntimeError as error:
                raise ReshardError(f"weight transfer: {what} failed: {first_line(error)}") from error
        return _Works(works, self._timeout)

    def close(self) -> None:
        self._group = None


class _Works(Started):
    def __init__(self, works: list[tuple[Any, str]], timeout: timedelta) -> None:
        self._works, self._timeout = works, timeout

    def wait(self) -> None:
        for work, what in self._works:
            try:
                work.wait(self._timeout)
            except RuntimeError as error:
                raise ReshardError(
                    f"weight transfer: {what} failed within {self._timeout.total_seconds():.0f} s: "
                    f"{first_line(error)}"
                ) from error
        self._works = []

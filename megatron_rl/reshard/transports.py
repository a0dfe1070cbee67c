"""The channel that weights travel on: a gloo group of trainer ranks and engine workers, apart from others.

Trainer ranks are 0 .. T-1, workers T .. T+N-1. torch only: the trainer never imports the engine.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore
from torch.distributed.distributed_c10d import ProcessGroupGloo

from megatron_rl.errors import ReshardError

LOOPBACK = "127.0.0.1"


class Pending(Protocol):
    """A transfer under way."""

    def wait(self) -> None:
        """Block until done. Raises ReshardError naming the peer when it failed or timed out."""
        ...


class Transport(Protocol):
    """Point-to-point bytes between the members of one group."""

    @property
    def rank(self) -> int: ...

    def send(self, buffer: Tensor, peer: int) -> Pending: ...

    def recv(self, buffer: Tensor, peer: int) -> Pending: ...


class _Work:
    def __init__(self, work: torch.distributed.Work, timeout: timedelta, what: str) -> None:
        self._work, self._timeout, self._what = work, timeout, what

    def wait(self) -> None:
        try:
            self._work.wait(self._timeout)
        except RuntimeError as error:
            raise ReshardError(
                f"weight transfer: {self._what} failed within {self._timeout.total_seconds():.0f} s: "
                f"{_first_line(error)}"
            ) from error


class GlooGroup:
    """`Transport` over gloo. Buffers are 1-D uint8 CPU tensors and must live until `wait` returned."""

    def __init__(self, group: ProcessGroupGloo, store: TCPStore, rank: int, timeout: timedelta) -> None:
        self._group: Any = group  # its stubs leave out the point-to-point calls
        self._store, self._rank, self._timeout = store, rank, timeout

    @property
    def rank(self) -> int:
        return self._rank

    def send(self, buffer: Tensor, peer: int) -> Pending:
        return self._start(self._group.send, buffer, peer, "sending to")

    def recv(self, buffer: Tensor, peer: int) -> Pending:
        return self._start(self._group.recv, buffer, peer, "receiving from")

    def _start(self, operation: Callable[..., Any], buffer: Tensor, peer: int, verb: str) -> Pending:
        what = f"rank {self._rank} {verb} rank {peer} ({buffer.numel()} bytes)"
        try:
            return _Work(operation([buffer], peer, 0), self._timeout, what)
        except RuntimeError as error:
            raise ReshardError(f"weight transfer: {what} failed: {_first_line(error)}") from error


def open_store(host: str, port: int, *, timeout_s: float) -> TCPStore:
    """The meeting point of a group, kept by its rank 0. Port 0 takes a free one (`store.port` tells which).

    With `LOOPBACK` it listens there alone, for whoever reaches the port can read and write the store; with
    any other host on all addresses of this machine, so that other machines can join. Raises ReshardError
    naming the port when it is taken.
    """
    listener: int | None = None
    try:
        if host == LOOPBACK:
            with socket.create_server((host, port)) as server:
                port = server.getsockname()[1]
                listener = server.detach()  # the store closes it
        timeout = timedelta(seconds=timeout_s)
        return TCPStore(host, port, None, True, timeout, wait_for_workers=False, master_listen_fd=listener)
    except (OSError, RuntimeError) as error:
        raise ReshardError(
            f"engine.port: cannot listen on {host}:{port} ({_first_line(error)}); free it, or set "
            f"engine.port to 0"
        ) from error


def make_group(
    host: str, port: int, rank: int, world: int, timeout_s: float, *, store: TCPStore | None = None
) -> GlooGroup:
    """Join the group that meets at `host:port`; returns when all `world` members did.

    Rank 0 passes the store from `open_store`. Raises ReshardError naming the rank when the others do not
    come.
    """
    timeout, own = timedelta(seconds=timeout_s), _own_address(host, port)
    try:
        if store is None:
            store = TCPStore(host, port, None, False, timeout, wait_for_workers=False)
        gloo: Any = ProcessGroupGloo  # nor its options
        options = gloo._Options()
        # gloo's default device resolves the host name, which on many laptops and containers leads nowhere
        device = ProcessGroupGloo.create_device(hostname=own)
        options._devices, options._timeout, options._threads = [device], timeout, 2
        group = ProcessGroupGloo(PrefixStore("weights", store), rank, world, options)
    except RuntimeError as error:
        raise ReshardError(
            f"weight transfer: rank {rank} of {world} could not join the group at {host}:{port} from "
            f"{own} within {timeout_s:.0f} s: {_first_line(error)}"
        ) from error
    return GlooGroup(group, store, rank, timeout)


def _own_address(host: str, port: int) -> str:
    """The local address from which `host` is reached; connecting a datagram socket sends nothing."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ReshardError(f"weight transfer: no route to {host}:{port}: {error}") from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0]

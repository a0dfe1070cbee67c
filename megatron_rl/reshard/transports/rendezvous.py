"""Where the members of a group meet: a store kept by trainer rank 0."""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import TCPStore

from megatron_rl.errors import ReshardError
from megatron_rl.platform import network
from megatron_rl.reshard.transports.base import LOOPBACK, Membership, first_line


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
            f"engine.port: cannot listen on {host}:{port} ({first_line(error)}); free it, or set "
            f"engine.port to 0"
        ) from error


def join_store(member: Membership) -> TCPStore:
    """The store at `member.host:port`. Raises ReshardError when nobody keeps one there in time."""
    timeout = timedelta(seconds=member.timeout_s)
    try:
        return TCPStore(member.host, member.port, None, False, timeout, wait_for_workers=False)
    except RuntimeError as error:
        raise could_not_join(member, error) from error


def could_not_join(member: Membership, error: BaseException) -> ReshardError:
    return ReshardError(
        f"weight transfer: {member.name} could not join the group of {member.world} at "
        f"{member.host}:{member.port} within {member.timeout_s:g} s: {first_line(error)}"
    )


def own_address(host: str, port: int) -> str:
    """As `network.own_address`. Raises ReshardError where no way leads to `host`."""
    try:
        return network.own_address(host, port)
    except OSError as error:
        raise ReshardError(f"weight transfer: no route to {host}:{port}: {error}") from error

"""Which network of this machine leads to the others, so that gloo need not guess it from the name of the machine."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import MutableMapping

from megatron_rl.errors import MegatronRLError

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


def own_address(host: str, port: int) -> str:
    """The local address from which `host` is reached; connecting a datagram socket sends nothing. Raises OSError."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def choose_gloo_interface(environment: MutableMapping[str, str], *, host: str, port: int) -> None:
    """Set the interface that leads to `host`, unless one is set: for a rank of a run on several machines.

    gloo itself takes the address that the machine's own name has, which is often a loopback address or another network.
    Raises MegatronRLError where `host` cannot be reached, or is an address that leads to this machine alone.
    """
    if GLOO_INTERFACE in environment:
        return
    change = (
        "set MASTER_ADDR, which is `--master` of launch/torchrun.sh, to an address of the first machine that all "
        f"others reach, or {GLOO_INTERFACE} yourself"
    )
    try:
        own = own_address(host, port)
    except OSError as error:
        raise MegatronRLError(
            f"MASTER_ADDR: no way to {host} from this machine ({error.strerror}); {change}"
        ) from error
    if ipaddress.ip_address(own.partition("%")[0]).is_loopback:
        raise MegatronRLError(
            f"MASTER_ADDR: {host}{'' if host == own else f' is {own} here and'} leads to this machine alone, but the "
            f"run has ranks on others; {change}"
        )
    interface = interface_of(own)
    if interface is not None:
        environment[GLOO_INTERFACE] = interface


def interface_of(address: str) -> str | None:
    """The network interface of this machine that has `address`; None if it has none such."""
    import psutil  # not needed by a run on one machine

    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            return str(name)
    return None

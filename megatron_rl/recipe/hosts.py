"""`HOST:PORT` as recipes and the command line write it. No name is looked up here."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HostPort:
    """`str()` gives back how it is written."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def is_loopback(self) -> bool:
        """As `is_loopback` of its host."""
        return is_loopback(self.host)


def parse_host_port(text: str) -> HostPort:
    """`10.0.0.7:7100`, `node7:7100` or `[fe80::1]:7100`. Raises ValueError with what it must be."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""
    if not colon or not host or host != host.strip() or not port.isdecimal() or int(port) > 65535:
        raise ValueError(
            f"got {text!r}, must be HOST:PORT, such as 10.0.0.7:7100 or [fe80::1]:7100, with a port of at most 65535"
        )
    return HostPort(host, int(port))


def is_loopback(host: str) -> bool:
    """Whether it leads to the machine itself. A name other than localhost may lead anywhere."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

"""Several machines on one, as far as networks go: namespaces with a switch between them. Needs root and iproute2."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_NETWORK = "10.204.0"


@dataclass(frozen=True)
class Machine:
    """The command that enters it, and where the others reach it."""

    inside: tuple[str, ...]
    address: str


@contextmanager
def machines(number: int) -> Iterator[list[Machine]]:
    """Each with one cable to the switch. To all of them the machine's own name means loopback, as on many real ones."""
    prefix = f"megatron-rl-test-{os.getpid()}"
    names, switch = [f"{prefix}-{i}" for i in range(number)], f"{prefix}-switch"
    try:
        for name in (switch, *names):
            _ip("netns", "add", name)
        _ip("-n", switch, "link", "add", "name", "bridge0", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge0", "up")
        for i, name in enumerate(names):
            _ip("link", "add", "cable0", "netns", name, "type", "veth", "peer", "name", f"port{i}", "netns", switch)
            _ip("-n", switch, "link", "set", f"port{i}", "master", "bridge0", "up")
            _ip("-n", name, "address", "add", f"{_NETWORK}.{i + 1}/24", "dev", "cable0")
            _ip("-n", name, "link", "set", "cable0", "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield [
            Machine(("ip", "netns", "exec", name), f"{_NETWORK}.{i + 1}") for i, name in enumerate(names)
        ]
    finally:
        for name in (switch, *names):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=20)


def _ip(*arguments: str) -> None:
    needs = "this test makes network namespaces, for which it has to be root on a machine with iproute2 and bridges"
    try:
        done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=20)
    except FileNotFoundError:
        raise AssertionError(f"{needs}: there is no program ip; apt-get install iproute2") from None
    assert done.returncode == 0, f"{needs}: ip {' '.join(arguments)}: {done.stderr.strip()}"

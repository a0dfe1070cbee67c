"""`megatron-rl engine` as a user starts it, and machines of its own for it: network namespaces joined by a cable."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.processes import wait_for

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Host:
    """A running engine host: `at` is for `engine.hosts`, `output` what it says."""

    process: subprocess.Popen[bytes]
    at: str
    output: Path

    def says(self, pattern: str) -> bool:
        return re.search(pattern, self.output.read_text()) is not None


@contextmanager
def engine_host(place: Path, listen: str, *options: str, inside: Sequence[str] = ()) -> Iterator[Host]:
    """Running in `place`, in the namespace that the command `inside` enters; ended by SIGTERM, which has to work."""
    place.mkdir(parents=True, exist_ok=True)
    output = place / "engine_host.txt"
    command = [*inside, sys.executable, "-m", "megatron_rl", "engine", "--listen", listen, *options]
    paths = os.pathsep.join((str(ROOT), str(ROOT / "kernels")))
    with open(output, "wb") as out:
        process = subprocess.Popen(
            command, cwd=place, env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        wait_for(
            lambda: process.poll() is not None or b"listening on" in output.read_bytes(),
            "an engine host that listens", timeout_s=60.0,
        )  # fmt: skip
        assert process.poll() is None, output.read_text()
        found = re.search(r"listening on (\S+)", output.read_text())
        assert found
        yield Host(process, found[1], output)
        process.terminate()
        assert process.wait(30) == 0, output.read_text()
    finally:
        process.kill()
        process.wait()


@dataclass(frozen=True)
class Cable:
    """Two namespaces, each with one end of a cable: commands that enter them, and their addresses."""

    inside: tuple[tuple[str, ...], tuple[str, ...]]
    addresses: tuple[str, str]

    def cut(self) -> None:
        _run("ip", "-n", self.inside[0][-1], "link", "set", "cable0", "down")

    def slow_down(self) -> None:
        """What the first sends takes half a second per megabyte."""
        limits = ("rate", "16mbit", "burst", "32kb", "latency", "1s")
        _run("tc", "-n", self.inside[0][-1], "qdisc", "add", "dev", "cable0", "root", "tbf", *limits)

    def sent(self) -> int:
        """Bytes that the first has sent."""
        return int(_run("cat", "/sys/class/net/cable0/statistics/tx_bytes", inside=self.inside[0]))


@contextmanager
def two_machines() -> Iterator[Cable]:
    """As far as networks go; needs root and iproute2."""
    names = tuple(f"megatron-rl-test-{os.getpid()}-{side}" for side in "ab")
    addresses = ("10.203.0.1", "10.203.0.2")
    try:
        for name in names:
            _run("ip", "netns", "add", name)
        other_end = ("peer", "name", "cable1", "netns", names[1])
        _run("ip", "link", "add", "cable0", "netns", names[0], "type", "veth", *other_end)
        for end, (name, address) in enumerate(zip(names, addresses, strict=True)):
            _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", f"cable{end}")
            _run("ip", "-n", name, "link", "set", f"cable{end}", "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
        yield Cable(tuple(("ip", "netns", "exec", name) for name in names), addresses)  # type: ignore[arg-type]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=20)


def _run(*command: str, inside: Sequence[str] = ()) -> str:
    done = subprocess.run([*inside, *command], capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout

"""Tries from inside what no candidate may do, before the first one runs."""

from __future__ import annotations

import json
import os
import socket
import tempfile
from pathlib import Path
from typing import Any

from megatron_rl.errors import RewardError
from megatron_rl.rewards.sandbox.client import Sandbox
from megatron_rl.rewards.sandbox.jobs import Job, JobKind, Limits, Status

# prints what of it succeeded, as JSON; every key of the object is a thing that must not
_PROBE = """
import ctypes, json, os, socket
canary, folder, port, parent, known = json.loads(input())
def opens(path, mode):
    try:
        with open(path, mode) as stream:
            stream.write(b"x") if "w" in mode else stream.read(1)
        return True
    except OSError:
        return False
def does(action):
    try:
        action()
        return True
    except (OSError, MemoryError):
        return False
libc = ctypes.CDLL(None, use_errno=True)
print(json.dumps({
    "reads files of the host": opens(canary, "rb") or opens("/etc/passwd", "rb"),
    "writes to the host": opens(folder + "/written", "wb"),
    "writes to its read-only root": opens("/written", "wb") or opens("/dev/written", "wb") or opens("/box/w", "wb"),
    "sees processes of the host": os.path.exists("/proc/self") or does(lambda: os.kill(parent, 0)),
    "reaches the network": does(lambda: socket.create_connection(("127.0.0.1", port), 1)),
    "is root, or becomes it": os.getuid() == 0 or does(lambda: os.setuid(0)),
    "makes namespaces of its own": libc.unshare(0x10000000) == 0,
    "sees our environment": bool(set(os.environ) - set(known)),
    "has more memory than it may": does(lambda: bytearray(%d << 20)),
}))
"""
_LIMITS = Limits(wall_s=20.0, cpu_s=10.0)


def check_isolation(sandbox: Sandbox, *, allow_weak: bool) -> str:
    """One line that says which layers hold. Raises RewardError where one does not, unless `allow_weak`."""
    described = sandbox.start()
    results = _probe(sandbox)
    open_doors = sorted(name for name, succeeded in results.items() if succeeded)
    if open_doors and not allow_weak:
        raise RewardError(
            f"sandbox: a program in it {' and '.join(open_doors)}, so that programs of a policy are not run here; mend "
            f"that (see megatron_rl/rewards/sandbox/README.md), or set sandbox.allow_weak: true to run them anyway"
        )
    return _describe(described, len(results), open_doors)


def _describe(described: dict[str, Any], checks: int, open_doors: list[str]) -> str:
    uids = described["uids"]
    if uids:
        users = f"uids {min(uids)} to {max(uids)}" if len(uids) > 1 else f"uid {uids[0]}"
    else:
        users = "our own uid (not root: no uid per slot, and the process limit is shared)"
    layers = [
        f"bubblewrap {described['bubblewrap']} with user, pid, net, mount, ipc and uts namespaces"
        if described["bubblewrap"]
        else "NO namespaces",
        "seccomp filter" if described["seccomp"] else "NO seccomp filter",
        "rlimits",
        users,
    ]
    verdict = (
        f"self-test: {checks} of {checks} doors closed" if not open_doors else "self-test: WEAK: a program "
    )
    return f"sandbox: {', '.join(layers)}; Python {described['python']}; {verdict}{' and '.join(open_doors)}"


def _probe(sandbox: Sandbox) -> dict[str, bool]:
    with (
        tempfile.TemporaryDirectory(prefix="megatron_rl_canary_") as folder,
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):
        os.chmod(folder, 0o777)
        canary = Path(folder) / "canary"
        canary.write_text("canary")
        os.chmod(canary, 0o644)
        known = [
            "PATH",
            "HOME",
            "LANG",
            "PYTHONUTF8",
            "PYTHONHASHSEED",
            "PYTHONINTMAXSTRDIGITS",
            "MALLOC_ARENA_MAX",
            "PWD",
            "LC_CTYPE",
        ]
        asked = json.dumps([str(canary), folder, listener.getsockname()[1], os.getpid(), known])
        program = _PROBE % (2 * _LIMITS.memory_mib)
        job = Job(id=0, kind=JobKind.STDIN, program=program.encode(), payload=asked.encode(), limits=_LIMITS)
        (outcome,) = sandbox.run([job])
    if outcome.status is not Status.FINISHED:
        raise RewardError(
            f"sandbox: its self-test did not run: {outcome.status.value}: {outcome.detail}; see "
            f"megatron_rl/rewards/sandbox/README.md for what bubblewrap needs of a machine"
        )
    results: dict[str, bool] = json.loads(outcome.output)
    return results

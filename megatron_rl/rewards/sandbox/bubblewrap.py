"""The bubblewrap command line of a run: what a candidate sees of the machine."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_rl.rewards.sandbox.interpreter import Interpreter
from megatron_rl.rewards.sandbox.jobs import Limits

BOX = "/box"  # where the program and the text that loads it stand inside
_OLDEST = (0, 8)  # the first with --size in every distribution that we know of
_SHM_BYTES = 1 << 20
_DEVICES = ("null", "zero", "urandom", "random")

ENVIRONMENT = {
    "PATH": "/usr/bin",
    "HOME": "/tmp",
    # the one locale that needs no files
    "LANG": "C",
    "PYTHONUTF8": "1",
    # sets and dicts in the same order in every run
    "PYTHONHASHSEED": "0",
    # as before 3.11: programs may print numbers of any length
    "PYTHONINTMAXSTRDIGITS": "0",
    # each thread would reserve 64 MiB of the address space for itself, and few would fit in the limit
    "MALLOC_ARENA_MAX": "1",
}
# no user site, no script folder in front of the library, no byte code; -I would ignore the hash seed
PYTHON_FLAGS = ("-s", "-P", "-B")


@dataclass(frozen=True, kw_only=True, slots=True)
class Bubblewrap:
    path: str
    version: str


def find_bubblewrap() -> Bubblewrap | str:
    """The program, or why it cannot be used."""
    path = shutil.which("bwrap")
    if path is None:
        return "bubblewrap (bwrap) is not installed"
    done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30, check=False)
    version = done.stdout.strip().rpartition(" ")[2]
    try:
        numbers = tuple(int(part) for part in version.split(".")[:2])
    except ValueError:
        return f"{path} --version says {done.stdout.strip()[:80]!r}"
    if numbers < _OLDEST:
        return f"bubblewrap is {version}, need 0.8 or later"
    return Bubblewrap(path=os.path.realpath(path), version=version)


def build_command(
    bubblewrap: Bubblewrap,
    interpreter: Interpreter,
    limits: Limits,
    *,
    files: Sequence[tuple[int, str]],
    status: int,
    seccomp: int | None,
    arguments: Sequence[str],
) -> list[str]:
    """The command that runs the interpreter with `arguments` inside.

    `files`: (descriptor to read from now, path inside). `status`: descriptor that hears the exit code. Descriptors
    are taken over by bubblewrap and closed before the interpreter starts; others that are inherited stay open.
    """
    command = [
        bubblewrap.path,
        *("--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"),
        *(
            "--unshare-cgroup-try",
            "--die-with-parent",
            "--new-session",
            "--hostname",
            "sandbox",
            "--clearenv",
        ),
        *("--json-status-fd", str(status)),
    ]
    # the filter refuses new namespaces too, and costs 15 ms less
    command += ["--disable-userns"] if seccomp is None else ["--seccomp", str(seccomp)]
    for name, value in ENVIRONMENT.items():
        command += ["--setenv", name, value]
    for source, target in interpreter.binds:
        command += ["--ro-bind", source, target]
    # no --dev: it has no size limit, and terminals nobody needs
    for device in _DEVICES:
        command += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    for descriptor, target in files:
        command += ["--perms", "0444", "--ro-bind-data", str(descriptor), target]
    command += ["--size", str(_SHM_BYTES), "--perms", "1777", "--tmpfs", "/dev/shm"]
    command += ["--size", str(limits.tmp_mib << 20), "--perms", "1777", "--tmpfs", "/tmp"]
    # what bubblewrap made itself is a tmpfs without a limit
    command += ["--remount-ro", "/", "--chdir", "/tmp"]
    return [*command, interpreter.program, *PYTHON_FLAGS, *arguments]

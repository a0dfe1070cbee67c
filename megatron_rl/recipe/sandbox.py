"""How programs of a policy are confined while `code_tests` grades them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_rl.recipe.problems import Problem
from megatron_rl.recipe.types import Bool, Count, Mebibytes, PositiveInt, Seconds, Text

_MIN_MEMORY_MIB = 64  # an interpreter alone takes about half
_LAST_UID = 2**31 - 2


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxConfig:
    """Limits are of one program on one test; a test's own `limits` stand instead."""

    slots: Count = 2  # programs at a time; one per core that is free while rewards are computed
    max_tests: Count = 16  # of a prompt in training, drawn by prompt id alone; evaluation uses all
    wall_s: Seconds = 4.0
    cpu_s: Seconds | None = None  # rounded up to whole seconds; none: wall_s
    memory_mib: Mebibytes = 1024  # address space of a process; all together may hold twice as much
    output_mib: Mebibytes = 16  # standard output and error together
    tmp_mib: Mebibytes = 64  # size of the private /tmp, and of the largest file
    processes: Count = 32  # with threads
    first_uid: PositiveInt = 60800  # start of 384 user ids that nothing else uses; read where we are root
    python: Text | None = None  # interpreter of the programs; none: /usr/bin/python3
    # run programs although a layer of isolation is missing. Only for programs that you trust
    allow_weak: Bool = False


def sandbox_problems(sandbox: SandboxConfig, path: str) -> Iterator[Problem]:
    """Limits that no program could live in."""
    if sandbox.memory_mib < _MIN_MEMORY_MIB:
        yield Problem(
            f"{path}.memory_mib",
            f"got {sandbox.memory_mib}, but Python alone needs about half of {_MIN_MEMORY_MIB}; use at least that",
        )
    if not 1000 <= sandbox.first_uid <= _LAST_UID - 384:
        yield Problem(
            f"{path}.first_uid",
            f"got {sandbox.first_uid}, must be from 1000 (below are the system's own) to {_LAST_UID - 384}",
        )
    if sandbox.python is not None and not sandbox.python.startswith("/"):
        yield Problem(f"{path}.python", f"got {sandbox.python!r}, must be an absolute path")

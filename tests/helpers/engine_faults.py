"""Faults that a test switches on inside a live engine process: a vLLM plugin, loaded there and nowhere else.

A fault is on while a file of its name lies in the directory that `FAULTS` in the environment names. Each takes away
one defence of ours, so that what vLLM does without it can be seen.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ENVIRONMENT = "MEGATRON_RL_TEST_FAULTS"
KEEP_HEAD = "keep_head"  # the tied head is not packed again after an update
KEEP_PREFIXES = "keep_prefixes"  # the prefix cache is not reset after an update

_ENTRY_POINTS = "[vllm.general_plugins]\nmegatron_rl_test_faults = tests.helpers.engine_faults:register\n"


def install(directory: Path) -> dict[str, str]:
    """Make the plugin known below `directory`; the environment for processes that are to load it."""
    metadata = directory / "megatron_rl_test_faults-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: megatron_rl_test_faults\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(_ENTRY_POINTS)
    paths = [str(directory), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    return {ENVIRONMENT: str(directory), "PYTHONPATH": os.pathsep.join(path for path in paths if path)}


@contextmanager
def switched_on(directory: Path, fault: str) -> Iterator[None]:
    """The fault is on inside the block, in every engine started with the environment of `install(directory)`."""
    flag = directory / fault
    flag.touch()
    try:
        yield
    finally:
        flag.unlink()


def register() -> None:
    """vLLM calls this in every process of an engine."""
    from vllm import LLM

    from megatron_rl.rollout import weight_receiver

    _guard(weight_receiver, "_repack_tied_head", KEEP_HEAD, instead=None)
    _guard(LLM, "reset_prefix_cache", KEEP_PREFIXES, instead=True)


def _guard(owner: Any, name: str, fault: str, *, instead: Any) -> None:
    original: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(original)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        return instead if Path(os.environ[ENVIRONMENT], fault).exists() else original(*args, **kwargs)

    setattr(owner, name, guarded)

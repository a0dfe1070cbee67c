"""A process that is killed at any moment of a save leaves a checkpoint that loads, and the next save works."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.model.checkpoint_files import (
    Recorded,
    SavedState,
    find_latest,
    publish_checkpoint,
    retain_newest,
    start_checkpoint,
)
from megatron_rl.model.checkpoint_writer import file_digest, write_verified

FILES = ("model/__0_0.distcp", "optimizer/__0_0.distcp", "generators/rank_0.json")
MOST_EVENTS = 500


def save_files(root: Path, step: int) -> None:
    """All that a save does to the disk, on one rank."""
    name = f"stage_0_step_{step:06d}"
    directory = start_checkpoint(root, name)
    files = {}
    for file in FILES:
        (directory / file).parent.mkdir()
        written = write_verified(directory / file, lambda file=file: pieces(root, file, step))
        files[file] = Recorded(written.num_bytes, written.sha256)
    saved = SavedState(
        path=directory, progress={"stage": 0, "step": step}, optimizer_steps=step, recipe={}, recipe_digest="",
        model={}, layout={}, files=files,
    )  # fmt: skip
    publish_checkpoint(saved, versions={"torch": "2"})
    retain_newest(root, keep=1)


def pieces(root: Path, file: str, step: int) -> Iterator[memoryview]:
    for part in range(3):
        sys.audit("test.piece", str(root))
        yield memoryview(f"{file} {step} {part} ".encode() * 100)


def save_until_event(root: Path, step: int, number: int) -> bool:
    """Save in a process of its own that kills itself before its event `number` at `root`; False: it got to its end."""
    child = os.fork()
    if child:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status in (0, -signal.SIGKILL)
        return status != 0
    try:
        left = number

        def count(event: str, args: tuple[Any, ...]) -> None:
            nonlocal left
            if any(str(arg).startswith(str(root)) for arg in args if isinstance(arg, str | Path)):
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        save_files(root, step)
        os._exit(0)
    finally:
        os._exit(1)


def check_loads(root: Path) -> int:
    """Every byte of the checkpoint to resume from is right; returns its step."""
    saved = find_latest(root)
    assert saved is not None
    step = int(saved.progress["step"])
    assert set(saved.files) == set(FILES)
    for name, recorded in saved.files.items():
        assert file_digest(saved.path / name) == recorded.sha256
        assert (saved.path / name).read_bytes().startswith(f"{name} {step} 0 ".encode())
    return step


def test_one_checkpoint_loads_after_a_kill_before_every_single_operation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a killed process takes nothing with it that it gave to the operating system
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    save_files(tmp_path / "origin", 10)
    found = []
    for number in range(1, MOST_EVENTS):
        root = tmp_path / f"killed_at_{number}"
        shutil.copytree(tmp_path / "origin", root)
        was_killed = save_until_event(root, 20, number)
        found.append(check_loads(root))
        if not was_killed:
            break
        save_files(root, 30)
        assert check_loads(root) == 30
        assert sorted(path.name for path in root.iterdir()) == ["latest", "stage_0_step_000030"]
        shutil.rmtree(root)
    # the old one until the new one is complete, then the new one; and the kills went through the whole save
    assert found == sorted(found) and set(found) == {10, 20}
    assert found.index(20) > 30 and found.count(20) > 5


def test_the_only_good_checkpoint_survives_a_save_that_fails(tmp_path: Path) -> None:
    save_files(tmp_path, 10)
    directory = start_checkpoint(tmp_path, "stage_0_step_000020")
    saved = find_latest(tmp_path)
    assert saved is not None
    # its files were never written
    with pytest.raises(Exception, match=r"model/__0_0\.distcp: is not there"):
        publish_checkpoint(replace(saved, path=directory, progress={"stage": 0, "step": 20}), versions={})
    assert check_loads(tmp_path) == 10

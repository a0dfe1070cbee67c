"""What killed engines leave behind is removed by the next one, and nothing else is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from megatron_rl.rollout.engine_scratch import EngineScratch
from megatron_rl.rollout.shared_memory import SHM

ROOT = Path(__file__).parents[2]
OWNER = """
import subprocess, sys, time
from pathlib import Path
from megatron_rl.rollout.engine_scratch import EngineScratch
scratch = EngineScratch()
scratch.note_shared_memory([Path(sys.argv[1])])
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(scratch.path, child.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_files_and_memory_of_an_owner_that_was_killed_go_with_the_next_start_and_not_before(
    place: Path,
) -> None:
    memory = SHM / f"test_engine_scratch_{os.getpid()}"
    memory.touch()
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(memory)],
        cwd=ROOT, env=os.environ | {"TMPDIR": str(place)}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert owner.stdout is not None
    path, child = owner.stdout.readline().split()
    try:
        (Path(path) / "of_vllm").touch()
        first = EngineScratch()
        assert Path(path).is_dir() and memory.exists()
        # its child, which lives on, must not keep it
        owner.kill()
        owner.wait()
        second = EngineScratch()
        assert not Path(path).exists() and not memory.exists()
        assert sorted(place.iterdir()) == sorted([first.path, second.path])
        for scratch in (first, second, second):
            scratch.remove()
        assert list(place.iterdir()) == []
    finally:
        os.kill(int(child), signal.SIGKILL)
        owner.kill()
        owner.stdout.close()
        memory.unlink(missing_ok=True)


def test_what_is_just_being_made_or_of_something_else_is_left_alone(place: Path) -> None:
    for name in ("megatron_rl_engine_new", "megatron_rl_verify_x"):
        (place / name).mkdir()
    EngineScratch().remove()
    assert sorted(path.name for path in place.iterdir()) == ["megatron_rl_engine_new", "megatron_rl_verify_x"]

"""Shared memory of an engine's process group is found by what its processes map, and removed."""

import contextlib
import os
import signal
import subprocess
import sys
from multiprocessing import shared_memory
from pathlib import Path

import pytest

from megatron_rl.rollout.shared_memory import remove_shared_memory, shared_memory_of_group

HOLDER = """
import sys
from multiprocessing import resource_tracker, shared_memory
kept, gone = (shared_memory.SharedMemory(create=True, size=100) for _ in range(2))
gone.unlink()
resource_tracker.unregister(kept._name, "shared_memory")
print(kept.name, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder():
    """A process that leads its group, and the file of the shared memory that it will leave behind."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    file = Path("/dev/shm") / process.stdout.readline().strip()
    yield process, file
    process.kill()
    process.wait()
    with contextlib.suppress(FileNotFoundError):
        file.unlink()


def test_only_files_of_the_group_are_found_and_they_outlive_a_killed_process_until_removed(holder):
    process, file = holder
    ours = shared_memory.SharedMemory(create=True, size=100)
    try:
        found = shared_memory_of_group(process.pid)
        assert found == {file}
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert file.exists()
        remove_shared_memory([*found, *found])
        assert not file.exists()
        assert (Path("/dev/shm") / ours.name).exists()
    finally:
        ours.close()
        ours.unlink()


def test_semaphores_are_found_by_whoever_made_them():
    code = (
        "import multiprocessing, sys\n"
        "lock = multiprocessing.get_context('spawn').Lock()\n"
        "print(lock._semlock.name, flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:  # fmt: skip
        file = Path("/dev/shm") / f"sem.{process.stdout.readline().strip().removeprefix('/')}"
        assert file.exists()
        found = shared_memory_of_group(process.pid)
        # with it whoever would have removed the file
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert found == {file} and file.exists()
        remove_shared_memory(found)
        assert not file.exists()


def test_a_group_that_is_gone_has_none(holder):
    process, _ = holder
    process.kill()
    process.wait()
    assert shared_memory_of_group(process.pid) == set()

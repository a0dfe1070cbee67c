"""A file that was written is compared with what it should hold; the process that does so ends with its trainer."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from megatron_rl.errors import CheckpointError
from megatron_rl.model.background import Background
from megatron_rl.model.checkpoint_process import StagingBuffer, WriterProcess
from megatron_rl.model.checkpoint_writer import NotAsWritten, Written, file_digest, write_verified
from tests.helpers.full_disk import files_limited_to, process_files_limited_to
from tests.helpers.processes import wait_for

CONTENT = os.urandom(9_000_001)  # no whole number of chunks
DIGEST = hashlib.sha256(CONTENT).hexdigest()


def pieces() -> Iterator[memoryview]:
    yield memoryview(CONTENT)[:700]
    yield memoryview(CONTENT)[700:]


def test_a_written_file_holds_its_pieces_and_the_digest_is_theirs(tmp_path: Path) -> None:
    assert write_verified(tmp_path / "file", pieces) == Written(len(CONTENT), DIGEST)
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert file_digest(tmp_path / "file") == DIGEST


@pytest.mark.parametrize("position", [0, 700, 5_000_000, 9_000_000])
def test_a_disk_that_changes_a_byte_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, position: int
) -> None:
    sync = os.fsync

    def lie(descriptor: int) -> None:
        os.pwrite(descriptor, bytes([CONTENT[position] ^ 1]), position)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", lie)
    with pytest.raises(NotAsWritten, match="differs from what was written, in bytes") as caught:
        write_verified(tmp_path / "file", pieces)
    assert caught.value.filename == str(tmp_path / "file")


def test_a_disk_that_loses_the_end_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: os.ftruncate(descriptor, 10))
    with pytest.raises(NotAsWritten, match="has 10 bytes, 9000001 were written"):
        write_verified(tmp_path / "file", pieces)


def test_a_full_disk_is_an_error_naming_the_file(tmp_path: Path) -> None:
    with files_limited_to(5_000_000), pytest.raises(OSError, match=r"File too large: .*/file"):
        write_verified(tmp_path / "file", pieces)


def test_a_wait_for_a_disk_that_does_not_answer_is_bounded() -> None:
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"writing took longer than 0\.2 s"):
        Background(lambda: time.sleep(20), what="writing").result(0.2)
    assert time.monotonic() - began < 10


@pytest.fixture
def staging() -> Iterator[StagingBuffer]:
    buffer = StagingBuffer()
    yield buffer
    buffer.close()


@pytest.fixture
def writer() -> Iterator[WriterProcess]:
    process = WriterProcess(rank=3)
    yield process
    process.close()


def submit(
    writer: WriterProcess, staging: StagingBuffer, directory: Path, *, timeout_s: float = 60.0
) -> None:
    ranges = staging.fill({"a": [bytes(64), torch.arange(5.0)[None], b"tail"], "b": [CONTENT]})
    writer.submit(directory, ranges, memory=staging.descriptor, timeout_s=timeout_s)


def test_a_writer_writes_what_was_staged_and_later_changes_do_not_matter(
    writer: WriterProcess, staging: StagingBuffer, tmp_path: Path
) -> None:
    weights = torch.arange(1000, dtype=torch.bfloat16)
    ranges = staging.fill({"w": [bytes(64), weights, b"tail"], "b": [CONTENT]})
    writer.submit(tmp_path, ranges, memory=staging.descriptor, timeout_s=60)
    staged = bytes(64) + weights.view(torch.uint8).numpy().tobytes() + b"tail"
    weights.zero_()
    assert writer.result() == {
        "w": Written(len(staged), hashlib.sha256(staged).hexdigest()),
        "b": Written(len(CONTENT), DIGEST),
    }
    assert (tmp_path / "w").read_bytes() == staged


def test_a_killed_writer_is_started_again_once_and_then_an_error(
    writer: WriterProcess, staging: StagingBuffer, tmp_path: Path
) -> None:
    os.kill(writer.pid, signal.SIGKILL)
    submit(writer, staging, tmp_path)
    assert writer.result()["b"] == Written(len(CONTENT), DIGEST)
    killed = writer.pid
    os.kill(writer.pid, signal.SIGKILL)
    # however fast the next one starts, it cannot finish: nobody reads what it would write
    (tmp_path / "held").mkdir()
    os.mkfifo(tmp_path / "held" / "a")
    submit(writer, staging, tmp_path / "held")
    while (second := writer.pid) == killed:
        assert not writer.is_settled()
    os.kill(second, signal.SIGKILL)
    with pytest.raises(
        CheckpointError,
        match=rf"rank 3: checkpoint writer \(pid {second}\) died \(signal SIGKILL\), and so had the one before it",
    ):
        writer.result()


def test_a_stopped_writer_is_an_error_within_its_time_and_is_killed(
    writer: WriterProcess, staging: StagingBuffer, tmp_path: Path
) -> None:
    os.kill(writer.pid, signal.SIGSTOP)
    submit(writer, staging, tmp_path, timeout_s=0.5)
    assert not writer.is_settled()
    began, pid = time.monotonic(), writer.pid
    with pytest.raises(
        CheckpointError, match=rf"rank 3: checkpoint writer \(pid {pid}\) did not finish within 0\.5 s"
    ):
        writer.result()
    assert time.monotonic() - began < 10
    assert not Path(f"/proc/{pid}").exists()


def test_a_full_disk_of_the_writer_is_an_error_naming_the_file(
    writer: WriterProcess, staging: StagingBuffer, tmp_path: Path
) -> None:
    with process_files_limited_to(writer.pid, 5_000_000):
        submit(writer, staging, tmp_path)
        with pytest.raises(
            CheckpointError, match=r"rank 3: checkpoint writer \(pid \d+\): .*File too large: .*/b"
        ):
            writer.result()


TRAINER = textwrap.dedent("""
    import time
    from megatron_rl.model.checkpoint_process import WriterProcess
    writers = [WriterProcess(rank=rank) for rank in range(2)]
    print(*(writer.pid for writer in writers), flush=True)
    time.sleep(600)
""")


def test_writers_end_with_their_killed_trainer_even_when_they_are_stopped() -> None:
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    writers = [int(pid) for pid in trainer.stdout.readline().split()]
    # it asks the kernel for its end once it runs
    wait_for(
        lambda: all(ignores_stop_requests(writer) for writer in writers),
        "two writers that run",
        timeout_s=60.0,
    )
    os.kill(writers[0], signal.SIGSTOP)
    trainer.kill()
    trainer.communicate()
    wait_for(lambda: not any(map(is_running, writers)), "the end of both", timeout_s=20.0)


def ignores_stop_requests(pid: int) -> bool:
    """Looks at SIGUSR1: SIGINT is ignored from birth where a shell started these tests in the background."""
    (mask,) = (
        line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigIgn")
    )
    return bool(int(mask.split()[1], 16) & 1 << (signal.SIGUSR1 - 1))


def is_running(pid: int) -> bool:
    with suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False

"""Writes files and proves that they hold what they should; also the process that does so beside a training rank.

`python -m megatron_rl.model.checkpoint_writer FD PID`: jobs come through socket FD from process PID, each with the
memory that its files are cut from. It needs no library beyond Python's own, so that it starts in no time, and ends
when its trainer does, however that ends.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import queue
import signal
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.model.background import Background
from megatron_rl.platform.parent import end_with_parent

_CHUNK_BYTES = 16 << 20
_AHEAD = 4  # chunks that were written and wait for their digest
_MESSAGE_BYTES = 1 << 16

# every call walks the file's content once more, as contiguous bytes
Content = Callable[[], Iterable[memoryview]]


class NotAsWritten(OSError):
    """A file that does not hold what was written into it."""


@dataclass(frozen=True, slots=True)
class Written:
    """A file on the disk: its size, and the digest of the memory it was written from."""

    num_bytes: int
    sha256: str


def write_verified(path: Path, content: Content) -> Written:
    """Write a file, wait until it is on the disk, and compare what it holds with the memory, byte by byte.

    What is read back comes from the operating system's cache: it shows what the file holds, not what the device
    would give back after a power cut. Raises OSError naming the file.
    """
    try:
        with path.open("wb") as file:
            num_bytes, digest = _write_all(file.write, content)
            file.flush()
            os.fsync(file.fileno())
        _compare(path, content, num_bytes)
        return Written(num_bytes, digest.result())
    except OSError as error:
        if error.filename is None:
            raise type(error)(error.errno, error.strerror or str(error), str(path)) from error
        raise


def file_digest(path: Path) -> str:
    """sha256 of what a file holds."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_all(write: Callable[[memoryview], object], content: Content) -> tuple[int, Background[str]]:
    """Bytes written and their digest, which a thread takes meanwhile and while the disk is waited for."""
    num_bytes = 0
    waiting: queue.Queue[memoryview | None] = queue.Queue(maxsize=_AHEAD)

    def take() -> str:
        digest = hashlib.sha256()
        while (chunk := waiting.get()) is not None:
            digest.update(chunk)
        return digest.hexdigest()

    hashing = Background(take, what="a digest")
    try:
        for chunk in _chunks(content()):
            waiting.put(chunk)
            write(chunk)
            num_bytes += len(chunk)
    finally:
        waiting.put(None)
    return num_bytes, hashing


def _compare(path: Path, content: Content, num_bytes: int) -> None:
    if path.stat().st_size != num_bytes:
        raise NotAsWritten(None, f"has {path.stat().st_size} bytes, {num_bytes} were written", str(path))
    # bytearrays compare at the speed of memory
    buffer = bytearray(_CHUNK_BYTES)
    position = 0
    with path.open("rb", buffering=0) as file:
        for chunk in _chunks(content()):
            if len(chunk) != len(buffer):
                buffer = bytearray(len(chunk))
            filled = memoryview(buffer)
            while filled:
                count = file.readinto(filled)
                if not count:
                    raise NotAsWritten(None, f"ends after {position} bytes", str(path))
                filled = filled[count:]
            filled.release()
            if buffer != chunk:
                raise NotAsWritten(
                    None,
                    f"differs from what was written, in bytes {position} to {position + len(chunk)}",
                    str(path),
                )
            position += len(chunk)


def _chunks(views: Iterable[memoryview]) -> Iterator[memoryview]:
    for view in views:
        for start in range(0, len(view), _CHUNK_BYTES):
            yield view[start : start + _CHUNK_BYTES]


def _main(descriptor: int, trainer: int) -> int:
    end_with_parent()
    if os.getppid() != trainer:
        return 1
    # a request to stop is for the trainer, which may want its last checkpoint written
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    os.nice(5)
    with socket.socket(fileno=descriptor) as jobs:
        while True:
            message, descriptors, _, _ = socket.recv_fds(jobs, _MESSAGE_BYTES, 1)
            if not message:
                return 0
            jobs.send(json.dumps(_do(json.loads(message), descriptors[0])).encode())


def _do(job: dict, memory: int) -> dict:
    """The answer to a job: {"files": {name: [bytes, sha256]}} or {"error": text}."""
    try:
        view = memoryview(mmap.mmap(memory, 0, prot=mmap.PROT_READ))
        return {
            "files": {
                name: _write_range(Path(job["directory"], name), view[begin : begin + length])
                for name, begin, length in job["files"]
            }
        }
    except OSError as error:
        return {"error": str(error)}
    finally:
        os.close(memory)


def _write_range(path: Path, part: memoryview) -> Sequence[int | str]:
    written = write_verified(path, lambda: [part])
    return written.num_bytes, written.sha256


if __name__ == "__main__":
    sys.exit(_main(int(sys.argv[1]), int(sys.argv[2])))

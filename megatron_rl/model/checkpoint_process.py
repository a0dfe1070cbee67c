"""The trainer's side of its checkpoint writer: memory that both see, and a process that is asked and waited for.

The memory has no name and the two talk through a pair of sockets, so nothing is left behind however either ends.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import Tensor

from megatron_rl.errors import CheckpointError
from megatron_rl.model.checkpoint_writer import Written

_ALIGNMENT = 64  # of a file in the memory; elements inside it are aligned alike
_MESSAGE_BYTES = 1 << 20
_COPY_THREADS = 4  # more do not move memory faster
_KILLED_S = 10.0  # a killed process that does not end waits for its disk

Range = tuple[str, int, int]  # name, first byte, bytes


class StagingBuffer:
    """Memory of this process that another can read. It is kept from one save to the next and only grows."""

    def __init__(self) -> None:
        self.descriptor = -1
        self._bytes: Tensor = torch.empty(0, dtype=torch.uint8)

    def fill(self, files: Mapping[str, Sequence[bytes | Tensor]]) -> list[Range]:
        """Copy the pieces of each file, one behind the other; returns where each file stands."""
        ranges, position = [], 0
        for name, pieces in files.items():
            begin = position + -position % _ALIGNMENT
            length = sum(piece.nbytes if isinstance(piece, Tensor) else len(piece) for piece in pieces)
            ranges.append((name, begin, length))
            position = begin + length
        self._reserve(position)
        with _all_cores():
            for (_, begin, _), pieces in zip(ranges, files.values(), strict=True):
                self._copy(pieces, begin)
        return ranges

    def close(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def _reserve(self, num_bytes: int) -> None:
        if num_bytes <= self._bytes.numel():
            return
        self.close()
        self.descriptor = os.memfd_create("checkpoint")
        os.ftruncate(self.descriptor, num_bytes)
        # every page is obtained now, not while it is copied to
        mapped = mmap.mmap(self.descriptor, num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self._bytes = torch.frombuffer(mapped, dtype=torch.uint8)

    def _copy(self, pieces: Sequence[bytes | Tensor], position: int) -> None:
        view = self._bytes.numpy().data
        for piece in pieces:
            if isinstance(piece, Tensor):
                place = self._bytes[position : position + piece.nbytes].view(piece.dtype)
                place.copy_(piece.reshape(-1))
                position += piece.nbytes
            else:
                view[position : position + len(piece)] = piece
                position += len(piece)


@contextmanager
def _all_cores() -> Iterator[None]:
    """Let torch use several cores, which have nothing else to do while the state is copied. Copies do not round."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(before, min(len(os.sched_getaffinity(0)), _COPY_THREADS)))
    try:
        yield
    finally:
        torch.set_num_threads(before)


class WriterProcess:
    """One writer beside one rank, for one job at a time.

    A writer that dies is started once more and does the job again; a second death is an error.
    """

    def __init__(self, *, rank: int) -> None:
        self._rank = rank
        self._job: tuple[bytes, int] | None = None
        self._answer: dict | None = None
        self._start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def submit(self, directory: Path, ranges: Sequence[Range], *, memory: int, timeout_s: float) -> None:
        """Have the files written below `directory`; `memory` is the descriptor that they are ranges of."""
        job = {"directory": str(directory.absolute()), "files": ranges}
        self._job, self._answer = (json.dumps(job).encode(), memory), None
        self._num_deaths = 0
        self._deadline, self._timeout_s = time.monotonic() + timeout_s, timeout_s
        self._send()

    def is_settled(self) -> bool:
        """Whether `result` would return or raise at once."""
        with suppress(CheckpointError):
            return self._receive(0.0) or time.monotonic() > self._deadline
        return True

    def result(self) -> dict[str, Written]:
        """What was written, by name. Raises CheckpointError for what the writer complains of, for its death, and
        when the job's time is over."""
        if not self._receive(max(0.0, self._deadline - time.monotonic())):
            pid = self.pid
            self.close()
            raise CheckpointError(
                f"rank {self._rank}: checkpoint writer (pid {pid}) did not finish within {self._timeout_s:g} s "
                "(checkpoint.timeout_s); it was killed: look at the disk that it writes to"
            )
        assert self._answer is not None
        if "error" in self._answer:
            raise CheckpointError(
                f"rank {self._rank}: checkpoint writer (pid {self.pid}): {self._answer['error']}"
            )
        return {name: Written(*written) for name, written in self._answer["files"].items()}

    def close(self) -> None:
        """End the process at once, whatever it does."""
        self._socket.close()
        # SIGKILL ends a stopped process too
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILLED_S)

    def _start(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "megatron_rl.model.checkpoint_writer",
                    str(theirs.fileno()),
                    str(os.getpid()),
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )

    def _send(self) -> None:
        assert self._job is not None
        message, memory = self._job
        # a writer that is dead already is noticed where its answer is read
        with suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self._socket, [message], [memory])

    def _receive(self, timeout_s: float) -> bool:
        """Whether the answer is there within the time. Raises CheckpointError at the second death."""
        deadline = time.monotonic() + timeout_s
        while self._answer is None:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([self._socket], [], [], left)[0]:
                return False
            message = b""
            with suppress(ConnectionResetError):
                message = self._socket.recv(_MESSAGE_BYTES)
            if message:
                self._answer = json.loads(message)
            else:
                self._start_again()
        return True

    def _start_again(self) -> None:
        pid, code = self.pid, self._process.wait(_KILLED_S)
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        self._num_deaths += 1
        if self._num_deaths > 1:
            raise CheckpointError(
                f"rank {self._rank}: checkpoint writer (pid {pid}) died ({how}), and so had the one before it; is "
                "the machine out of memory?"
            )
        self._socket.close()
        self._start()
        self._send()

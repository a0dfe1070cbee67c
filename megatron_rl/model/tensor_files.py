"""Tensors as bytes in files: read any part of one, wherever it stands, in bounded memory.

Files are read, not mapped: what a mapping touches counts as this process's memory until the file is closed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

_BLOCK_BYTES = 4 * 2**20  # read at once where bytes cannot go straight to their place; fits a CPU cache


@dataclass(frozen=True, slots=True)
class Stored:
    """A contiguous tensor inside a file, `offset` bytes from its start."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class TensorFile:
    """An open file that holds tensors. Raises OSError where it cannot be read, EOFError where it is too short."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("rb", buffering=0)

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    @property
    def size(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def read_into(self, stored: Stored, out: Tensor, *, starts: Sequence[int]) -> None:
        """Fill `out`, of any dtype, device and strides, with the part of its shape that begins at `starts`."""
        if not out.numel():
            return
        rest = tuple(out.shape[1:])
        row_bytes = math.prod(stored.shape[1:]) * stored.dtype.itemsize
        begin = stored.offset + starts[0] * row_bytes
        if (
            rest == stored.shape[1:]
            and out.dtype is stored.dtype
            and out.device.type == "cpu"
            and out.is_contiguous()
        ):
            self._fill(out, begin)
            return
        rows = max(1, _BLOCK_BYTES // row_bytes)
        block = torch.empty((min(rows, out.shape[0]), *stored.shape[1:]), dtype=stored.dtype)
        for first in range(0, out.shape[0], rows):
            part = out[first : first + rows]
            read = block[: part.shape[0]]
            self._fill(read, begin + first * row_bytes)
            for dim in range(1, read.dim()):
                read = read.narrow(dim, starts[dim], out.shape[dim])
            part.copy_(read)

    def read_at(self, begin: int, view: memoryview) -> int:
        """Fill `view` as far as the file reaches; the number of bytes."""
        self._file.seek(begin)
        done = 0
        while done < len(view) and (count := self._file.readinto(view[done:])):
            done += count
        return done

    def _fill(self, out: Tensor, begin: int) -> None:
        view = tensor_bytes(out)
        done = self.read_at(begin, view)
        if done < len(view):
            raise EOFError(f"{self.path}: ends after {begin + done} bytes, {len(view) - done} are missing")


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


class Scratch:
    """Memory for one tensor at a time, used again and again: fresh memory costs a page fault every few kilobytes."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor with a storage of its size; it is gone with the next call."""
        count = math.prod(shape)
        if self._memory.nbytes < count * dtype.itemsize:
            # the smaller one goes before the larger one comes
            self._memory = torch.empty(0, dtype=torch.uint8)
            self._memory = torch.empty(count * dtype.itemsize, dtype=torch.uint8)
        return torch.frombuffer(tensor_bytes(self._memory), dtype=dtype, count=count).view(tuple(shape))

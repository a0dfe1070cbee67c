"""The safetensors format, slice by slice in and tensor by tensor out: no file is ever held in memory.

A file is the length of its header (8 bytes), the header (JSON: dtype, shape and byte interval of each tensor), and
the bytes of the tensors without a gap. The safetensors package itself checks every header that is read here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_rl.errors import ModelError
from megatron_rl.model.tensor_files import Stored, tensor_bytes

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_ALIGNMENT = 8  # of the first tensor


def read_header(path: Path) -> dict[str, Stored]:
    """Where each tensor of a file stands.

    Raises ModelError for a file that is cut short or otherwise not whole, for a name that stands there twice, and
    for dtypes that are not floating point: quantised tensors.
    """
    try:
        # the package compares every interval with the size of the file
        with path.open("rb") as file, safe_open(str(path), framework="pt"):
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length), object_pairs_hook=_without_duplicates)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (SafetensorError, ValueError) as error:
        raise ModelError(
            f"{path}: not a complete safetensors file: {error}; download or write it again"
        ) from None
    return {
        name: _stored(path, name, entry, data_start=8 + length)
        for name, entry in header.items()
        if name != "__metadata__"
    }


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        raise ValueError(
            f"{next(name for name in names if names.count(name) > 1)} stands twice in the header"
        )
    return dict(pairs)


def _stored(path: Path, name: str, entry: dict[str, Any], *, data_start: int) -> Stored:
    if entry["dtype"] not in _DTYPES:
        raise ModelError(
            f"{path}: {name}: dtype is {entry['dtype']}, must be one of {', '.join(_DTYPES)}; use the unquantised "
            "checkpoint"
        )
    return Stored(_DTYPES[entry["dtype"]], tuple(entry["shape"]), data_start + entry["data_offsets"][0])


class SafetensorsWriter:
    """Writes one file whose tensors are known beforehand, in any order; each once. Raises OSError."""

    def __init__(self, path: Path, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
        # wide elements first, so that each tensor starts at a multiple of its element size
        order = sorted(tensors, key=lambda name: -tensors[name][0].itemsize)
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in order:
            dtype, shape = tensors[name]
            begin, end = end, end + Stored(dtype, shape, 0).nbytes
            header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        start = 8 + len(text)
        self._left = {name: Stored(*tensors[name], start + header[name]["data_offsets"][0]) for name in order}
        self._file = path.open("wb", buffering=0)
        self._write(len(text).to_bytes(8, "little") + text)

    @property
    def is_complete(self) -> bool:
        return not self._left

    def add(self, name: str, tensor: Tensor) -> None:
        """Write one CPU tensor of the announced dtype and shape."""
        stored = self._left.pop(name)
        assert (tensor.dtype, tuple(tensor.shape)) == (stored.dtype, stored.shape), name
        if self._file.tell() != stored.offset:
            self._file.seek(stored.offset)
        self._write(tensor_bytes(tensor.contiguous()))

    def _write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]

    def close(self) -> None:
        """Wait until the bytes are on the disk, and close the file. Raises OSError where they cannot be."""
        try:
            os.fsync(self._file.fileno())
        finally:
            self._file.close()

    def abandon(self) -> None:
        """Close the file as it is."""
        self._file.close()

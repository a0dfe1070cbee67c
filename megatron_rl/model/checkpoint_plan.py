"""Where the bytes of a checkpoint go: the file of each rank, and the index of a directory. Nothing is written here.

The format is torch's (`torch.distributed.checkpoint`) as megatron-core uses it: a rank's file is a row of archives as
`torch.save` writes them, one per box, and `.metadata` says which box stands where. An archive is its elements in a
frame that depends on their shape and dtype alone; so a file is known before a byte of it is copied, and elements can
be written from where they lie.
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_rl.errors import CheckpointError
from megatron_rl.model.boxes import tiles

if TYPE_CHECKING:
    # stands on megatron-core, which a conversion does without
    from megatron_rl.model.checkpoint_shards import Owned

METADATA_FILE = ".metadata"
_ALIGNMENT = 64  # of archives in a file, so that elements can be copied as their dtype
# megatron-core's own two files
_COMMON_FILE = "common.pt"
_FORMAT_FILE = "metadata.json"
_FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One archive in a rank's file: a box of a tensor, or an object (`dtype` None, and no shape)."""

    key: str
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    begin: int
    length: int


@dataclass(frozen=True, slots=True)
class RankFile:
    """One file as a row of pieces: bytes of frames and objects, and tensors whose elements stand between them."""

    entries: tuple[Entry, ...]
    pieces: Sequence[bytes | Tensor]
    num_bytes: int


def plan_file(owned: Owned) -> RankFile:
    """Lay out the file of what one rank owns."""
    entries: list[Entry] = []
    pieces: list[bytes | Tensor] = []
    position = 0
    for key, content in owned.objects.items():
        entries.append(Entry(key, None, (), (), (), position, len(content)))
        pieces.append(content)
        position += len(content)
    for shard in owned.shards:
        padding = -position % _ALIGNMENT
        head, tail = _frame(shard.sizes, shard.data.dtype)
        begin = position + padding
        length = len(head) + shard.data.nbytes + len(tail)
        entries.append(
            Entry(shard.key, shard.data.dtype, shard.shape, shard.starts, shard.sizes, begin, length)
        )
        pieces += [bytes(padding) + head, shard.data, tail]
        position = begin + length
    return RankFile(tuple(entries), pieces, position)


def plan_index(files: Mapping[str, Sequence[Entry]]) -> tuple[bytes, Metadata]:
    """`.metadata` of a directory, as bytes and as what it says; `files` are the entries of every file in it.

    Raises CheckpointError naming a tensor that the entries do not cover exactly once.
    """
    tensors: dict[str, list[Entry]] = {}
    stored: dict[str, STORAGE_TYPES] = {}
    storage = {}
    for name, entries in files.items():
        for entry in entries:
            index = MetadataIndex(entry.key, None if entry.dtype is None else torch.Size(entry.starts))
            if index in storage:
                raise CheckpointError(f"{entry.key}: {list(entry.starts)} would be stored twice")
            storage[index] = _StorageInfo(name, entry.begin, entry.length)
            if entry.dtype is None:
                stored[entry.key] = BytesStorageMetadata()
            else:
                tensors.setdefault(entry.key, []).append(entry)
    for key, parts in tensors.items():
        _check_covered(key, parts)
        stored[key] = TensorStorageMetadata(
            properties=TensorProperties(dtype=parts[0].dtype),  # type: ignore[arg-type]
            size=torch.Size(parts[0].shape),
            chunks=[ChunkStorageMetadata(torch.Size(part.starts), torch.Size(part.sizes)) for part in parts],
        )
    metadata = Metadata(stored, storage_data=storage, version=CURRENT_DCP_VERSION)
    return pickle.dumps(metadata), metadata


def _check_covered(key: str, parts: Sequence[Entry]) -> None:
    if len({(part.dtype, part.shape) for part in parts}) > 1:
        raise CheckpointError(f"{key}: ranks disagree about its dtype or shape")
    if not tiles(parts[0].shape, [(part.starts, part.sizes) for part in parts]):
        raise CheckpointError(
            f"{key}: the shards of all ranks do not cover {list(parts[0].shape)} exactly once"
        )


def side_files() -> dict[str, bytes]:
    """What megatron-core wants beside the index: its format, and what is the same on every rank (here nothing)."""
    common = io.BytesIO()
    torch.save({}, common)
    return {_COMMON_FILE: common.getvalue(), _FORMAT_FILE: json.dumps(_FORMAT).encode()}


def check_index(directory: Path, meant: Metadata, sizes: Mapping[str, int]) -> None:
    """Read the index of `directory` back. Raises CheckpointError unless it names what was meant, within its files.

    `sizes` are the bytes of each file that was written there.
    """
    found = FileSystemReader(directory).read_metadata()
    for key in meant.state_dict_metadata.keys() | found.state_dict_metadata.keys():
        wanted, got = meant.state_dict_metadata.get(key), found.state_dict_metadata.get(key)
        if wanted != got:
            raise CheckpointError(f"{directory / METADATA_FILE}: {key}: holds {got}, must hold {wanted}")
    if found.storage_data != meant.storage_data:
        raise CheckpointError(f"{directory / METADATA_FILE}: places tensors elsewhere than they were written")
    for info in found.storage_data.values():
        if info.offset + info.length > sizes[info.relative_path]:
            raise CheckpointError(f"{directory / info.relative_path}: is shorter than {METADATA_FILE} says")


@lru_cache(maxsize=4096)
def _frame(sizes: tuple[int, ...], dtype: torch.dtype) -> tuple[bytes, bytes]:
    """What `torch.save` writes before and after the elements of a tensor.

    Without its checksum, which torch does not look at; a checkpoint has a digest of every file.
    """
    recorder = _Recorder()
    with torch.serialization.skip_data():
        # never touched, so it takes no memory
        torch.save(torch.empty(sizes, dtype=dtype), recorder)  # type: ignore[arg-type]
    return bytes(recorder.head), bytes(recorder.tail)


class _Recorder(io.RawIOBase):
    """A file that notes what is written before and after the place of the elements, which is skipped."""

    def __init__(self) -> None:
        self.head, self.tail = bytearray(), bytearray()
        self._target = self.head

    def writable(self) -> bool:
        return True

    def write(self, content: object) -> int:
        view = memoryview(content)  # type: ignore[arg-type]
        self._target += view
        return view.nbytes

    def seek(self, offset: int, whence: int = 0) -> int:
        self._target = self.tail
        return offset

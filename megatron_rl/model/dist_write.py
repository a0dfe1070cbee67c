"""Writes the model part of a distributed checkpoint in one process, shard by shard, without a process group.

The format is megatron-core's `torch_dist`: what a run saves, and what `dist_checkpointing.load` reads in any layout.
"""

from __future__ import annotations

import io
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from megatron_rl.model.checkpoint_plan import side_files
from megatron_rl.model.dist_tables import Shard, extra_state_keys, shards, stored_shapes
from megatron_rl.model.spec import ModelSpec
from megatron_rl.model.tensor_files import Scratch
from megatron_rl.parallel.layout import ParallelLayout


class Reader(Protocol):
    """Where the HF tensors come from."""

    def read_into(self, name: str, out: Tensor, *, dim: int | None = None, start: int = 0) -> None: ...


def write_distributed(
    directory: Path,
    source: Reader,
    spec: ModelSpec,
    layout: ParallelLayout,
    *,
    dtypes: Mapping[str, torch.dtype],
) -> None:
    """Write one file per rank of `layout`, with what that rank would save, and the files that describe them.

    `dtypes`: of each tensor of the checkpoint, by its key. Holds one shard at a time. Raises OSError when the disk is
    full or the directory cannot be written.
    """
    by_rank, results, scratch = shards(spec, layout), [], Scratch()
    for rank, held in enumerate(by_rank):
        name = f"__{rank}_0.distcp"
        with (directory / name).open("wb") as file:
            if rank == 0:
                results += [_write_object(file, name, key) for key in extra_state_keys(spec)]
            for shard in held:
                tensor = _assemble(source, shard, scratch.tensor(shard.sizes, dtypes[shard.key]))
                results.append(_write_tensor(file, name, shard, tensor))
            file.flush()
            os.fsync(file.fileno())
    metadata = _describe(spec, (shard for held in by_rank for shard in held), dtypes)
    FileSystemWriter(directory).finish(metadata, [results])
    for name, content in side_files().items():
        (directory / name).write_bytes(content)


def _assemble(source: Reader, shard: Shard, tensor: Tensor) -> Tensor:
    for place in shard.places:
        part = tensor
        if place.dim is not None:
            part = tensor.narrow(place.dim, place.start - shard.starts[place.dim], place.length)
        source.read_into(place.hf_name, part, dim=place.dim, start=place.hf_start)
    return tensor.reshape((1,) * len(shard.index) + shard.sizes)


def _write_tensor(file: IO[bytes], name: str, shard: Shard, tensor: Tensor) -> WriteResult:
    begin = file.tell()
    try:
        torch.save(tensor, file)
    except RuntimeError as error:
        # torch ends its archive on the way out, which fails as well and hides the reason
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise
    index = MetadataIndex(shard.key, torch.Size(shard.index + shard.starts))
    return _result(index, name, begin, file.tell())


def _write_object(file: IO[bytes], name: str, key: str) -> WriteResult:
    """The extra state of a linear layer: none, as without fp8."""
    content = io.BytesIO()
    torch.save([None], content)
    begin = file.tell()
    file.write(content.getbuffer())
    return _result(MetadataIndex(key), name, begin, file.tell())


def _result(index: MetadataIndex, name: str, begin: int, end: int) -> WriteResult:
    return WriteResult(
        index=index, size_in_bytes=end - begin, storage_data=_StorageInfo(name, begin, end - begin)
    )


def _describe(spec: ModelSpec, held: Iterable[Shard], dtypes: Mapping[str, torch.dtype]) -> Metadata:
    chunks: dict[str, list[ChunkStorageMetadata]] = defaultdict(list)
    for shard in held:
        chunks[shard.key].append(
            ChunkStorageMetadata(
                offsets=torch.Size(shard.index + shard.starts),
                sizes=torch.Size((1,) * len(shard.index) + shard.sizes),
            )
        )
    entries: dict[str, STORAGE_TYPES] = {
        key: TensorStorageMetadata(
            properties=TensorProperties(dtype=dtypes[key]),
            size=torch.Size(shape.leading + shape.param),
            chunks=chunks[key],
        )
        for key, shape in stored_shapes(spec).items()
    }
    return Metadata(entries | {key: BytesStorageMetadata() for key in extra_state_keys(spec)})

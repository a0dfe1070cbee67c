"""Reads the HF tensors of a distributed checkpoint straight from its files: one process, no process group.

The files are torch's (`torch.distributed.checkpoint`): `.metadata` says which boxes of each tensor stand where, and
every box is a tensor written by `torch.save`. Only the bytes asked for are read.
"""

from __future__ import annotations

import io
import math
import os
import pickle
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from megatron_rl.errors import CheckpointError
from megatron_rl.model.dist_tables import OTHER_KEYS, StoredShape, places, stored_shapes
from megatron_rl.model.hf_files import listed
from megatron_rl.model.hf_tables import EMBEDDING_PARAM, HEAD_PARAM, hf_tensors
from megatron_rl.model.spec import ModelSpec
from megatron_rl.model.tensor_files import Stored, TensorFile

METADATA_FILE = ".metadata"
_OTHER_STATE = ("optimizer.",)  # Megatron-LM keeps it in the same directory
_BAD_METADATA = (
    OSError,
    pickle.UnpicklingError,
    EOFError,
    AttributeError,
    ImportError,
    TypeError,
    ValueError,
)
_NO_TENSOR = (EOFError, RuntimeError, ValueError, KeyError, pickle.UnpicklingError)


@dataclass(frozen=True, slots=True)
class _Box:
    """A box of one parameter: `sizes` elements from `starts`, `skip` elements into what `torch.save` wrote."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    skip: int
    file: str
    begin: int
    length: int


class DistCheckpoint:
    """The HF tensors of an open distributed checkpoint.

    `hf_dtypes` names those that the checkpoint holds in a wider dtype than they came from.
    """

    def __init__(
        self,
        directory: Path,
        spec: ModelSpec,
        *,
        dtypes: Mapping[str, torch.dtype],
        boxes: Mapping[tuple[str, tuple[int, ...]], Sequence[_Box]],
        files: Mapping[str, TensorFile],
        hf_dtypes: Mapping[str, torch.dtype],
    ) -> None:
        self.directory = directory
        self._shapes, self._places = hf_tensors(spec), places(spec)
        self._dtypes, self._boxes, self._files, self._hf_dtypes = dtypes, boxes, files, hf_dtypes
        self._located: dict[tuple[str, int], Stored] = {}

    def names(self) -> set[str]:
        return set(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        return self._hf_dtypes.get(name, self._dtypes[self._places[name][0].key])

    def read_into(self, name: str, out: Tensor) -> None:
        """Fill `out`, of the tensor's shape, with the whole tensor; values are cast to its dtype.

        Raises CheckpointError for bytes that are not there or not what the metadata says.
        """
        for place in self._places[name]:
            starts = [0] * out.dim()
            part = out
            if place.dim is not None:
                starts[place.dim] = place.start
                part = out.narrow(place.dim, place.hf_start, place.length)
            try:
                covered = self._read_part(place.key, place.index, starts, part)
            except (OSError, EOFError, ValueError) as error:
                raise CheckpointError(f"{self.directory}: {name}: cannot be read: {error}") from None
            if covered != part.numel():
                raise CheckpointError(
                    f"{self.directory}: {name}: {part.numel() - covered} of {part.numel()} elements are not there; "
                    "the checkpoint is damaged"
                )

    def _read_part(self, key: str, index: tuple[int, ...], starts: Sequence[int], out: Tensor) -> int:
        """Number of elements found."""
        covered = 0
        for box in self._boxes.get((key, index), ()):
            overlap = _overlap(box, starts, out.shape)
            if overlap is None:
                continue
            lows, sizes = overlap
            part = out
            for dim, (low, size) in enumerate(zip(lows, sizes, strict=True)):
                part = part.narrow(dim, low - starts[dim], size)
            inside = [low - start for low, start in zip(lows, box.starts, strict=True)]
            self._files[box.file].read_into(self._stored(key, box), part, starts=inside)
            covered += part.numel()
        return covered

    def _stored(self, key: str, box: _Box) -> Stored:
        """Where the raw elements of a box begin: what `torch.save` writes around them differs with its version."""
        place = (box.file, box.begin)
        if place not in self._located:
            tensor = _load_meta(_Window(self._files[box.file], box.begin, box.length), box)
            if tensor.dtype is not self._dtypes[key] or not tensor.is_contiguous():
                raise ValueError(f"{key}: {box.file} holds {tensor.dtype} of strides {tensor.stride()}")
            # set by torch.load for storages on the meta device
            data: Any = tensor.untyped_storage()
            offset = box.begin + data._checkpoint_offset + tensor.storage_offset() * tensor.dtype.itemsize
            self._located[place] = Stored(tensor.dtype, tuple(tensor.shape), offset)
        whole = self._located[place]
        return Stored(whole.dtype, box.sizes, whole.offset + box.skip * whole.dtype.itemsize)


def _load_meta(window: _Window, box: _Box) -> Tensor:
    """What `torch.save` wrote, without its elements."""
    try:
        tensor = torch.load(io.BufferedReader(window), map_location="meta", weights_only=True)
    except _NO_TENSOR:
        tensor = None
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{box.file} holds no tensor at byte {box.begin}")
    return tensor


class _Window(io.RawIOBase):
    """A run of bytes of a file as a file of its own."""

    def __init__(self, file: TensorFile, begin: int, length: int) -> None:
        self._file, self._begin, self._length, self._position = file, begin, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        wanted = min(len(buffer), max(self._length - self._position, 0))
        count = self._file.read_at(self._begin + self._position, memoryview(buffer)[:wanted])
        self._position += count
        return count


@contextmanager
def open_distributed(
    directory: Path, spec: ModelSpec, *, hf_dtypes: Mapping[str, torch.dtype] | None = None
) -> Iterator[DistCheckpoint]:
    """Open the model of a distributed checkpoint.

    Raises CheckpointError for a directory that is none, and for tensors or files that are missing, unexpected, of
    another shape or cut short.
    """
    metadata = _read_metadata(directory)
    shapes = stored_shapes(spec)
    tensors = _tensors(directory, metadata)
    _check_shapes(directory, shapes, {key: tuple(entry.size) for key, (_, entry) in tensors.items()})
    boxes: dict[tuple[str, tuple[int, ...]], list[_Box]] = defaultdict(list)
    try:
        for key, (written_as, entry) in tensors.items():
            num_leading = len(shapes[key].leading)
            for index, box in _boxes_of(written_as, entry, num_leading, metadata.storage_data):
                boxes[key, index].append(box)
    except KeyError as error:
        raise CheckpointError(f"{directory / METADATA_FILE}: says nowhere where {error} stands") from None
    _check_disjoint(directory, boxes)
    with ExitStack() as stack:
        files = _open_files(directory, [box for group in boxes.values() for box in group], stack)
        yield DistCheckpoint(
            directory,
            spec,
            dtypes={key: entry.properties.dtype for key, (_, entry) in tensors.items()},
            boxes=boxes,
            files=files,
            hf_dtypes=hf_dtypes or {},
        )


def _read_metadata(directory: Path) -> Metadata:
    if not (directory / METADATA_FILE).is_file():
        raise CheckpointError(
            f"{directory}: holds no {METADATA_FILE}, so it is no distributed checkpoint of the torch_dist format, or "
            "not a complete one"
        )
    try:
        return FileSystemReader(directory).read_metadata()
    except _BAD_METADATA as error:
        raise CheckpointError(f"{directory / METADATA_FILE}: cannot be read: {error}") from None


def _tensors(directory: Path, metadata: Metadata) -> dict[str, tuple[str, TensorStorageMetadata]]:
    """Key in the tables -> key in the checkpoint, and what that says of it."""
    found: dict[str, tuple[str, TensorStorageMetadata]] = {}
    for written_as, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata) or written_as.startswith(_OTHER_STATE):
            continue
        key = OTHER_KEYS.get(written_as, written_as)
        if key in found:
            raise CheckpointError(
                f"{directory}: holds both {written_as} and {found[key][0]}, which are the same"
            )
        found[key] = written_as, entry
    return found


def _check_shapes(
    directory: Path, wanted: Mapping[str, StoredShape], found: Mapping[str, tuple[int, ...]]
) -> None:
    complaints = []
    for what, names in (
        ("missing", wanted.keys() - found.keys()),
        ("unexpected", found.keys() - wanted.keys()),
    ):
        if names:
            complaints.append(f"{what}: {listed(sorted(names))}")
    wrong = [
        f"{key} {list(found[key])}, must be {[*shape.leading, *shape.param]}"
        for key, shape in wanted.items()
        if key in found and not _fits(key, shape, found[key])
    ]
    if wrong:
        complaints.append(f"wrong shape: {listed(wrong)}")
    if complaints:
        raise CheckpointError(
            f"{directory}: does not hold the tensors of this model ({'; '.join(complaints)}); it belongs to another "
            "model, or is damaged"
        )


def _fits(key: str, wanted: StoredShape, found: tuple[int, ...]) -> bool:
    whole = wanted.leading + wanted.param
    if key in (EMBEDDING_PARAM, HEAD_PARAM) and len(found) == len(whole):
        # padding follows the real rows
        return found[0] >= whole[0] and found[1:] == whole[1:]
    return found == whole


def _boxes_of(
    key: str, entry: TensorStorageMetadata, num_leading: int, storage: Mapping[MetadataIndex, Any]
) -> Iterator[tuple[tuple[int, ...], _Box]]:
    """Boxes of a tensor by their position on the leading axes."""
    for chunk in entry.chunks:
        info = storage[MetadataIndex(key, chunk.offsets)]
        if getattr(info, "transform_descriptors", None):
            raise CheckpointError(f"{info.relative_path}: is compressed, which is not supported")
        starts, sizes = tuple(chunk.offsets[num_leading:]), tuple(chunk.sizes[num_leading:])
        indices = product(
            *(range(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes[:num_leading], strict=False))
        )
        for number, index in enumerate(indices):
            skip = number * math.prod(sizes)
            yield index, _Box(starts, sizes, skip, str(info.relative_path), info.offset, info.length)


def _check_disjoint(directory: Path, boxes: Mapping[tuple[str, tuple[int, ...]], Sequence[_Box]]) -> None:
    for (key, index), group in boxes.items():
        for a, b in combinations(group, 2):
            if _overlap(a, b.starts, b.sizes) is not None:
                raise CheckpointError(f"{directory}: {key}{list(index)}: stands in two places; it is damaged")


def _overlap(
    box: _Box, starts: Sequence[int], sizes: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """(starts, sizes) of what a box shares with another; None: nothing."""
    lows = tuple(max(a, b) for a, b in zip(box.starts, starts, strict=True))
    ends = zip(box.starts, box.sizes, starts, sizes, strict=True)
    lengths = tuple(min(a + n, b + m) - low for (a, n, b, m), low in zip(ends, lows, strict=True))
    return (lows, lengths) if all(length > 0 for length in lengths) else None


def _open_files(directory: Path, boxes: Iterable[_Box], stack: ExitStack) -> dict[str, TensorFile]:
    ends: dict[str, int] = {}
    for box in boxes:
        ends[box.file] = max(ends.get(box.file, 0), box.begin + box.length)
    files = {}
    for name, end in ends.items():
        try:
            files[name] = stack.enter_context(TensorFile(directory / name))
        except OSError as error:
            raise CheckpointError(f"{directory / name}: cannot be read: {error.strerror}") from None
        if files[name].size < end:
            raise CheckpointError(
                f"{directory / name}: has {files[name].size} bytes, must have at least {end}; it is cut short"
            )
    return files

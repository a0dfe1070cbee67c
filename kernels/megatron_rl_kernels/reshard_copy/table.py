"""What a reshard copy moves: slices of tensors and their places in a flat buffer, checked once and used many times."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

_CASTS = {(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Slice:
    """`rows` runs of `width` elements of a contiguous tensor, and where they stand, without gaps, in the flat buffer.

    Run i is elements start + i * stride up to + width of `tensor`, counted as if it were flat, and elements
    offset + i * width up to + width of the buffer. One run is a 1-D interval; `along` makes what a cut along a
    dimension needs. `name` is what errors call it.
    """

    tensor: Tensor
    start: int
    rows: int
    width: int
    stride: int
    offset: int
    name: str = ""

    @classmethod
    def along(
        cls, tensor: Tensor, *, dim: int | None, start: int = 0, length: int = 0, offset: int, name: str = ""
    ) -> Slice:
        """Elements `start : start + length` along `dim`; None: the whole tensor. They keep the tensor's order."""
        if dim is None or tensor.ndim == 0:
            size = tensor.numel()
            return cls(tensor=tensor, start=0, rows=1, width=size, stride=size, offset=offset, name=name)
        if not (0 <= dim < tensor.ndim and 0 <= start <= start + length <= tensor.shape[dim]):
            raise ValueError(
                f"reshard_copy: {name or 'slice'}: {start} to {start + length} along dim {dim} does not lie in a "
                f"tensor of shape {list(tensor.shape)}"
            )
        inner = math.prod(tensor.shape[dim + 1 :])
        return cls(
            tensor=tensor,
            start=start * inner,
            rows=math.prod(tensor.shape[:dim]),
            width=length * inner,
            stride=tensor.shape[dim] * inner,
            offset=offset,
            name=name,
        )

    @property
    def size(self) -> int:
        return self.rows * self.width

    @property
    def end(self) -> int:
        """One past its last element of the tensor; `start` for an empty one."""
        return self.start + (self.rows - 1) * self.stride + self.width if self.size else self.start

    def view(self) -> Tensor:
        """[rows, width], in the tensor's memory."""
        tensor = self.tensor.detach()
        return tensor.as_strided(
            (self.rows, self.width), (self.stride, 1), tensor.storage_offset() + self.start
        )


class CopyTable:
    """Slices that fit their tensors and a flat buffer of `flat_size` elements of `flat_dtype`, none on another.

    Every tensor is contiguous, on one device, and of `flat_dtype`, or one is float32 and the other bfloat16.
    It keeps the tensors, whose memory may change its values but not its place. Raises TypeError or ValueError
    naming the slice.
    """

    def __init__(self, slices: Sequence[Slice], *, flat_size: int, flat_dtype: torch.dtype) -> None:
        self.slices = tuple(slices)
        self.flat_size, self.flat_dtype = flat_size, flat_dtype
        for index, piece in enumerate(self.slices):
            self._check(index, piece)
        self.filled = [(index, piece) for index, piece in enumerate(self.slices) if piece.size]
        self._check_flat_apart()
        tensors = {id(piece.tensor): (index, piece.tensor) for index, piece in self.filled}
        self._places = [(index, tensor, tensor.data_ptr()) for index, tensor in tensors.values()]
        self._writable = False
        # what an implementation derives from the slices, by its own key
        self.derived: dict[object, object] = {}

    def describe(self, index: int) -> str:
        piece = self.slices[index]
        return f"slice {index}" + (f" ({piece.name})" if piece.name else "")

    def check_flat(self, op: str, flat: Tensor) -> None:
        """Raise when `flat` is not the buffer that the slices were checked for, or tensors moved since."""
        if flat.ndim != 1 or flat.numel() != self.flat_size or flat.dtype != self.flat_dtype:
            raise ValueError(
                f"{op}: got flat {tuple(flat.shape)} of {flat.dtype}, the slices were checked for "
                f"({self.flat_size},) of {self.flat_dtype}"
            )
        if flat.is_conj() or flat.is_neg():
            raise ValueError(f"{op}: flat is a lazy conjugate or negation; pass the buffer itself")
        if not flat.is_contiguous():
            raise ValueError(f"{op}: flat {tuple(flat.shape)} has stride {flat.stride()}, must be contiguous")
        for index, tensor, place in self._places:
            if tensor.device != flat.device:
                raise ValueError(
                    f"{op}: {self.describe(index)} is on {tensor.device}, flat on {flat.device}; put them on one device"
                )
            if tensor.data_ptr() != place:
                raise ValueError(
                    f"{op}: the memory of {self.describe(index)} has moved since the table was made; make a new one"
                )
        start, end = flat.data_ptr(), flat.data_ptr() + _bytes(flat)
        for index, tensor, place in self._places:
            if place < end and start < place + _bytes(tensor):
                raise ValueError(f"{op}: flat shares memory with the tensor of {self.describe(index)}")

    def check_writable(self, op: str) -> None:
        """Raise ValueError when two slices share elements of a tensor: which one would win is chance."""
        if self._writable:
            return
        spans = sorted((_address(piece), _address(piece, piece.end), index) for index, piece in self.filled)
        cluster: list[int] = []
        reach = 0
        for first, last, index in spans:
            if first >= reach:
                self._check_cluster(op, cluster)
                cluster = []
            cluster.append(index)
            reach = max(reach, last)
        self._check_cluster(op, cluster)
        self._writable = True

    def _check_cluster(self, op: str, indices: list[int]) -> None:
        """Slices whose hulls meet, run by run: strided ones may interleave without sharing an element."""
        if len(indices) < 2:
            return
        starts, ends, owners = [], [], []
        for index in indices:
            piece = self.slices[index]
            size = piece.tensor.element_size()
            runs = _address(piece) + torch.arange(piece.rows) * (piece.stride * size)
            starts.append(runs)
            ends.append(runs + piece.width * size)
            owners.append(torch.full_like(runs, index))
        start, end, owner = torch.cat(starts), torch.cat(ends), torch.cat(owners)
        order = start.argsort(stable=True)
        start, end, owner = start[order], end[order], owner[order]
        # sorted by their start, runs overlap somewhere if and only if two neighbours do
        clash = (end[:-1] > start[1:]).nonzero()
        if len(clash):
            first, second = (self.describe(int(owner[clash[0, 0] + next_one])) for next_one in (0, 1))
            raise ValueError(
                f"{op}: {first} and {second} share elements of a tensor; every element may be written once"
            )

    def _check(self, index: int, piece: Slice) -> None:
        where, tensor = f"reshard_copy: {self.describe(index)}", piece.tensor
        pair = tensor.dtype, self.flat_dtype
        if tensor.dtype != self.flat_dtype and pair not in _CASTS:
            raise TypeError(
                f"{where}: got a tensor of {tensor.dtype} for a flat buffer of {self.flat_dtype}; they must be equal, "
                "or one torch.float32 and the other torch.bfloat16"
            )
        if tensor.element_size() > 8:
            raise TypeError(f"{where}: got {tensor.dtype}, elements may have at most 8 bytes")
        if tensor.is_conj() or tensor.is_neg():
            raise ValueError(
                f"{where}: the tensor {list(tensor.shape)} is a lazy conjugate or negation, its memory holds other "
                "values; pass tensor.resolve_conj().resolve_neg()"
            )
        if not tensor.is_contiguous():
            raise ValueError(
                f"{where}: the tensor {list(tensor.shape)} has stride {tensor.stride()}, must be contiguous; take the "
                "slice from the whole parameter"
            )
        if min(piece.start, piece.rows, piece.width, piece.offset) < 0 or (
            piece.rows > 1 and piece.stride < piece.width
        ):
            raise ValueError(
                f"{where}: start = {piece.start}, rows = {piece.rows}, width = {piece.width}, offset = {piece.offset} "
                f"may not be negative, stride = {piece.stride} not below the width"
            )
        if piece.end > tensor.numel():
            raise ValueError(f"{where}: reads up to element {piece.end} of a tensor of {tensor.numel()}")
        if piece.offset + piece.size > self.flat_size:
            raise ValueError(
                f"{where}: ends at element {piece.offset + piece.size} of a flat buffer of {self.flat_size}"
            )

    def _check_flat_apart(self) -> None:
        spans = sorted((piece.offset, piece.offset + piece.size, index) for index, piece in self.filled)
        for (_, end, first), (start, _, second) in pairwise(spans):
            if start < end:
                raise ValueError(
                    f"reshard_copy: {self.describe(first)} and {self.describe(second)} overlap in the flat buffer at "
                    f"element {start}"
                )


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _address(piece: Slice, element: int | None = None) -> int:
    at = piece.start if element is None else element
    return piece.tensor.data_ptr() + at * piece.tensor.element_size()

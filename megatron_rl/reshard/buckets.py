"""How a weight transfer is cut over time: buckets of whole layers, the same for every member.

Layers of different pipeline stages take turns, for only the ranks of one stage hold a layer: in checkpoint
order all others would wait while one stage sends. Inside a layer, and around the layers, checkpoint order stays.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from math import prod
from typing import NamedTuple

from megatron_rl.errors import ReshardError
from megatron_rl.reshard.tables import Need

DEFAULT_BUCKET_BYTES = 256 * 2**20  # of what one worker receives

_LAYER = re.compile(r"model\.layers\.\d+\.")


class Part(NamedTuple):
    """One of `parts` equal shares of each worker's interval of a tensor."""

    tensor: int  # position in checkpoint order
    number: int  # 0 .. parts - 1
    parts: int

    def bounds(self, start: int, length: int) -> tuple[int, int]:
        """This share of the interval `start : start + length`, as (first, end)."""
        return start + length * self.number // self.parts, start + length * (self.number + 1) // self.parts

    @property
    def is_last(self) -> bool:
        return self.number == self.parts - 1


Bucket = tuple[Part, ...]


def travel_order(names: Sequence[str], stages: Mapping[str, Hashable]) -> list[list[int]]:
    """Positions of `names`, those of a layer together, in the order in which they travel.

    `stages` says which ranks hold a tensor. Each stage's layers are spread evenly over the time of all layers.
    """
    units = [
        [i for i, _ in unit] for _, unit in groupby(enumerate(names), key=lambda item: _layer_of(item[1]))
    ]
    layers = [unit for unit in units if _LAYER.match(names[unit[0]])]
    if not layers:
        return units
    of_stage: dict[Hashable, list[list[int]]] = defaultdict(list)
    for unit in layers:
        of_stage[stages.get(names[unit[0]])].append(unit)
    due = {
        unit[0]: (number + 0.5) / len(queue)
        for queue in of_stage.values()
        for number, unit in enumerate(queue)
    }
    first = units.index(layers[0])
    return [
        *units[:first],
        *sorted(layers, key=lambda unit: (due[unit[0]], unit[0])),
        *units[first + len(layers) :],
    ]


def cut_buckets(
    order: Sequence[Sequence[int]],
    shapes: Mapping[str, tuple[int, ...]],
    needs: Sequence[Mapping[str, Need]],
    *,
    element_bytes: int,
    bucket_bytes: int,
) -> tuple[Bucket, ...]:
    """Buckets in the given order, each at most `bucket_bytes` on any worker, that end with a layer if they can.

    `needs` has one table per tensor-parallel rank of an engine. A layer that is too large is cut between its
    tensors, a tensor that is too large along the dimension of its interval. Raises ReshardError when
    `bucket_bytes` is below the smallest slice that a tensor can be cut into.
    """
    cutter = _Cutter(len(needs), bucket_bytes)
    names = list(shapes)
    for layer in order:
        sizes = {
            tensor: [
                need_bytes(shapes[names[tensor]], table[names[tensor]], element_bytes) for table in needs
            ]
            for tensor in layer
        }
        whole = [sum(column) for column in zip(*sizes.values(), strict=True)]
        if max(whole) <= bucket_bytes:
            cutter.make_room(whole)
        for tensor in layer:
            name = names[tensor]
            row_bytes = slice_bytes(shapes[name], needs[0][name][0], element_bytes)
            if row_bytes > bucket_bytes and any(sizes[tensor]):
                raise ReshardError(
                    f"bucket_bytes: got {bucket_bytes}, but the smallest slice of {name} has {row_bytes} bytes; "
                    f"use at least {row_bytes}, better {DEFAULT_BUCKET_BYTES}"
                )
            cutter.add(tensor, sizes[tensor], row_bytes)
    return cutter.finish()


class _Cutter:
    """Fills one bucket after the other."""

    def __init__(self, num_ranks: int, limit: int) -> None:
        self._limit, self._fill = limit, [0] * num_ranks
        self._parts: list[Part] = []
        self._done: list[Bucket] = []

    def make_room(self, sizes: Sequence[int]) -> None:
        if any(fill + size > self._limit for fill, size in zip(self._fill, sizes, strict=True)):
            self._close()

    def add(self, tensor: int, sizes: Sequence[int], row_bytes: int) -> None:
        if max(sizes) <= self._limit:
            self.make_room(sizes)
            self._put(Part(tensor, 0, 1), sizes)
            return
        self._close()
        rows, per_bucket = max(sizes) // row_bytes, self._limit // row_bytes
        count = -(-rows // per_bucket)
        for number in range(count):
            part = Part(tensor, number, count)
            bounds = [part.bounds(0, size // row_bytes) for size in sizes]
            part_sizes = [(end - start) * row_bytes for start, end in bounds]
            self.make_room(part_sizes)
            self._put(part, part_sizes)

    def finish(self) -> tuple[Bucket, ...]:
        self._close()
        return tuple(self._done)

    def _put(self, part: Part, sizes: Sequence[int]) -> None:
        self._parts.append(part)
        self._fill = [fill + size for fill, size in zip(self._fill, sizes, strict=True)]

    def _close(self) -> None:
        if self._parts:
            self._done.append(tuple(self._parts))
        self._parts, self._fill = [], [0] * len(self._fill)


def completed(buckets: Sequence[Bucket]) -> Iterator[tuple[int, ...]]:
    """Per bucket, the tensors of which it holds the last part, in checkpoint order."""
    for bucket in buckets:
        yield tuple(sorted(part.tensor for part in bucket if part.is_last))


@lru_cache(maxsize=1024)  # the experts of a model have few shapes
def slice_bytes(shape: tuple[int, ...], dim: int | None, element_bytes: int) -> int:
    """Bytes of one index along `dim` (None: along the first)."""
    return prod(shape) // shape[dim or 0] * element_bytes


@lru_cache(maxsize=1024)
def need_bytes(shape: tuple[int, ...], need: Need, element_bytes: int) -> int:
    dim, _, length = need
    return prod(shape) * element_bytes if dim is None else length * slice_bytes(shape, dim, element_bytes)


def _layer_of(name: str) -> str:
    layer = _LAYER.match(name)
    return layer[0] if layer else name

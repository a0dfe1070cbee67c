"""Boxes of a tensor: which ones a run of its elements consists of, and whether some tile it. Pure arithmetic."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import product

Box = tuple[tuple[int, ...], tuple[int, ...]]  # starts and sizes, one number per dimension


def boxes_of_run(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """The boxes that elements [start, stop) of a contiguous tensor of `shape` consist of, in order.

    At most 2 * len(shape) - 1 of them. Example: elements 2 to 8 of [3, 4] are the end of row 0 and all of row 1.
    """
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    if len(shape) == 1:
        yield (start,), (stop - start,)
        return
    first, last = -(-start // row), stop // row  # rows [first, last) are whole
    if first > last:
        # inside one row
        yield from _in_row(shape, start // row, start % row, start % row + stop - start)
        return
    yield from _in_row(shape, first - 1, start - (first - 1) * row, row if start < first * row else 0)
    if first < last:
        yield (first,) + (0,) * (len(shape) - 1), (last - first, *shape[1:])
    yield from _in_row(shape, last, 0, stop - last * row)


def _in_row(shape: Sequence[int], index: int, start: int, stop: int) -> Iterator[Box]:
    for starts, sizes in boxes_of_run(shape[1:], start, stop):
        yield (index, *starts), (1, *sizes)


def tiles(shape: Sequence[int], boxes: Iterable[Box]) -> bool:
    """Whether the boxes cover every element of `shape` exactly once.

    Each box leaves signs on its corners: sums of boxes are equal exactly when the signs on every corner are. So the
    work grows with the number of boxes, not with that of pairs.
    """
    signs: Counter[tuple[int, ...]] = Counter()
    for starts, sizes in boxes:
        if 0 not in sizes:
            _add_corners(signs, starts, sizes, 1)
    if 0 not in shape:
        _add_corners(signs, (0,) * len(shape), shape, -1)
    return not any(signs.values())


def _add_corners(
    signs: Counter[tuple[int, ...]], starts: Sequence[int], sizes: Sequence[int], sign: int
) -> None:
    for ends in product((0, 1), repeat=len(starts)):
        corner = tuple(start + size * end for start, size, end in zip(starts, sizes, ends, strict=True))
        signs[corner] += sign * (-1) ** sum(ends)

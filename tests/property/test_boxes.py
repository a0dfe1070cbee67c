"""Boxes of a run put it together again, and only boxes that cover everything exactly once tile a tensor."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.model.boxes import Box, boxes_of_run, tiles

SHAPES = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


@st.composite
def runs(draw: st.DrawFn) -> tuple[tuple[int, ...], list[int]]:
    """A shape, and borders that cut its elements into runs."""
    shape = draw(SHAPES)
    size = math.prod(shape)
    inner = draw(st.lists(st.integers(0, size), max_size=4))
    return shape, [0, *sorted(inner), size]


def all_boxes(shape: tuple[int, ...], borders: list[int]) -> list[Box]:
    return [box for start, stop in pairwise(borders) for box in boxes_of_run(shape, start, stop)]


def elements(shape: tuple[int, ...], box: Box) -> list[int]:
    numbers = np.arange(math.prod(shape)).reshape(shape)
    cut = tuple(slice(start, start + size) for start, size in zip(*box, strict=True))
    return np.asarray(numbers[cut]).ravel().tolist()


@given(runs())
def test_boxes_of_a_run_hold_its_elements_in_order(case: tuple[tuple[int, ...], list[int]]) -> None:
    shape, borders = case
    for start, stop in pairwise(borders):
        boxes = list(boxes_of_run(shape, start, stop))
        assert [n for box in boxes for n in elements(shape, box)] == list(range(start, stop))
        assert len(boxes) <= max(1, 2 * len(shape) - 1)


@given(runs(), st.data())
def test_runs_tile_a_tensor_and_with_a_hole_or_an_overlap_they_do_not(
    case: tuple[tuple[int, ...], list[int]], data: st.DataObject
) -> None:
    shape, borders = case
    boxes = all_boxes(shape, borders)
    assert tiles(shape, boxes)
    lost = data.draw(st.integers(0, len(boxes) - 1))
    other = data.draw(st.integers(0, len(boxes) - 1))
    rest = boxes[:lost] + boxes[lost + 1 :]
    assert not tiles(shape, rest)
    assert not tiles(shape, [*boxes, boxes[other]])
    # as many elements as there should be do not make it right
    assert tiles(shape, [*rest, boxes[other]]) == (boxes[other] == boxes[lost])


@given(SHAPES.filter(len), st.data())
def test_a_box_that_reaches_over_the_border_is_noticed(shape: tuple[int, ...], data: st.DataObject) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    starts = tuple(int(number == dim) for number in range(len(shape)))
    assert not tiles(shape, [(starts, shape)])

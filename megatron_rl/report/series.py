"""Curves cut down to what a screen can show, peaks and dips kept."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

MAX_POINTS = 600  # of one curve


def points(lines: Sequence[Mapping[str, Any]], name: str) -> list[int]:
    """Indices of the lines that have the metric."""
    return [index for index, line in enumerate(lines) if name in line]


def thin(values: Sequence[float], most: int = MAX_POINTS) -> list[int]:
    """Indices to show: all of them, or the ends and of each of equal stretches the smallest and the largest."""
    count = len(values)
    if count <= most:
        return list(range(count))
    stretches = most // 2 - 1
    chosen = {0, count - 1}
    for number in range(stretches):
        first, end = number * count // stretches, (number + 1) * count // stretches
        inside = range(first, end)
        chosen |= {min(inside, key=values.__getitem__), max(inside, key=values.__getitem__)}
    return sorted(chosen)


def moving_mean(values: Sequence[float], window: int, at: Sequence[int] | None = None) -> list[float]:
    """Mean of the `window` values around each, of fewer at the ends; with `at`, around those indices alone."""
    sums = [0.0, *accumulate(values)]
    half = window // 2
    around = range(len(values)) if at is None else at
    spans = [(max(0, i - half), min(len(values), i + half + 1)) for i in around]
    return [(sums[end] - sums[first]) / (end - first) for first, end in spans]


def stretches(count: int, most: int) -> list[range]:
    """At most `most` stretches, as even as possible, that hold `count` items together."""
    number = min(count, most)
    return [range(i * count // number, (i + 1) * count // number) for i in range(number)]


def spread(count: int, most: int) -> list[int]:
    """Indices of at most `most` of `count` items, evenly spread, the first and the last among them."""
    if count <= most:
        return list(range(count))
    if most <= 1:
        return [count - 1]
    return sorted({round(index * (count - 1) / (most - 1)) for index in range(most)})


def rounded(value: float, digits: int = 5) -> float | None:
    """With so many significant digits, as a page needs no more; None for what is not finite."""
    if not math.isfinite(value):
        return None
    return float(f"{value:.{digits}g}")

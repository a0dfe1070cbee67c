"""Degrees that would have worked, for the messages about those that do not."""

from __future__ import annotations

import math
from collections.abc import Iterable


def divisors(size: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(size) + 1) if size % n == 0]
    return [*small, *(size // n for n in reversed(small) if n * n != size)]


def nearest(degree: int, allowed: Iterable[int]) -> str:
    """The allowed degrees on both sides of `degree`, as text."""
    allowed = sorted(allowed)
    below = [n for n in allowed if n < degree][-1:]
    above = [n for n in allowed if n > degree][:1]
    return " or ".join(str(n) for n in below + above)

"""How long responses are: a log-normal distribution cut at the longest allowed, as quantiles."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

SPREAD = 0.7  # standard deviation over mean before the cut; ours: between 0.5 and 1 in our runs of long-tailed tasks
_QUANTILES = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Response lengths in tokens: min(log-normal, longest), with this mean after the cut."""

    mean: float
    longest: int
    spread: float = SPREAD

    def quantiles(self, count: int) -> list[float]:
        """`count` lengths of equal weight, ascending, at least one token each; their mean is `mean` nearly."""
        return list(_quantiles(self.mean, self.longest, self.spread, count))

    @property
    def mean_square(self) -> float:
        return sum(length**2 for length in self.quantiles(_QUANTILES)) / _QUANTILES

    @property
    def truncated_frac(self) -> float:
        """Share of responses that reach the longest length."""
        found = self.quantiles(_QUANTILES)
        return sum(length >= self.longest for length in found) / _QUANTILES


@lru_cache(maxsize=64)
def _quantiles(mean: float, longest: int, spread: float, count: int) -> tuple[float, ...]:
    sigma = math.sqrt(math.log(1 + spread**2))
    normal = [NormalDist().inv_cdf((i + 0.5) / count) for i in range(count)]

    def cut(mu: float) -> list[float]:
        return [max(1.0, min(float(longest), math.exp(mu + sigma * z))) for z in normal]

    # the mean after the cut grows with mu; bisect for the one asked for
    low, high = -5.0, math.log(longest) + 8 * sigma + 1
    for _ in range(60):
        middle = (low + high) / 2
        if sum(cut(middle)) / count < min(mean, longest):
            low = middle
        else:
            high = middle
    return tuple(cut((low + high) / 2))

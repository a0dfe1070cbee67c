"""Estimators over right and wrong samples. Plain numbers in, plain numbers out; problems are the independent draws."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_rl.errors import DataError


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A mean over problems, a fraction, and its standard error; NaN where there are too few problems for one."""

    mean: float
    stderr: float


def estimate(values: Sequence[float]) -> Estimate:
    """Mean of one value per problem and its standard error.

    A problem's k samples are not independent draws of the set, so the error is that of the problem means
    (clustered by problem): sample standard deviation over problems / sqrt(problems). NaN for one problem.
    """
    if not values:
        return Estimate(mean=math.nan, stderr=math.nan)
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return Estimate(mean=mean, stderr=math.nan)
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return Estimate(mean=mean, stderr=math.sqrt(variance / len(values)))


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Probability that k of the n samples of one problem, drawn without replacement, hold a right one.

    Unbiased for pass@k (Chen et al. 2021): 1 - C(n - c, k) / C(n, k), as a product so that nothing overflows.
    Raises DataError for k < 1 and n < k: fewer than k samples say nothing unbiased about k of them.
    """
    if not 0 <= num_correct <= num_samples:
        raise DataError(f"pass@{k}: {num_correct} right of {num_samples} samples, must be 0 to {num_samples}")
    if not 1 <= k <= num_samples:
        raise DataError(f"pass@{k}: got {num_samples} samples per problem, must be at least k >= 1")
    if num_samples - num_correct < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(num_samples - num_correct + 1, num_samples + 1))


def consensus(class_sizes: Sequence[int], class_correct: Sequence[bool]) -> float:
    """Credit of a vote over classes of equal answers: 1 if the largest class is right, 0 if not.

    Classes that tie for the largest share the credit: right ones / tied ones, which is the expectation of a
    choice among them at random. Without any class (no sample answered) it is 0.
    """
    largest = max(class_sizes, default=0)
    tied = [
        right for size, right in zip(class_sizes, class_correct, strict=True) if size == largest and size > 0
    ]
    return sum(tied) / len(tied) if tied else 0.0


def percentile(values: Sequence[int], percent: float) -> float:
    """The smallest value that at least `percent` % of the values do not exceed (nearest rank); NaN for none."""
    if not values:
        return math.nan
    rank = max(1, math.ceil(percent / 100 * len(values)))
    return float(sorted(values)[rank - 1])

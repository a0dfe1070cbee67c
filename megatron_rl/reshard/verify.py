"""Do trainer and engine compute the same log-probabilities? Measures the gap and says what it looks like."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from megatron_rl.errors import ReshardError

Report = dict[str, float]


def parity_bound(dtype: str) -> float:
    """Largest gap in nats that rounding explains: 1e-4 for `float32`, 0.2 for `bfloat16`."""
    return 1e-4 if dtype == "float32" else 0.2


def parity_report(
    trainer_logprobs: Sequence[float],
    engine_logprobs: Sequence[float],
    bound: float,
    *,
    previous_logprobs: Sequence[float] | None = None,
) -> Report:
    """`mean`, `p99`, `max` of the absolute gap in nats, and `worst`, the position of the largest.

    `previous_logprobs` are the trainer's before its last update, to recognise an engine that still runs on
    them. Raises ReshardError with a diagnosis when the largest gap exceeds `bound` or a value is not a
    number.
    """
    if len(trainer_logprobs) != len(engine_logprobs) or not trainer_logprobs:
        raise ReshardError(
            f"parity: {len(trainer_logprobs)} trainer and {len(engine_logprobs)} engine log-probs; need "
            f"as many, at least one"
        )
    for side, values in (("trainer", trainer_logprobs), ("engine", engine_logprobs)):
        bad = next((i for i, value in enumerate(values) if not math.isfinite(value)), None)
        if bad is not None:
            raise ReshardError(
                f"parity: the {side}'s log-prob at position {bad} is {values[bad]}: weights that are not "
                f"finite, or "
                f"an engine worker that read outside the interval sent to it"
            )
    gaps = [abs(a - b) for a, b in zip(trainer_logprobs, engine_logprobs, strict=True)]
    worst = max(range(len(gaps)), key=gaps.__getitem__)
    report = {
        "mean": fmean(gaps),
        "p99": sorted(gaps)[math.ceil(0.99 * len(gaps)) - 1],
        "max": gaps[worst],
        "worst": worst,
    }
    if report["max"] > bound:
        hint = _diagnose(trainer_logprobs, engine_logprobs, previous_logprobs, bound)
        raise ReshardError(
            f"parity: trainer and engine differ by {report['max']:.3g} nats at position {worst} (mean "
            f"{report['mean']:.3g}, bound {bound:g}): {hint}"
        )
    return report


def _diagnose(
    trainer: Sequence[float], engine: Sequence[float], previous: Sequence[float] | None, bound: float
) -> str:
    if previous is not None and max(abs(a - b) for a, b in zip(previous, engine, strict=True)) <= bound:
        return "the engine still answers with the weights from before the last update"
    gaps = [b - a for a, b in zip(trainer, engine, strict=True)]
    if max(gaps) - min(gaps) <= 2 * bound:
        return f"all are off by the same {fmean(gaps):+.3g}: the normaliser differs, as if by vocabulary rows"
    small = sum(abs(gap) <= bound for gap in gaps)
    if small > len(gaps) // 2:
        return f"{small} of {len(gaps)} positions agree: some vocabulary rows, or a stale prefix cache"
    if all(gap >= -bound for gap in gaps) or all(gap <= bound for gap in gaps):
        return "all gaps have one sign; temperature or top-p is applied on one side only"
    return "no simple pattern; compare the weights: a stale head (tied weights) or tensors in the wrong place"

"""Do trainer and engine compute the same log-probabilities? Measures the gap over fixed probes; judges nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from megatron_rl.errors import ReshardError

Values = Sequence[float]


def parity_bound(dtype: str) -> float:
    """Largest gap in nats that rounding explains: 3e-4 for `float32`, 0.2 for `bfloat16`.

    In float32, 9e-5 was found on a model of 30 layers between three workers and six ranks.
    """
    return 3e-4 if dtype == "float32" else 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """A token sequence of which both sides give the log-probs from token `start` on.

    `start` is 1 for a prompt that the engine scores. Otherwise the tokens from `start` on are what the engine
    sampled, and its log-probs are those that it reported while sampling.
    """

    token_ids: Sequence[int]
    start: int = 1

    @property
    def is_sampled(self) -> bool:
        return self.start > 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """One compared log-prob: of token `position` of probe `probe`, by engine replica `replica`."""

    replica: int
    probe: int
    position: int
    is_sampled: bool

    def __str__(self) -> str:
        kind = "sampled token" if self.is_sampled else "token"
        return f"{kind} {self.position} of probe {self.probe}, engine replica {self.replica}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ParityReport:
    """Absolute gaps in nats over every compared log-prob; infinite where a value is no number."""

    mean: float
    p99: float
    max: float
    num_values: int
    worst: Place

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def compare(
    probes: Sequence[Sequence[Probe]], trainer: Sequence[Sequence[Values]], engine: Sequence[Sequence[Values]]
) -> ParityReport:
    """Compare what both sides say, by replica and probe. Raises ReshardError when they say unequally much."""
    gaps: list[tuple[float, Place]] = []
    for replica, (asked, ours, theirs) in enumerate(zip(probes, trainer, engine, strict=True)):
        for number, (probe, mine, other) in enumerate(zip(asked, ours, theirs, strict=True)):
            gaps += [
                (gap, Place(replica=replica, probe=number, position=position, is_sampled=probe.is_sampled))
                for position, gap in enumerate(_gaps(mine, other), start=probe.start)
            ]
    if not gaps:
        raise ReshardError("parity: there is nothing to compare; give probes of at least two tokens")
    values = sorted(gap for gap, _ in gaps)
    largest, worst = max(gaps, key=lambda pair: pair[0])
    return ParityReport(
        mean=fmean(values),
        p99=values[math.ceil(0.99 * len(values)) - 1],
        max=largest,
        num_values=len(values),
        worst=worst,
    )


def max_gap(ours: Values, theirs: Values) -> float:
    """Largest absolute difference of two equally long lists of log-probs; infinite if one is no number."""
    return max(_gaps(ours, theirs))


def _gaps(ours: Values, theirs: Values) -> Iterator[float]:
    if len(ours) != len(theirs):
        raise ReshardError(f"parity: {len(ours)} log-probs of the trainer, {len(theirs)} of the engine")
    for a, b in zip(ours, theirs, strict=True):
        yield abs(a - b) if math.isfinite(a) and math.isfinite(b) else math.inf

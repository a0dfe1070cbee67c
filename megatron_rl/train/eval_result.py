"""What one evaluation found: right samples per problem, avg@k overall and per difficulty band."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalProblem:
    """One evaluated problem. `num_samples` counts what was asked for: a sample that never came is wrong."""

    id: str
    num_correct: int
    num_samples: int
    num_truncated: int = 0
    difficulty: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Band:
    """Problems of one difficulty band: avg@k and its standard error over problems, both as fractions."""

    label: str
    num_problems: int
    avg_at_k: float
    stderr: float


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalResult:
    """One evaluation of one set: `samples` (the k of avg@k) per problem, after `iteration` RL iterations."""

    name: str
    iteration: int
    samples: int
    problems: tuple[EvalProblem, ...]
    weight_version: int = -1

    @property
    def avg_at_k(self) -> float:
        """Mean over problems of the share of right samples; NaN without problems."""
        return self.overall().avg_at_k

    @property
    def truncated_frac(self) -> float:
        """Samples that did not end by themselves, as a share of all."""
        num_samples = sum(problem.num_samples for problem in self.problems)
        return sum(problem.num_truncated for problem in self.problems) / num_samples if num_samples else 0.0

    def overall(self) -> Band:
        return _band("all", self.problems)

    def bands(self, max_bands: int = 8) -> list[Band]:
        """One band per difficulty, easiest first; beyond `max_bands` difficulties, equal shares of them.

        Problems without a difficulty form a last band of their own.
        """
        levels = sorted({problem.difficulty for problem in self.problems if problem.difficulty is not None})
        num_bands = min(max_bands, len(levels))
        bands: list[Band] = []
        for index in range(num_bands):
            inside = levels[index * len(levels) // num_bands : (index + 1) * len(levels) // num_bands]
            members = [problem for problem in self.problems if problem.difficulty in inside]
            label = f"{inside[0]:g}" if len(inside) == 1 else f"{inside[0]:g} to {inside[-1]:g}"
            bands.append(_band(label, members))
        rest = [problem for problem in self.problems if problem.difficulty is None]
        return [*bands, _band("none given", rest)] if rest else bands

    def metrics(self) -> dict[str, float]:
        """The flat numbers that go to metrics.jsonl; a single problem has no standard error."""
        numbers = {
            "avg_at_k": self.avg_at_k,
            "stderr": self.overall().stderr,
            "truncated_frac": self.truncated_frac,
        }
        if len(self.problems) == 1:
            del numbers["stderr"]
        return {f"eval/{self.name}/{name}": value for name, value in numbers.items()}

    def to_json(self) -> dict[str, Any]:
        """The line of eval.jsonl."""
        problems = [
            {
                "id": problem.id,
                "difficulty": problem.difficulty,
                "num_correct": problem.num_correct,
                "num_samples": problem.num_samples,
                "num_truncated": problem.num_truncated,
            }
            for problem in self.problems
        ]
        return {
            "set": self.name,
            "iteration": self.iteration,
            "k": self.samples,
            "avg_at_k": self.avg_at_k,
            "weight_version": self.weight_version,
            "problems": problems,
        }

    @staticmethod
    def from_json(line: Mapping[str, Any]) -> EvalResult:
        problems = tuple(EvalProblem(**problem) for problem in line["problems"])
        return EvalResult(
            name=line["set"],
            iteration=line["iteration"],
            samples=line["k"],
            problems=problems,
            weight_version=line["weight_version"],
        )


def paired_bands(before: EvalResult, after: EvalResult) -> list[tuple[Band, Band]]:
    """The same bands of two evaluations of one set, the whole set last."""
    after_bands = {band.label: band for band in [*after.bands(), after.overall()]}
    pairs = ((band, after_bands.get(band.label)) for band in [*before.bands(), before.overall()])
    return [(band, other) for band, other in pairs if other is not None]


def _band(label: str, problems: Sequence[EvalProblem]) -> Band:
    """Problems are the independent draws, not their k samples: the error is taken over problem means."""
    means = [problem.num_correct / problem.num_samples for problem in problems if problem.num_samples]
    if not means:
        return Band(label=label, num_problems=0, avg_at_k=math.nan, stderr=math.nan)
    mean = sum(means) / len(means)
    variance = sum((value - mean) ** 2 for value in means) / (len(means) - 1) if len(means) > 1 else math.nan
    return Band(label=label, num_problems=len(means), avg_at_k=mean, stderr=math.sqrt(variance / len(means)))

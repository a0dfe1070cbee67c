"""What one evaluation found, problem by problem, and every number that follows from it."""

from __future__ import annotations

import operator
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from megatron_rl.evaluation.statistics import Estimate, estimate, pass_at_k, percentile

# verdicts of a sample that gave nothing to compare, and of one that the grader failed on
NO_ANSWER, UNGRADED = ("no_answer", "truncated"), ("bad_gold", "error", "timeout")


def _count(value: Any) -> int:
    """A whole number that a float can hold to the last digit."""
    if not 0 <= (count := operator.index(value)) <= 2**53:
        raise ValueError(f"got {str(count)[:20]}, must be 0 or more")
    return count


def _counts(values: Sequence[Any]) -> tuple[int, ...]:
    return tuple(map(_count, values))


def _number_or_none(value: Any) -> float | None:
    if value is not None and not abs(value) <= sys.float_info.max:
        raise ValueError(f"got {str(value)[:20]}, must be a finite number")
    return value


# how each field of a problem is read back; others are text
_READ: Mapping[str, Callable[[Any], Any]] = {
    "num_correct": _count,
    "num_samples": _count,
    "num_truncated": _count,
    "difficulty": _number_or_none,
    "verdicts": lambda found: {str(name): _count(count) for name, count in found.items()},
    "answer_classes": _counts,
    "consensus": _number_or_none,
    "response_tokens": _counts,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalProblem:
    """One evaluated problem. `num_samples` is what was asked for: an evaluation without them all is an error."""

    id: str
    num_correct: int
    num_samples: int
    num_truncated: int = 0  # samples that the length limit cut
    difficulty: float | None = None
    verdicts: Mapping[str, int] = field(default_factory=dict)  # verdict: samples
    answer_classes: tuple[int, ...] = ()  # samples of each class of equal answers, largest first
    consensus: float | None = None  # credit of the vote, 0 to 1; None where answers cannot be compared
    response_tokens: tuple[int, ...] = ()  # of each sample, in order

    @property
    def correct_frac(self) -> float:
        return self.num_correct / self.num_samples

    @staticmethod
    def from_json(plain: Mapping[str, Any]) -> EvalProblem:
        """The inverse of `asdict`. Raises ValueError, TypeError or AttributeError for what that never gives."""
        values = {name: _READ.get(name, str)(value) for name, value in plain.items()}
        problem = EvalProblem(**values)
        if not 0 <= problem.num_correct <= problem.num_samples or not problem.num_samples:
            raise ValueError(f"{problem.num_correct} right of {problem.num_samples} samples")
        return problem


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
    pass_at: tuple[int, ...] = ()  # every k of pass@k to report, at most `samples`

    @property
    def avg_at_k(self) -> float:
        """Mean over problems of the share of right samples; NaN without problems."""
        return self.overall().avg_at_k

    @property
    def truncated_frac(self) -> float:
        """Samples that did not end by themselves, as a share of all."""
        return self._share(sum(problem.num_truncated for problem in self.problems))

    @property
    def num_samples(self) -> int:
        return sum(problem.num_samples for problem in self.problems)

    def verdicts(self) -> Counter[str]:
        """Samples by verdict."""
        total: Counter[str] = Counter()
        for problem in self.problems:
            total.update(problem.verdicts)
        return total

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

    def estimates(self) -> dict[str, Estimate]:
        """`avg_at_k`, `pass_at_K` of each K asked for, and `cons_at_k` where answers could be compared."""
        values = {"avg_at_k": [problem.correct_frac for problem in self.problems]}
        for k in self.pass_at:
            values[f"pass_at_{k}"] = [pass_at_k(p.num_samples, p.num_correct, k) for p in self.problems]
        votes = [problem.consensus for problem in self.problems if problem.consensus is not None]
        if votes and len(votes) == len(self.problems):
            values["cons_at_k"] = votes
        return {name: estimate(of_problems) for name, of_problems in values.items()}

    def shares(self) -> dict[str, float]:
        """What became of the samples, as shares of all that were asked for; empty where nothing was recorded."""
        verdicts = self.verdicts()
        shares = {"truncated_frac": self.truncated_frac}
        if verdicts:
            shares["no_answer_frac"] = self._share(sum(verdicts[name] for name in NO_ANSWER))
            shares["ungraded_frac"] = self._share(sum(verdicts[name] for name in UNGRADED))
        return shares

    def lengths(self) -> dict[str, float]:
        """Tokens of a response: mean, median and 95th percentile over samples; empty where none were recorded."""
        tokens = [count for problem in self.problems for count in problem.response_tokens]
        if not tokens:
            return {}
        return {
            "response_tokens_mean": sum(tokens) / len(tokens),
            "response_tokens_p50": percentile(tokens, 50),
            "response_tokens_p95": percentile(tokens, 95),
        }

    def metrics(self) -> dict[str, float]:
        """The flat numbers that go to metrics.jsonl; a single problem has no standard error."""
        found = self.estimates()
        numbers = {"avg_at_k": found["avg_at_k"].mean, "stderr": found["avg_at_k"].stderr}
        if len(self.problems) == 1:
            del numbers["stderr"]
        numbers |= {name: one.mean for name, one in found.items() if name != "avg_at_k"}
        numbers |= self.shares() | self.lengths()
        return {f"eval/{self.name}/{name}": value for name, value in numbers.items()}

    def to_json(self) -> dict[str, Any]:
        """The line of eval.jsonl."""
        return {
            "set": self.name,
            "iteration": self.iteration,
            "k": self.samples,
            "avg_at_k": self.avg_at_k,
            "pass_at": list(self.pass_at),
            "weight_version": self.weight_version,
            "problems": [asdict(problem) for problem in self.problems],
        }

    @staticmethod
    def from_json(line: Mapping[str, Any]) -> EvalResult:
        """The inverse of `to_json`; lines of runs from before a field existed have its default.

        Raises ValueError, KeyError, TypeError or AttributeError for what `to_json` never gives.
        """
        result = EvalResult(
            name=str(line["set"]),
            iteration=_count(line["iteration"]),
            samples=_count(line["k"]),
            problems=tuple(EvalProblem.from_json(problem) for problem in line["problems"]),
            weight_version=operator.index(line["weight_version"]),
            pass_at=_counts(line.get("pass_at", ())),
        )
        fewest = min((problem.num_samples for problem in result.problems), default=result.samples)
        if not all(1 <= k <= fewest for k in result.pass_at):
            raise ValueError(f"pass_at {list(result.pass_at)} of {fewest} samples")
        return result

    def _share(self, count: int) -> float:
        return count / self.num_samples if self.num_samples else 0.0


def paired_bands(before: EvalResult, after: EvalResult) -> list[tuple[Band, Band]]:
    """The same bands of two evaluations of one set, the whole set last."""
    after_bands = {band.label: band for band in [*after.bands(), after.overall()]}
    pairs = ((band, after_bands.get(band.label)) for band in [*before.bands(), before.overall()])
    return [(band, other) for band, other in pairs if other is not None]


def _band(label: str, problems: Sequence[EvalProblem]) -> Band:
    found = estimate([problem.correct_frac for problem in problems])
    return Band(label=label, num_problems=len(problems), avg_at_k=found.mean, stderr=found.stderr)

"""How `score` reads and grades the cases of each reward: one entry of `GRADERS` per name in `names.REWARD_NAMES`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_rl.rewards.protocol import Grade, RewardInput


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreOptions:
    """What the command line says: grading processes, and seconds for one answer (None: the reward's own)."""

    workers: int
    timeout_s: float | None


class BadCase(Exception):
    """A row that is no case of this reward; the message says which key, what was got and what is needed."""


class CaseGrader(Protocol):
    def read(self, row: Mapping[str, Any]) -> Any:
        """What `grade` takes, out of one row of the file; `id` and `response` are checked. Raises BadCase."""
        ...

    def grade(self, cases: Sequence[Any]) -> list[Grade]:
        """One grade per case, in order, score 0 to 1, with a verdict. Never raises for what a response contains."""
        ...

    def close(self) -> None: ...


class MathCases:
    """`gold` and `response` for `math_answer`."""

    def __init__(self, options: ScoreOptions) -> None:
        from megatron_rl.rewards.math_answer import MathAnswer

        self._reward = MathAnswer(workers=options.workers, timeout_s=options.timeout_s or 5.0)

    def read(self, row: Mapping[str, Any]) -> RewardInput:
        if "gold" not in row:
            raise BadCase("no `gold`; give the right answer as a string, a number, or a list of alternatives")
        return RewardInput(answer=row["gold"], text=row["response"])

    def grade(self, cases: Sequence[RewardInput]) -> list[Grade]:
        return self._reward.grade(cases)

    def close(self) -> None:
        self._reward.close()


GRADERS: dict[str, Callable[[ScoreOptions], CaseGrader]] = {"math_answer": MathCases}

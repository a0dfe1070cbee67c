"""How `score` reads and grades the cases of each reward: one entry of `GRADERS` per name in `names.REWARD_NAMES`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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


class CodeCases:
    """`tests`, `response` and optional `limits` for `code_tests`; all tests of a case count."""

    def __init__(self, options: ScoreOptions) -> None:
        from megatron_rl.recipe.sandbox import SandboxConfig
        from megatron_rl.rewards.code_tests import CodeTests

        config = SandboxConfig(slots=options.workers)
        if options.timeout_s is not None:
            config = replace(config, wall_s=options.timeout_s)
        self._reward = CodeTests(config)
        print(self._reward.notice, file=sys.stderr)

    def read(self, row: Mapping[str, Any]) -> RewardInput:
        tests = row.get("tests")
        if not isinstance(tests, dict):
            raise BadCase("no `tests`; give an object with `inputs` and `outputs`, and `fn_name` for calls")
        if row.get("limits") is not None:
            tests = {**tests, "limits": row["limits"]}
        return RewardInput(answer=tests, text=row["response"], prompt_id=str(row["id"]), every_test=True)

    def grade(self, cases: Sequence[RewardInput]) -> list[Grade]:
        return self._reward.grade(cases)

    def close(self) -> None:
        self._reward.close()


GRADERS: dict[str, Callable[[ScoreOptions], CaseGrader]] = {
    "math_answer": MathCases,
    "code_tests": CodeCases,
}

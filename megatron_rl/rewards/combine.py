"""The reward of a recipe: a weighted sum of named parts, with the verdict of the one that judges answers."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from types import TracebackType

from megatron_rl.data.types import RewardResult
from megatron_rl.errors import RecipeError, RewardError
from megatron_rl.recipe.sandbox import SandboxConfig
from megatron_rl.rewards import REWARDS, RewardSettings
from megatron_rl.rewards.protocol import Grade, Reward, RewardInput


def check_reward_names(weights: Mapping[str, float], *, place: str = "rewards") -> None:
    """Raises RecipeError unless names are known, weights finite, and exactly one part judges answers."""
    for name, weight in weights.items():
        if name not in REWARDS:
            close = difflib.get_close_matches(name, REWARDS, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            allowed = ", ".join(sorted(REWARDS))
            raise RecipeError(f"{place}.{name}: unknown reward, allowed are {allowed}{hint}")
        if not math.isfinite(weight):
            raise RecipeError(f"{place}.{name}: weight {weight} is not finite; give a number such as 1.0")
    judges = sorted(name for name in weights if REWARDS[name].judges_answers)
    if len(judges) != 1:
        known = ", ".join(sorted(name for name, entry in REWARDS.items() if entry.judges_answers))
        raise RecipeError(
            f"{place}: needs exactly one reward that judges answers ({known}), "
            f"got {', '.join(judges) if judges else 'none'} in {{{', '.join(sorted(weights))}}}"
        )


class RewardModel:
    """Grades responses by every named reward: `score` = sum of weight * part, parts unweighted, 0 to 1.

    `judge` is the name of the one that judges answers.
    """

    def __init__(
        self,
        weights: Mapping[str, float],
        *,
        workers: int = 1,
        timeout_s: float = 5.0,
        batch_timeout_s: float | None = None,
        memory_gib: float = 2.0,
        requires_reasoning: bool = False,
        sandbox: SandboxConfig | None = None,
    ) -> None:
        """`workers` checking processes of at most `memory_gib`, each killed after `timeout_s` on one answer.

        `batch_timeout_s` bounds one call of `grade` (None: nothing does).
        Raises RecipeError, and RewardError where programs would have to run without a sandbox that holds.
        """
        check_reward_names(weights)
        self._weights = dict(weights)
        self.judge = next(name for name in weights if REWARDS[name].judges_answers)
        settings = RewardSettings(
            workers=workers,
            timeout_s=timeout_s,
            batch_timeout_s=batch_timeout_s,
            memory_gib=memory_gib,
            requires_reasoning=requires_reasoning,
            sandbox=sandbox or SandboxConfig(),
        )
        self._rewards: dict[str, Reward] = {name: REWARDS[name].build(settings) for name in weights}

    def grade(self, inputs: Sequence[RewardInput]) -> list[RewardResult]:
        """One result per input, in order. Never raises for what a response contains."""
        grades = {name: self._grade_by(name, inputs) for name in self._rewards}
        return [
            self._combine({name: of[index] for name, of in grades.items()}) for index in range(len(inputs))
        ]

    def weighted_sum(self, parts: Mapping[str, float]) -> float:
        """The score of these parts, one per reward."""
        return sum(self._weights[name] * parts[name] for name in self._weights)

    @property
    def notices(self) -> list[str]:
        """What rewards say of how they started, a line each; most have nothing to say."""
        return [notice for reward in self._rewards.values() if (notice := getattr(reward, "notice", ""))]

    @property
    def num_restarts(self) -> int:
        """Checking processes that were lost through no fault of a response, and replaced."""
        return sum(reward.num_restarts for reward in self._rewards.values())

    def close(self) -> None:
        """Release every process; safe to call twice."""
        for reward in self._rewards.values():
            reward.close()

    def __enter__(self) -> RewardModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _grade_by(self, name: str, inputs: Sequence[RewardInput]) -> list[Grade]:
        grades = self._rewards[name].grade(inputs)
        if len(grades) != len(inputs):
            # one grade too many or too few would shift every later reward
            raise RewardError(f"rewards.{name}: {len(grades)} grades for {len(inputs)} responses")
        return grades

    def _combine(self, grades: Mapping[str, Grade]) -> RewardResult:
        judged = grades[self.judge]
        assert judged.verdict is not None
        parts = {name: grade.score for name, grade in grades.items()}
        return RewardResult(
            score=self.weighted_sum(parts),
            parts=parts,
            verdict=judged.verdict,
            task_score=judged.score,
            reason=judged.reason,
        )

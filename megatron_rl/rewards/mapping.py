"""From the judge's score to the reward that training sees: a scale, and fixed values where a think tag is missing.

The order is that of Klear's released graders: no </think>, else no <think>, else the grade.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_rl.data.types import RewardResult, Verdict
from megatron_rl.rewards.combine import RewardModel
from megatron_rl.rewards.protocol import RewardInput

CLOSE, OPEN = "</think>", "<think>"
# names of parts: 1 where the rule was applied
MISSING_CLOSE, MISSING_OPEN = "missing_think_close", "missing_think_open"


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardMapping:
    """Judge score s in [0, 1] counts as low + s * (high - low); None switches a rule of tags off.

    `all_or_nothing`: a score below 1 is taken for 0.
    """

    scale: tuple[float, float] = (0.0, 1.0)
    all_or_nothing: bool = False
    missing_think_close: float | None = None
    missing_think_open: float | None = None

    def counted(self, score: float) -> float:
        """What a judge's score is worth."""
        low, high = self.scale
        return high if score == 1 else low + (0.0 if self.all_or_nothing else score) * (high - low)

    def rule(self, text: str) -> tuple[str, float] | None:
        """The rule that the response breaks, by the name of its part, and what the response counts then."""
        if self.missing_think_close is not None and CLOSE not in text:
            return MISSING_CLOSE, self.missing_think_close
        if self.missing_think_open is not None and OPEN not in text:
            return MISSING_OPEN, self.missing_think_open
        return None


class MappedRewards:
    """A reward model seen through a mapping. It does not own the model's processes."""

    def __init__(self, model: RewardModel, mapping: RewardMapping) -> None:
        self._model, self._mapping = model, mapping
        rules = {MISSING_CLOSE: mapping.missing_think_close, MISSING_OPEN: mapping.missing_think_open}
        self._rules = [name for name, value in rules.items() if value is not None]

    def grade(self, inputs: Sequence[RewardInput]) -> list[RewardResult]:
        """One result per input, in order. Never raises for what a response contains.

        `parts` keeps the judge's own score and has one more part per rule of tags. A response that breaks one is not
        correct: its verdict is `no_answer` and its task score 0. Where the grader failed, its verdict stays.
        """
        results = self._model.grade(inputs)
        return [self._map(result, item.text) for result, item in zip(results, inputs, strict=True)]

    def _map(self, result: RewardResult, text: str) -> RewardResult:
        if not result.verdict.is_usable():
            return replace(result, parts={**result.parts, **dict.fromkeys(self._rules, 0.0)})
        broken = self._mapping.rule(text)
        counted = self._mapping.counted(result.task_score) if broken is None else broken[1]
        flags = {name: float(broken is not None and broken[0] == name) for name in self._rules}
        mapped = replace(
            result,
            score=self._model.weighted_sum({**result.parts, self._model.judge: counted}),
            parts={**result.parts, **flags},
        )
        if broken is None:
            return mapped
        tag = CLOSE if broken[0] == MISSING_CLOSE else OPEN
        return replace(mapped, verdict=Verdict.NO_ANSWER, task_score=0.0, reason=f"no {tag}")

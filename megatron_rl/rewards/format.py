"""The format reward: reasoning in one pair of tags, then a boxed answer, and an end of its own."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_rl.data.types import Finish
from megatron_rl.rewards.extract import THINK_CLOSE, THINK_OPEN, extract_answer
from megatron_rl.rewards.protocol import Grade, RewardInput


class FormatReward:
    """1 for `<think>...</think>` once, at the start, and a closed box after it, in a response not cut off."""

    def grade(self, inputs: Sequence[RewardInput]) -> list[Grade]:
        """One grade per input, in order; it judges no answer, so no verdict."""
        return [_grade_one(item) for item in inputs]

    @property
    def num_restarts(self) -> int:
        return 0

    def close(self) -> None:
        """Nothing to release."""


def _grade_one(item: RewardInput) -> Grade:
    fault = _fault(item)
    return Grade(score=0.0, reason=fault) if fault else Grade(score=1.0)


def _fault(item: RewardInput) -> str:
    """What breaks the format, or nothing."""
    if item.finish is not Finish.STOP:
        return f"did not end by itself ({item.finish.value})"
    if item.text.count(THINK_OPEN) != 1 or item.text.count(THINK_CLOSE) != 1:
        return "not exactly one pair of reasoning tags"
    if not item.text.lstrip().startswith(THINK_OPEN):
        return "text before the reasoning"
    # one pair, opened at the very start: the closing tag cannot stand before the opening one
    if not extract_answer(item.text):
        return "no boxed answer after the reasoning"
    return ""

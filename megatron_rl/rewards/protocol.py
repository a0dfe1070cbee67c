"""What a reward is: a pure function of the prompt's gold and the response text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from megatron_rl.data.types import Finish, Verdict


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardInput:
    """One response to grade. `text` is the response alone, special tokens kept.

    Rewards that draw from many tests draw by `prompt_id`, so that all responses of a prompt meet the same ones, and
    use all of them for `every_test`, as evaluation asks for. `meta` is the prompt's own.
    """

    answer: Any
    text: str
    finish: Finish = Finish.STOP
    prompt_id: str = ""
    meta: Mapping[str, Any] = field(default_factory=dict)
    every_test: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Grade:
    """`score` is 0 to 1. `verdict` is None for shaping rewards that judge no answer (format)."""

    score: float
    verdict: Verdict | None = None
    reason: str = ""
    seconds: float = 0.0


class Reward(Protocol):
    def grade(self, inputs: Sequence[RewardInput]) -> list[Grade]:
        """One grade per input, in order. Never raises for what a response contains."""
        ...

    @property
    def num_restarts(self) -> int:
        """Helping processes that were lost through no fault of a response, and replaced."""
        ...

    def close(self) -> None: ...

"""The rewards a recipe can name.

Factories import inside: a checking process loads this package too, and must start fast.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_rl.recipe.sandbox import SandboxConfig
    from megatron_rl.rewards.protocol import Reward


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardSettings:
    """What rewards are built from: the pool that checks answers, and how programs are confined."""

    workers: int
    timeout_s: float
    batch_timeout_s: float | None
    memory_gib: float
    requires_reasoning: bool
    sandbox: SandboxConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardEntry:
    """`judges_answers`: its verdict says whether the response solved the task; shaping rewards judge none."""

    build: Callable[[RewardSettings], Reward]
    judges_answers: bool


def _build_math_answer(settings: RewardSettings) -> Reward:
    from megatron_rl.rewards.math_answer import MathAnswer

    return MathAnswer(
        workers=settings.workers,
        timeout_s=settings.timeout_s,
        batch_timeout_s=settings.batch_timeout_s,
        memory_gib=settings.memory_gib,
        requires_reasoning=settings.requires_reasoning,
    )


def _build_code_tests(settings: RewardSettings) -> Reward:
    from megatron_rl.rewards.code_tests import CodeTests

    return CodeTests(settings.sandbox)


def _build_format(settings: RewardSettings) -> Reward:
    from megatron_rl.rewards.format import FormatReward

    return FormatReward()


def _build_coin(settings: RewardSettings) -> Reward:
    from megatron_rl.rewards.coin import CoinReward

    return CoinReward()


REWARDS: dict[str, RewardEntry] = {
    "math_answer": RewardEntry(build=_build_math_answer, judges_answers=True),
    "code_tests": RewardEntry(build=_build_code_tests, judges_answers=True),
    "format": RewardEntry(build=_build_format, judges_answers=False),
    "coin": RewardEntry(build=_build_coin, judges_answers=False),
}

"""Whether a stage's rewards are known, and exactly one of them judges answers."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rl.recipe.problems import Problem, did_you_mean
from megatron_rl.recipe.stages import RlStage, Stage
from megatron_rl.rewards import REWARDS


def reward_problems(stage: Stage, path: str) -> Iterator[Problem]:
    """Every name of `rewards` that the table of rewards does not have, and too many or no judges."""
    if not isinstance(stage, RlStage):
        return
    for name in stage.rewards:
        if name not in REWARDS:
            hint = did_you_mean(name, tuple(REWARDS)) or f"; known rewards: {', '.join(REWARDS)}"
            yield Problem(f"{path}.rewards.{name}", f"unknown reward{hint}")
    judging = [name for name, entry in REWARDS.items() if entry.judges_answers]
    judges = [name for name in stage.rewards if name in judging]
    if not judges:
        yield Problem(
            f"{path}.rewards",
            f"no reward judges the answer; add one of {', '.join(judging)}, such as math_answer: 1.0",
        )
    elif len(judges) > 1:
        yield Problem(
            f"{path}.rewards",
            f"{' and '.join(judges)} both judge the answer, and a response has one verdict; keep one, and give the "
            "other's prompts a stage of their own",
        )

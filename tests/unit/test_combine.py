"""The reward of a recipe as a weighted sum of named parts."""

import pytest

from megatron_rl.data.types import Verdict
from megatron_rl.errors import RecipeError
from megatron_rl.rewards.combine import RewardModel, check_reward_names
from megatron_rl.rewards.protocol import RewardInput


def test_score_is_the_weighted_sum_and_parts_are_unweighted():
    with RewardModel({"math_answer": 1.0, "format": 0.1}, workers=1, timeout_s=20.0) as model:
        both, task_only, form_only = model.grade(
            [
                RewardInput(answer="11", text=r"<think>4+7</think>\boxed{11}"),
                RewardInput(answer="11", text=r"\boxed{11}"),
                RewardInput(answer="11", text=r"<think>4+7</think>\boxed{12}"),
            ]
        )
    assert both.score == pytest.approx(1.1)
    assert both.parts == {"math_answer": 1.0, "format": 1.0}
    assert (task_only.score, task_only.verdict) == (1.0, Verdict.CORRECT)
    assert (form_only.score, form_only.verdict) == (0.1, Verdict.WRONG)


def test_the_verdict_is_that_of_the_reward_that_judges_answers():
    inputs = [RewardInput(answer=gold, text=r"\boxed{1}") for gold in ("1", "2", "")]
    with RewardModel({"format": 0.1, "math_answer": 1.0}, workers=1, timeout_s=20.0) as model:
        results = model.grade([*inputs, RewardInput(answer="1", text="one")])
    assert [result.verdict for result in results] == [
        Verdict.CORRECT, Verdict.WRONG, Verdict.BAD_GOLD, Verdict.NO_ANSWER,
    ]  # fmt: skip


def test_an_unknown_reward_is_an_error_with_a_suggestion():
    with pytest.raises(
        RecipeError, match=r"rewards\.math_anwser: unknown reward.*did you mean 'math_answer'\?"
    ):
        check_reward_names({"math_anwser": 1.0})


@pytest.mark.parametrize("weights", [{}, {"format": 1.0}])
def test_a_recipe_without_a_task_reward_is_an_error(weights):
    with pytest.raises(RecipeError, match="exactly one reward that judges answers"):
        check_reward_names(weights)


def test_a_weight_that_is_not_finite_is_an_error():
    with pytest.raises(RecipeError, match=r"rewards\.math_answer: weight nan"):
        check_reward_names({"math_answer": float("nan")})

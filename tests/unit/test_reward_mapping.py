"""What the judge's score becomes in the reward of training, and what a missing think tag makes of it."""

from __future__ import annotations

import pytest

from megatron_rl.data.types import Verdict
from megatron_rl.rewards.combine import RewardModel
from megatron_rl.rewards.mapping import MappedRewards, RewardMapping
from megatron_rl.rewards.protocol import RewardInput

RIGHT, WRONG = r"<think>4+7</think>\boxed{11}", r"<think>4+7</think>\boxed{12}"
NO_CLOSE, NO_OPEN, NEITHER = r"<think>4+7 \boxed{11}", r"4+7</think>\boxed{11}", r"\boxed{11}"
KLEAR = RewardMapping(scale=(-1.0, 1.0), missing_think_close=-0.5, missing_think_open=-2.0)


@pytest.fixture(scope="module")
def model():
    with RewardModel({"math_answer": 1.0, "format": 0.1}, workers=1, timeout_s=20.0) as model:
        yield model


def grade(model, mapping, *texts, answer="11"):
    return MappedRewards(model, mapping).grade([RewardInput(answer=answer, text=text) for text in texts])


def test_without_scale_and_rules_results_are_the_models_own(model):
    inputs = [RewardInput(answer="11", text=text) for text in (RIGHT, WRONG, NO_CLOSE, NEITHER)]
    assert MappedRewards(model, RewardMapping()).grade(inputs) == model.grade(inputs)


def test_a_scale_maps_the_judges_score_alone(model):
    right, wrong = grade(model, RewardMapping(scale=(-1.0, 1.0)), RIGHT, WRONG)
    # the reward for form is added as it was
    assert (right.score, wrong.score) == (1.0 + 0.1, -1.0 + 0.1)
    assert (right.task_score, right.parts["math_answer"], wrong.parts["math_answer"]) == (1.0, 1.0, 0.0)


def test_a_share_of_tests_counts_as_a_share_or_not_at_all():
    soft, hard = (RewardMapping(scale=(-1.0, 1.0), all_or_nothing=hard) for hard in (False, True))
    assert [soft.counted(score) for score in (0.0, 0.75, 1.0)] == [-1.0, 0.5, 1.0]
    assert [hard.counted(score) for score in (0.0, 0.75, 1.0)] == [-1.0, -1.0, 1.0]


def test_a_missing_close_tag_comes_before_a_missing_open_tag(model):
    results = grade(model, KLEAR, RIGHT, WRONG, NO_CLOSE, NO_OPEN, NEITHER)
    form = [0.1 * result.parts["format"] for result in results]
    assert [r.score - f for r, f in zip(results, form, strict=True)] == pytest.approx(
        [1.0, -1.0, -0.5, -2.0, -0.5]
    )
    assert [result.parts["missing_think_close"] for result in results] == [0, 0, 1, 0, 1]
    assert [result.parts["missing_think_open"] for result in results] == [0, 0, 0, 1, 0]


def test_a_response_without_a_tag_is_not_correct_whatever_its_answer(model):
    (result,) = grade(model, KLEAR, NO_OPEN)
    assert (result.verdict, result.task_score, result.reason) == (Verdict.NO_ANSWER, 0.0, "no <think>")
    assert not result.verdict.is_correct() and result.verdict.is_usable()


def test_one_rule_alone_leaves_the_other_tag_free(model):
    only_open = RewardMapping(missing_think_open=-2.0)
    no_close, no_open = grade(model, only_open, NO_CLOSE, NO_OPEN)
    assert "missing_think_close" not in no_close.parts
    assert no_close.reason != "no </think>" and no_open.score == pytest.approx(-2.0, abs=0.11)


def test_a_failed_grader_stays_failed(model):
    (result,) = grade(model, KLEAR, NEITHER, answer="")
    assert result.verdict is Verdict.BAD_GOLD
    assert result.parts["missing_think_close"] == 0.0

"""The format reward."""

import pytest

from megatron_rl.data.types import Finish
from megatron_rl.rewards.format import FormatReward
from megatron_rl.rewards.protocol import RewardInput

GOOD = r"<think>4+7=11</think>The answer is \boxed{11}"


def score(text, finish=Finish.STOP):
    (grade,) = FormatReward().grade([RewardInput(answer="1", text=text, finish=finish)])
    assert grade.verdict is None
    return grade.score


@pytest.mark.parametrize("text", [GOOD, "\n" + GOOD, GOOD + "<|im_end|>"])
def test_reasoning_then_a_box_earns_the_format_reward(text):
    assert score(text) == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "",
        r"\boxed{11}",
        r"<think>4+7=11 \boxed{11}",
        r"4+7=11</think>\boxed{11}",
        r"<think>a</think><think>b</think>\boxed{11}",
        r"</think><think>\boxed{11}",
        r"<think>\boxed{11}</think>eleven",
        r"first <think>a</think>\boxed{11}",
        r"<think>a</think>\boxed{}",
        r"<think>a</think>\boxed{11",
    ],
)
def test_any_other_form_earns_nothing(text):
    assert score(text) == 0.0


@pytest.mark.parametrize("finish", [Finish.LENGTH, Finish.ABORT])
def test_a_cut_off_response_earns_no_format_reward(finish):
    assert score(GOOD, finish) == 0.0

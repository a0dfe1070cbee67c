"""Where the answer stands in a response."""

import pytest

from megatron_rl.rewards.extract import extract_answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{5}", "5"),
        (r"first \boxed{5}, then \boxed{7}", "7"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\fbox{5} was wrong; \boxed{7}", "7"),
        (r"\boxed{5} was wrong; \fbox{7}", "7"),
        (r"\boxed {5}", "5"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed{\boxed{5} + 1}", "5 + 1"),
        (r"\boxed{x = \boxed{5}}", "x = 5"),
        (r"\boxed{\boxed{8}\boxed{40}}", r"8 \quad 40"),
        (r"\boxed{1 \boxed{2}}", r"1  \quad 2"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"{{{ \boxed{5}", "5"),
        (r"}}} \boxed{5}", "5"),
        (r"\boxed{}", ""),
    ],
)
def test_answer_is_the_content_of_the_last_box(text, answer):
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"<think>\boxed{4}</think>\boxed{5}", "5"),
        (r"\boxed{4}</think>\boxed{5}", "5"),
        (r"<think>a</think>\boxed{4}<think>b</think>\boxed{5}", "5"),
        (r"no tags \boxed{5}", "5"),
    ],
)
def test_only_what_follows_the_last_reasoning_counts(text, answer):
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    "text",
    [
        "",
        "the answer is 5",
        r"<think>\boxed{5} but let me check",
        r"<think>\boxed{5}</think>the value is five",
        r"\boxed{7} and finally \boxed{12",
        r"\boxed{7} and finally \boxed",
        r"\boxed{7} and finally \boxed{\frac{1}{2}",
        r"\boxed 5",
    ],
)
def test_a_response_without_a_closed_last_box_has_no_answer(text):
    assert extract_answer(text) is None


def test_hostile_nesting_is_one_pass_over_the_text():
    deep = "\\boxed{" * 50_000
    assert extract_answer(deep) is None
    assert extract_answer(deep + "5" + "}" * 50_000) == "5"

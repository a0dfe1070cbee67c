"""What holds for every answer text: it is judged, in both directions alike, and a list never pays for one value."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.data.types import Finish, Verdict
from megatron_rl.rewards.cost import too_costly
from megatron_rl.rewards.math_answer import MathAnswer, gold_strings, quick_verdict
from megatron_rl.rewards.protocol import RewardInput
from megatron_rl.rewards.shapes import read_shape
from megatron_rl.rewards.spelling import spell, tokens

# pieces that LaTeX answers and hostile ones are made of
PIECES = st.sampled_from(
    [
        *"0123456789xyeiAB+-*/^_=<>(){}[]|,.;:!%&~'$ \\",
        "\\frac", "\\sqrt", "\\left", "\\right", "\\text{", "\\boxed{", "\\{", "\\}", "\\pm", "\\cup", "\\in",
        "\\overline{", "\\dot", "\\binom", "\\sum", "^\\circ", "\\%", "\\begin{pmatrix}", "\\end{pmatrix}", "\\\\",
        "\\infty", "\\le", "\\cdot", "or", "and", "million", "th", "1.5e-3", "3 1/4", "\u221a",
        "\u2212", "\uff11", "\u4e2a", "\ud800", "\u2460", "\u2082", "\u0663",
    ]
)  # fmt: skip
ANSWERS = st.one_of(st.text(max_size=40), st.lists(PIECES, max_size=25).map("".join))


@given(ANSWERS, ANSWERS)
def test_any_two_texts_are_compared_the_same_way_round_and_back(one, other):
    assert quick_verdict(one, one) is Verdict.CORRECT
    assert quick_verdict(one, other) is quick_verdict(other, one) or not tokens(one) or not tokens(other)


@given(ANSWERS)
def test_reading_never_raises_and_spelling_is_stable(text):
    found = tokens(text)
    spell(found)
    read_shape(found)
    too_costly(found)
    assert isinstance(gold_strings(text), list)


@given(st.integers(-(10**30), 10**30), st.integers(0, 3))
def test_a_number_in_any_dress_is_that_number(number, zeros):
    sign, digits = "-" * (number < 0), str(abs(number))
    dressed = [
        f"{sign}{'0' * zeros}{digits}",
        f"{sign}{int(digits):,}",
        f"{sign}{int(digits):,}".replace(",", "{,}"),
        f"{sign}{digits}.{'0' * (zeros + 1)}",
        rf"\frac{{{2 * number}}}{{2}}",
        f"${sign}{digits}$.",
        rf"{sign}{digits}\text{{ cm}}",
    ]
    assert [quick_verdict(str(number), text) for text in dressed] == [Verdict.CORRECT] * len(dressed)
    assert quick_verdict(str(number), str(number + 1)) is Verdict.WRONG


@pytest.fixture(scope="module")
def grader():
    reward = MathAnswer(workers=1, timeout_s=3.0)
    yield reward
    reward.close()


@given(
    st.lists(st.integers(0, 999), min_size=2, max_size=6, unique=True),
    st.sampled_from([", ", "; ", r" \text{ or } ", r" \text{ and } ", " or ", r"\cup "]),
    st.sampled_from(["{}", r"\{{{}\}}", "({})", "[{}]", r"\text{{{}}}", "x={}"]),
)
@settings(max_examples=30, deadline=None)
def test_a_listing_of_candidates_pays_for_none_of_them(grader, values, separator, frame):
    listing = frame.format(separator.join(map(str, values)))
    inputs = [RewardInput(answer=str(value), text=rf"\boxed{{{listing}}}") for value in values]
    assert [grade.score for grade in grader.grade(inputs)] == [0.0] * len(values)


@given(st.one_of(st.text(max_size=200), ANSWERS.map("\\boxed{{{}}}".format)), st.sampled_from(list(Finish)))
@settings(max_examples=50, deadline=None)
def test_any_response_gets_exactly_one_grade(grader, text, finish):
    (grade,) = grader.grade([RewardInput(answer="5", text=text, finish=finish)])
    assert grade.score == (grade.verdict is Verdict.CORRECT)

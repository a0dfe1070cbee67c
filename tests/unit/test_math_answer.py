"""The task reward for mathematical answers, through real checking processes."""

import pytest

from megatron_rl.data.types import Finish, Verdict
from megatron_rl.rewards.math_answer import MathAnswer, gold_strings, quick_verdict
from megatron_rl.rewards.protocol import RewardInput


@pytest.fixture(scope="module")
def grader():
    reward = MathAnswer(workers=1, timeout_s=4.0)
    yield reward
    reward.close()


def verdict(grader, gold, answer):
    (grade,) = grader.grade([RewardInput(answer=gold, text=f"so \\boxed{{{answer}}}")])
    assert grade.score == (1.0 if grade.verdict is Verdict.CORRECT else 0.0)
    return grade.verdict


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("25", "025"),
        ("016", "16"),
        ("10000", "10,000"),
        ("10000", r"10{,}000"),
        ("1234567", r"1\,234\,567"),
        ("0,1", "0, 1"),
        ("3/4", ".75"),
        (r"\frac{9}{7}", r"\dfrac97"),
        ("2.5", r"2\frac{1}{2}"),
        ("-1.5", r"-1\frac{1}{2}"),
        ("300000", r"3 \times 10^{5}"),
        ("0.5", r"50\%"),
        (r"28\%", r"28 \text{ percent}"),
        (r"0.\overline{3}", r"\frac13"),
        ("18", r"\$18"),
        ("18", r"18\text{ cm}^2"),
        ("18", "18 miles."),
        (r"90^\circ", "90"),
        ("-3", "\N{MINUS SIGN}3"),
        ("-3", "\N{FULLWIDTH HYPHEN-MINUS}\N{FULLWIDTH DIGIT THREE}"),
        (r"\sqrt{2}", "\N{SQUARE ROOT}2"),
        (r"\text{Evelyn}", "Evelyn"),
        (r"\text{even}", r"\textbf{Even}"),
        ("E", r"\text{(E)}"),
        ("2^{100}", "1267650600228229401496703205376"),
    ],
)
def test_spelling_is_not_value_and_needs_no_algebra(gold, answer):
    assert quick_verdict(gold, answer) is Verdict.CORRECT


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("9a+11", "11+9a"),
        ("5", "x = 5"),
        ("120", r"\binom{10}{3}"),
        (r"\frac{x+2}{7}", r"\frac{x}{7}+\frac{2}{7}"),
        (r"\sqrt{2}+\sqrt{3}", r"\sqrt{5+2\sqrt{6}}"),
        ("-2,1", "1, -2"),
        (r"12 \text{ and } 13", "12, 13"),
        ("1;2;3", r"\{3, 2, 1\}"),
        (r"\pm 7", r"\{-7, 7\}"),
        ("(5,8),(8,5)", "(8,5), (5,8)"),
        ("(6,31,-1)", "(p,q,r) = (6,31,-1)"),
        (r"\left(\frac{3}{2}, -13\right)", "(1.5, -13)"),
        ("x<3", r"(-\infty, 3)"),
        (r"x \geq 5", r"5 \leq x"),
        (r"(2,\infty)", r"\{x \mid x > 2\}"),
        ("x=1,y=2", "y=2,x=1"),
        ("x+y=3", "2x+2y=6"),
        (r"\begin{pmatrix} 1/2 \\ 3 \end{pmatrix}", r"\begin{bmatrix} \frac12 \\ 3 \end{bmatrix}"),
        (r"\frac{\sqrt{6}-\sqrt{2}}{4}", r"\sin 15^\circ"),
    ],
)
def test_equal_by_structure_or_algebra_is_correct(grader, gold, answer):
    assert verdict(grader, gold, answer) is Verdict.CORRECT


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("11", "711"),
        ("0,1", "01"),
        ("12,34", "1234"),
        (r"\frac{1}{3}", "0.33"),
        (r"\pi", "3.14"),
        (r"\frac{1}{2^{99}}", r"\frac{1}{2^{98}}"),
        (r"1-\frac{1}{10^{12}}", "1"),
        ("2^{100}", "1267650600228229401496703205377"),
        ("17", "16, 17"),
        ("12", "1 2"),
        ("2", "1 2"),
        (r"1331 \text{ and } 1728", "1728"),
        ("(1,2)", "(2,1)"),
        ("(1,2)", "[1,2]"),
        (r"\{1,2\}", r"\{1,2,2\}"),
        ("x=1,y=2", "x=2,y=1"),
        ("x+y=3", "x+y=4"),
        ("n=3k", "3"),
        ("204_5", "204_7"),
        ("12:00", "1:00"),
        ("8", r"8 \text{ 9}"),
        ("9", r"9 \text{ (or } 10\text{)}"),
        ("3", r"3 \text{ apples and } 4 \text{ pears}"),
        ("8", r"\begin{cases} 8 \\ 9 \end{cases}"),
        ("0", r"\frac{0}{0}"),
        ("3", r"3 \cup 4"),
        ("1", r"\mathbb{Z}"),
        ("5", r"\text{the correct answer}"),
        ("6", r"\text{nan}"),
        (r"\text{odd}", r"\text{oddd}"),
        ("3", r"\text{}"),
        ("3", r"\frac{}{}"),
        ("3", r"\input{/etc/passwd}"),
        ("3", "\udfff\udc80"),
        ("2x", "2y"),
        ("3+4i", "3-4i"),
        ("3", "(" * 200 + "3" + ")" * 199),
        # a good gold stays one, whatever is compared with it
        (r"\mathbb{R}", "0"),
        (r"\mathbb{R}\setminus\{2\}", "x+1"),
        (r"x=\pm 2", "x^2=4"),
    ],
)
def test_anything_not_equal_is_wrong(grader, gold, answer):
    assert verdict(grader, gold, answer) is Verdict.WRONG


@pytest.mark.parametrize("answer", [r"\sum_{k=1}^{1000000000} \frac{1}{k^2}", r"5^{5^{5^{5^{5}}}} - 4"])
def test_an_answer_too_large_to_compute_is_a_timeout_that_took_no_time(grader, answer):
    (grade,) = grader.grade([RewardInput(answer="6", text=rf"\boxed{{{answer}}}")])
    assert (grade.verdict, grade.seconds) == (Verdict.TIMEOUT, 0.0)
    assert grade.reason.startswith("not tried: a ")


@pytest.mark.parametrize(
    ("text", "finish", "expected"),
    [
        ("so 5", Finish.LENGTH, Verdict.TRUNCATED),
        ("<think>\\boxed{5}", Finish.LENGTH, Verdict.TRUNCATED),
        ("\\boxed{5", Finish.ABORT, Verdict.TRUNCATED),
        ("\\boxed{5} and", Finish.LENGTH, Verdict.CORRECT),
        ("\\boxed{6} and", Finish.LENGTH, Verdict.WRONG),
        ("so 5", Finish.STOP, Verdict.NO_ANSWER),
        ("<think>\\boxed{5}", Finish.STOP, Verdict.NO_ANSWER),
    ],
)
def test_no_answer_is_truncated_where_the_engine_cut_it_off(grader, text, finish, expected):
    (grade,) = grader.grade([RewardInput(answer="5", text=text, finish=finish)])
    assert grade.verdict is expected


def test_a_policy_that_has_to_reason_gives_no_answer_without_a_closing_tag():
    reward = MathAnswer(workers=1, timeout_s=4.0, requires_reasoning=True)
    texts = [r"\boxed{5}", r"<think>\boxed{5}", r"a</think>\boxed{5}", r"<think>a</think>\boxed{5}"]
    verdicts = [
        grade.verdict for grade in reward.grade([RewardInput(answer="5", text=text) for text in texts])
    ]
    assert verdicts == [Verdict.NO_ANSWER, Verdict.NO_ANSWER, Verdict.CORRECT, Verdict.CORRECT]
    reward.close()


def test_an_answer_is_never_evaluated_as_code(grader, tmp_path):
    canary = tmp_path / "canary"
    for answer in (f"open('{canary}','w')", f"[[__import__('os').system('touch {canary}')]]"):
        assert verdict(grader, "1", answer) is not Verdict.CORRECT
    assert not canary.exists()


def test_a_huge_power_is_compared_as_text_only():
    assert quick_verdict("9^{9^{9}}", "9^{9^9}") is Verdict.CORRECT
    assert quick_verdict("7", "7" * 501) is Verdict.WRONG


@pytest.mark.parametrize(
    ("gold", "alternatives"),
    [
        ("5", ["5"]),
        (5, ["5"]),
        (0.5, ["0.5"]),
        (["5", 6], ["5", "6"]),
        ('["5", "6"]', ["5", "6"]),
        ('"5"', ["5"]),
        ("[1, 2]", ["[1, 2]"]),
        (r"so \boxed{5}", ["5"]),
    ],
)
def test_gold_forms(gold, alternatives):
    assert gold_strings(gold) == alternatives


@pytest.mark.parametrize("gold", ["5", 5, 5.0, ["4", "5"], '["4", "5"]', '"5"', r"\boxed{5}"])
def test_any_form_of_gold_accepts_its_answer(grader, gold):
    assert verdict(grader, gold, "5") is Verdict.CORRECT
    assert verdict(grader, gold, "6") is Verdict.WRONG


@pytest.mark.parametrize(
    "gold",
    [None, "", "  ", r"\text{}", "?", r"\frac{1}{", float("nan"), True, [], [""], ["5", ""], '["5", ""]', {}],
)
def test_an_empty_or_broken_gold_never_pays(grader, gold):
    assert verdict(grader, gold, "") is Verdict.BAD_GOLD
    assert verdict(grader, gold, "5") is Verdict.BAD_GOLD


def test_a_gold_that_says_two_things_pays_only_its_copy(grader):
    assert verdict(grader, "1/2x", "1/2x") is Verdict.CORRECT
    assert verdict(grader, "1/2x", r"\frac{x}{2}") is Verdict.BAD_GOLD
    assert verdict(grader, r"\frac{x}{2}", "1/2x") is Verdict.WRONG


def test_one_grade_per_response_in_order_with_repeats(grader):
    inputs = [RewardInput(answer="a+b", text=rf"\boxed{{{text}}}") for text in ["b+a", "a", "b+a", "b+a"]]
    inputs.insert(1, RewardInput(answer="a+b", text="no box"))
    verdicts = [grade.verdict for grade in grader.grade(inputs)]
    right, wrong, nothing = Verdict.CORRECT, Verdict.WRONG, Verdict.NO_ANSWER
    assert verdicts == [right, nothing, wrong, right, right]

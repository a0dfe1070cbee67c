"""What is told to take for ever before anything is computed."""

import pytest

from megatron_rl.rewards.cost import too_costly
from megatron_rl.rewards.spelling import tokens


@pytest.mark.parametrize(
    "answer",
    [
        "9^{9^{9^{9}}}",
        r"(10^{9})!",
        "1000000000!",
        "((((100!)!)!)!)",
        r"\binom{10^{9}}{5\cdot10^{8}}",
        r"\sum_{k=1}^{10^{12}} \sin k",
        r"\prod_{k=1}^{10^{9}} k",
        "(x+y+z)^{5000}",
        "(a+b+c+d+e+f+g+h)^{200}",
        "(1+x)^{100000}-(1+x)^{99999}",
        r"\sin(10^{10^{9}})",
        "0.1^{99999999}",
        r"\gcd(2^{999999999},3)",
        "10^{10^{10}}-10^{10^{10}}+8",
        r"\dfrac{5^{\left(5^{\left(5^{\left(5^5\right)}\right)} - 4\right)} - 5}{16}",
        "((2^{1000})^{1000})^{1000}",
    ],
)
def test_what_no_machine_finishes_is_refused(answer):
    assert too_costly(tokens(answer))


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "2^{100}",
        "3^{2024}+1",
        "2024!",
        r"\binom{2024}{1012}",
        r"\sum_{k=1}^{2024} k^2",
        r"\sum_{k=1}^{\infty} \frac{1}{k^2}",
        r"\prod_{k=1}^{n} k",
        "(x+1)^{10}",
        "(a+b+c+d)^{20}",
        "(x-1)^{300}",
        "x^{1000}",
        "x^{y^{z}}",
        "e^{2x}",
        "(2n)!",
        r"\frac{1}{2^{99}}",
        "6.02 \\times 10^{23}",
        "1+" * 60 + "1",
        r"(-1)^{n+1}",
        r"1^{10^{10}}",
        "^{^{^",
        "!",
        r"\sum",
        r"\binom",
        "-" + "(" * 400 + "7",
    ],
)
def test_what_answers_hold_is_not_refused(answer):
    assert too_costly(tokens(answer)) == ""

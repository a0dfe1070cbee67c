"""Every case of `tests/data/math_cases.jsonl` and `math_forms.jsonl`; `expected` is true for reward 1.

The first holds the failures that the field reports, the second the forms of golds in data sets, kind by kind, each with
answers that must count and answers that must not.
"""

import json
from collections import defaultdict
from pathlib import Path

import pytest

from megatron_rl.data.types import Verdict
from megatron_rl.rewards.math_answer import MathAnswer
from megatron_rl.rewards.protocol import RewardInput

CASES, FORMS = defaultdict(list), defaultdict(list)
for name, kinds in (("math_cases", CASES), ("math_forms", FORMS)):
    for line in (Path(__file__).parents[1] / "data" / f"{name}.jsonl").read_text().splitlines():
        kinds[json.loads(line)["kind"]].append(json.loads(line))


@pytest.fixture(scope="module")
def grader():
    reward = MathAnswer(workers=2, timeout_s=20.0)
    yield reward
    reward.close()


@pytest.mark.parametrize("kind", sorted(CASES))
def test_every_case_gets_the_verdict_it_should(grader, kind):
    assert missed(grader, CASES[kind]) == []


@pytest.mark.parametrize("kind", sorted(FORMS))
def test_every_form_gets_the_verdict_it_should(grader, kind):
    assert missed(grader, FORMS[kind]) == []


def missed(grader, cases):
    grades = grader.grade([RewardInput(answer=case["gold"], text=case["response"]) for case in cases])
    return [
        (case["id"], case["gold"], case["response"], grade.verdict, grade.reason)
        for case, grade in zip(cases, grades, strict=True)
        if (grade.verdict is Verdict.CORRECT) != case["expected"] or grade.verdict is Verdict.ERROR
    ]


def test_every_bad_gold_is_called_one(grader):
    cases = [case for case in CASES["bad_gold"] if case["gold"] not in ("None", r"\text{See the proof.}")]
    grades = grader.grade([RewardInput(answer=case["gold"], text=case["response"]) for case in cases])
    assert {grade.verdict for grade in grades} == {Verdict.BAD_GOLD}

"""Programs graded in real sandboxes: ordinary ones score, hostile ones neither score nor leave anything behind."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from megatron_rl.data.types import Finish, Verdict
from megatron_rl.recipe.sandbox import SandboxConfig
from megatron_rl.rewards.code_tests import CodeTests, TestResult, TestVerdict, combine
from megatron_rl.rewards.protocol import RewardInput
from megatron_rl.rewards.sandbox.processes import processes_of
from tests.helpers.code_cases import CASES
from tests.helpers.processes import wait_for
from tests.helpers.readable import make_reachable

# the tests of other projects on this machine may run at the same time: a range of our own
FIRST_UID = 61000
UIDS = range(FIRST_UID, FIRST_UID + 384)


def fenced(program: str) -> str:
    return f"So:\n````python\n{program}\n````\n"


def ask(program: str, tests, **more) -> RewardInput:
    return RewardInput(answer=tests, text=fenced(program), every_test=True, **more)


@pytest.fixture(scope="module")
def grader():
    reward = CodeTests(SandboxConfig(slots=2, first_uid=FIRST_UID))
    yield reward
    reward.close()


@pytest.fixture(scope="module")
def graded(grader, tmp_path_factory):
    """Grades of all cases by name, with a canary to read, one to write, and a port to reach."""
    folder = tmp_path_factory.mktemp("canary")
    make_reachable(folder)
    folder.chmod(0o777)
    (folder / "file").write_text("canary")
    with socket.create_server(("127.0.0.1", 0)) as server:
        known = {
            "CANARY_FILE": str(folder / "file"),
            "CANARY_DIR": str(folder),
            "PORT": str(server.getsockname()[1]),
        }
        inputs = []
        for case in CASES:
            program = case.program
            for name, value in known.items():
                program = program.replace(name, value)
            inputs.append(ask(program, {**case.tests, "limits": case.limits}))
        grades = grader.grade(inputs)
    assert sorted(path.name for path in folder.iterdir()) == ["file"]
    return {case.name + case.program: grade for case, grade in zip(CASES, grades, strict=True)}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_a_program_gets_the_score_it_deserves(graded, case):
    grade = graded[case.name + case.program]
    assert grade.score == pytest.approx(case.score), grade
    assert grade.verdict is not Verdict.ERROR, grade
    assert grade.verdict is not Verdict.CORRECT or grade.score == 1.0


def test_nothing_of_the_programs_is_left(graded, grader):
    # a grade is known before the last process is reaped
    wait_for(lambda: not processes_of(set(UIDS)), "the end of all programs", timeout_s=20.0)
    children = Path(f"/proc/{grader._sandbox.pid}/task/{grader._sandbox.pid}/children")
    wait_for(lambda: not children.read_text(), "the end of all sandboxes", timeout_s=20.0)
    assert grader.num_restarts == 0


def test_a_group_meets_the_same_tests_and_an_evaluation_all_of_them(grader):
    tests = {"inputs": [str(i) for i in range(20)], "outputs": ["0"] * 20}
    # right on the first ten alone, so that the score tells which tests were drawn
    text = fenced("print(0 if int(input()) < 10 else 1)")
    group = [RewardInput(answer=tests, text=text + str(i), prompt_id="p7") for i in range(3)]
    first, *others = grader.grade(group)
    assert {grade.score for grade in others} == {first.score}
    assert first.reason.startswith(f"passed {round(first.score * 16)} of 16: wrong")
    (whole,) = grader.grade([RewardInput(answer=tests, text=text, prompt_id="p7", every_test=True)])
    assert whole.reason.startswith("passed 10 of 20: wrong 10")
    assert whole.score == 0.5 and whole.verdict is Verdict.WRONG


def test_equal_programs_of_a_group_run_once(grader):
    tests = {"inputs": [""], "outputs": ["x"]}
    text = fenced("import os\nos._exit(os.urandom(1)[0] // 2 + 1)")
    # what it fails with is by chance: seen twice alike, it ran once
    grades = grader.grade([RewardInput(answer=tests, text=text) for _ in range(4)])
    assert len({(grade.reason, grade.seconds) for grade in grades}) == 1


@pytest.mark.parametrize(
    ("text", "finish", "verdict"),
    [
        ("no program", Finish.STOP, Verdict.NO_ANSWER),
        ("```python\nprint(1", Finish.LENGTH, Verdict.TRUNCATED),
        ("```python\nprint(1)\n```\nand so on", Finish.LENGTH, Verdict.CORRECT),
    ],
)
def test_without_a_program_the_verdict_says_whether_it_was_cut_off(grader, text, finish, verdict):
    tests = {"inputs": [""], "outputs": ["1"]}
    (grade,) = grader.grade([RewardInput(answer=tests, text=text, finish=finish)])
    assert grade.verdict is verdict
    assert "of 1" in grade.reason


def test_tests_that_cannot_be_run_are_the_prompts_fault(grader):
    fixture = {"pytest": "def test_a(tmp_path):\n    assert f(1)"}
    lambda_argument = {"pytest": "assert f(lambda x: x)"}
    grades = grader.grade(
        [ask("def f(x):\n    return x", gold) for gold in (fixture, lambda_argument, "{", None)]
    )
    assert [grade.verdict for grade in grades] == [Verdict.BAD_GOLD] * 4
    assert "fixture tmp_path" in grades[0].reason


def test_a_failure_of_the_sandbox_is_no_score_of_the_program():
    failed, passed = TestResult(verdict=TestVerdict.SANDBOX_ERROR), TestResult(verdict=TestVerdict.PASSED)
    grade = combine([passed, failed])
    assert grade.verdict is Verdict.ERROR and not grade.verdict.is_usable()
    assert grade.reason == "passed 1 of 2: sandbox_error 1"

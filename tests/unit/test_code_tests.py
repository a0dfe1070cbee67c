"""Programs graded in real sandboxes: ordinary ones score, hostile ones neither score nor leave anything behind."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from megatron_rl.data.types import Verdict
from megatron_rl.recipe.sandbox import SandboxConfig
from megatron_rl.rewards.code_tests import CodeTests
from megatron_rl.rewards.protocol import RewardInput
from megatron_rl.rewards.sandbox.processes import processes_of
from tests.helpers.code_cases import CASES

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
    for path in (folder, *folder.parents[:3]):
        path.chmod(0o777 if path == folder else 0o755)
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
    assert processes_of(set(UIDS)) == {}
    children = Path(f"/proc/{grader._sandbox.pid}/task/{grader._sandbox.pid}/children").read_text()
    assert children == ""
    assert grader.num_restarts == 0

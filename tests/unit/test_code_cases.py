"""Every case of `tests/data/code_cases.jsonl` in real sandboxes: `expected` is the share of its tests that pass.

Where a program prints `blocked` or `limited`, the sandbox held. It is handed a file, a folder and a port of this
machine, and a token in the environment of the grader.
"""

import json
import socket
from collections import defaultdict
from pathlib import Path

import pytest

from megatron_rl.data.types import Verdict
from megatron_rl.recipe.sandbox import SandboxConfig
from megatron_rl.rewards.code_tests import CodeTests
from megatron_rl.rewards.protocol import RewardInput
from megatron_rl.rewards.sandbox.processes import processes_of
from tests.helpers.processes import wait_for
from tests.helpers.readable import make_reachable

# no other test has it: they may run at the same time
FIRST_UID = 61400

CASES = defaultdict(list)
for line in (Path(__file__).parents[1] / "data" / "code_cases.jsonl").read_text().splitlines():
    CASES[json.loads(line)["kind"]].append(json.loads(line))


@pytest.fixture(scope="module")
def grader():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MRL_SECRET_TOKEN", "token")
        # cases without limits of their own are not about time; more slots than cores: many wait for their end
        reward = CodeTests(SandboxConfig(slots=4, first_uid=FIRST_UID, wall_s=15))
    yield reward
    reward.close()


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """What programs must not reach, by its name in the cases."""
    folder = tmp_path_factory.mktemp("host")
    make_reachable(folder)
    (folder / "file").write_text("canary")
    (folder / "open").mkdir()
    (folder / "open").chmod(0o777)
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield {
            "CANARY_FILE": str(folder / "file"),
            "CANARY_DIR": str(folder / "open"),
            "PORT": str(server.getsockname()[1]),
        }
    assert list((folder / "open").iterdir()) == []


def ask(case, host) -> RewardInput:
    text, tests = case["response"], case["tests"]
    for name, value in host.items():
        text = text.replace("{{" + name + "}}", value)
    if "limits" in case:
        tests = {**tests, "limits": case["limits"]}
    return RewardInput(answer=tests, text=text, every_test=True)


@pytest.mark.parametrize("kind", sorted(CASES))
def test_every_case_gets_the_score_it_should_and_leaves_nothing(grader, host, kind):
    cases = CASES[kind]
    grades = grader.grade([ask(case, host) for case in cases])
    allowed = {Verdict.CORRECT, Verdict.WRONG, Verdict.NO_ANSWER}
    if kind == "no_tests":
        allowed = {Verdict.BAD_GOLD}
    missed = [
        (case["id"], case["note"], case["expected"], grade)
        for case, grade in zip(cases, grades, strict=True)
        if grade.score != pytest.approx(case["expected"]) or grade.verdict not in allowed
    ]
    assert missed == []
    uids = set(range(FIRST_UID, FIRST_UID + 384))
    children = Path(f"/proc/{grader._sandbox.pid}/task/{grader._sandbox.pid}/children")
    wait_for(lambda: not processes_of(uids) and not children.read_text(), "an empty sandbox", timeout_s=5)
    assert grader.num_restarts == 0

"""Tests of programs reach the reward as it reads them, and nothing that a file holds is executed."""

from __future__ import annotations

import base64
import json
import os
import pickle
import zlib

import pytest

from megatron_rl.data import code_gold
from megatron_rl.data.prompts import prompts_from_rows
from megatron_rl.rewards.code_gold import read_gold


def packed(value) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


def problem(public, private, **more):
    return {
        "question_title": "Sum",
        "question_content": "Add two numbers.",
        "platform": "toy",
        "question_id": "toy_1",
        "contest_date": "2024-09-14T00:00:00",
        "difficulty": "medium",
        "starter_code": "",
        "metadata": "{}",
        "public_test_cases": json.dumps(public),
        "private_test_cases": private,
        **more,
    }


def stdin(*pairs):
    return [{"input": i, "output": o, "testtype": "stdin"} for i, o in pairs]


@pytest.mark.parametrize(
    "gold",
    [
        json.dumps({"inputs": ["1"], "outputs": ["2"]}),
        {"inputs": [[1, 2]], "outputs": [3], "fn_name": "add", "max_test_cases": 9},
        json.dumps({"functional": "assert add(1, 2) == 3"}),
        {"pytest": "def test_a(): assert True"},
        [{"input": "1", "output": "2", "testtype": "stdin"}],
        json.dumps([{"input": "1", "output": "2"}]),
    ],
    ids=["stdin", "calls", "assertions", "test_functions", "list", "list_as_text"],
)
def test_tests_stay_as_the_row_holds_them_and_can_be_read_by_the_reward(gold):
    row = {"prompt": [{"role": "user", "content": "Add."}], "reward_model": {"ground_truth": gold}}
    (prompt,), dropped, _ = prompts_from_rows([row])
    assert (prompt.answer, dropped) == (gold, {})
    assert read_gold(prompt.answer).tests


@pytest.mark.parametrize(
    "private", [packed(json.dumps(stdin(("5 6", "11")))), json.dumps(stdin(("5 6", "11")))]
)
def test_a_livecodebench_problem_has_public_and_private_tests_its_date_and_its_level(private):
    (prompt,), dropped, _ = prompts_from_rows([problem(stdin(("1 2", "3")), private)])
    assert not dropped
    assert prompt.answer == {"inputs": ["1 2", "5 6"], "outputs": ["3", "11"]}
    assert (prompt.id, prompt.meta["date"], prompt.difficulty) == ("toy_1", "2024-09-14", 2.0)
    assert prompt.messages[0]["content"].startswith("Add two numbers.\n\n")
    assert "private_test_cases" not in prompt.meta


def test_a_livecodebench_function_is_called_with_json_arguments():
    row = problem(
        [{"input": '[1, 2]\n"x"', "output": "[3]", "testtype": "functional"}],
        "",
        metadata=json.dumps({"func_name": "add"}),
        starter_code="class Solution:\n    def add(self, a, b):",
    )
    (prompt,), _, _ = prompts_from_rows([row])
    assert prompt.answer == {"inputs": [[[1, 2], "x"]], "outputs": [[3]], "fn_name": "add"}
    assert len(read_gold(prompt.answer).tests) == 1
    assert "class Solution:" in prompt.messages[0]["content"]


class Opens:
    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return os.mkdir, (self.file,)


def test_a_pickle_that_names_a_function_is_refused_and_not_run(tmp_path):
    made = tmp_path / "made"
    prompts, dropped, _ = prompts_from_rows([problem(stdin(("1", "1")), packed(Opens(str(made))))])
    assert (prompts, dropped, made.exists()) == ([], {"bad_tests": 1}, False)


def test_tests_that_unpack_without_end_are_refused(monkeypatch):
    monkeypatch.setattr(code_gold, "_MAX_BYTES", 1 << 16)
    bomb = packed("1" * (1 << 17))
    _, dropped, _ = prompts_from_rows([problem(stdin(("1", "1")), bomb)])
    assert dropped == {"bad_tests": 1}

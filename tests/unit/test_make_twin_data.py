"""The twins' files hold what their problems ask for, in the public schemas, and evaluation sets apart."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.data.prompts import prompts_from_rows
from megatron_rl.data.rows import read_rows

ROOT = Path(__file__).resolve().parents[2]
REAL = [
    {
        "problem": "A box holds 6 pens. How many pens do 7 boxes hold?",
        "answer": "42",
        "solution": "6*7=<<6*7=42>>42 pens",
    },
    {"problem": "far too long " * 30, "answer": "1"},
]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("twins")
    (place / "real.jsonl").write_text("".join(json.dumps(row) + "\n" for row in REAL))
    command = [sys.executable, str(ROOT / "tools" / "make_twin_data.py"), "--out", str(place / "data")]
    command += ["--size", "200", "--real", str(place / "real.jsonl")]
    done = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)}, timeout=100)
    assert done.returncode == 0, done.stderr
    return place / "data"


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def problem(row: dict[str, Any]) -> str:
    return (row.get("prompt") or row["messages"])[0]["content"]


def test_every_program_taught_passes_the_tests_of_its_problem(out: Path) -> None:
    taught = {problem(row): row["messages"][1]["content"] for row in rows(out / "sft.jsonl")}
    some = rows(out / "code.jsonl")[::5]
    for row in some:
        program = taught[problem(row)].split("```python\n")[1].split("\n```")[0]
        tests = json.loads(row["reward_model"]["ground_truth"])
        assert len(tests["inputs"]) == len(tests["outputs"]) == 8
        for given, wanted in zip(tests["inputs"], tests["outputs"], strict=True):
            printed: list[str] = []
            # a program of ours, from the tool above
            exec(
                program,
                {"input": lambda given=given: given, "print": lambda v, to=printed: to.append(str(v))},
            )
            assert printed == [wanted.strip()], (problem(row), given)


def test_half_of_the_programs_have_a_branch_that_can_be_wrong_alone(out: Path) -> None:
    difficulties = [row["extra_info"]["difficulty"] for row in rows(out / "code.jsonl")]
    assert 0.25 < difficulties.count(2) / len(difficulties) < 0.75


def test_no_evaluation_problem_is_trained_on(out: Path) -> None:
    held = {problem(row) for name in ("heldout_math", "heldout_code") for row in rows(out / f"{name}.jsonl")}
    assert len(held) == 64 + 32
    for name in ("sft", "math", "code"):
        assert not held & {problem(row) for row in rows(out / f"{name}.jsonl")}, name


def test_short_real_problems_are_mixed_in_and_taught_by_their_solution(out: Path) -> None:
    asked = [row for row in rows(out / "math.jsonl") if problem(row) == REAL[0]["problem"]]
    assert len(asked) == 1 and asked[0]["reward_model"]["ground_truth"] == "42"
    taught = {problem(row): row["messages"][1]["content"] for row in rows(out / "sft.jsonl")}
    assert taught[REAL[0]["problem"]] == "<think>6*7=42 pens</think>\\boxed{42}"
    assert REAL[1]["problem"] not in taught


def test_the_readers_take_every_prompt_file_whole(out: Path) -> None:
    for name in ("math", "curriculum", "code", "heldout_math", "heldout_code"):
        prompts, dropped, renamed = prompts_from_rows(read_rows(out / f"{name}.jsonl"))
        assert prompts and not dropped and not renamed, name
        assert all(prompt.difficulty is not None for prompt in prompts), name

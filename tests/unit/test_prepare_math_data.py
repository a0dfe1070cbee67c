"""The generated problems are distinct, correct and apart from the held-out ones."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from megatron_rl.data.prompts import load_prompts
from tests.helpers.checkpoints import load_tool

ROOT = Path(__file__).resolve().parents[2]


def _run(*args):
    command = [sys.executable, str(ROOT / "tools" / "prepare_math_data.py"), *map(str, args)]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, timeout=120
    )


def _rows(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def _problem(row):
    return (row.get("prompt") or row["messages"])[0]["content"]


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    path = tmp_path_factory.mktemp("chains")
    done = _run("--out", path)
    assert done.returncode == 0, done.stderr
    return path


def test_thirty_thousand_distinct_problems_in_at_least_three_bands(out):
    rows = _rows(out / "train.jsonl")
    assert len(rows) == len({_problem(row) for row in rows}) == 30_000
    bands = Counter(row["extra_info"]["difficulty"] for row in rows)
    assert bands[2] == 200
    assert min(bands[terms] for terms in (3, 4, 5, 6, 7)) > 3_900


@pytest.mark.parametrize("name", ["train.jsonl", "heldout.jsonl"])
def test_gold_is_the_value_of_the_chain_and_difficulty_its_number_of_terms(out, name):
    for row in _rows(out / name):
        problem = _problem(row)
        # Digits and signs alone, as the next line checks: nothing else is evaluated.
        assert set(problem) <= set("0123456789+-")
        assert row["reward_model"] == {"ground_truth": str(eval(problem)), "style": "rule"}
        assert row["extra_info"]["difficulty"] == sum(c.isdigit() for c in problem)


def test_heldout_problems_stand_in_no_other_file_and_are_equally_many_per_band(out):
    heldout = _rows(out / "heldout.jsonl")
    problems = {_problem(row) for row in heldout}
    assert len(problems) == len(heldout) == 255
    assert Counter(row["extra_info"]["difficulty"] for row in heldout) == dict.fromkeys((3, 4, 5, 6, 7), 51)
    for name in ("train.jsonl", "sft.jsonl"):
        assert problems.isdisjoint(_problem(row) for row in _rows(out / name))


def test_every_step_of_a_trace_is_right_and_the_last_is_the_answer(out):
    rows = _rows(out / "sft.jsonl")
    assert len(rows) == len({_problem(row) for row in rows}) == 20_000
    for row in rows:
        question, response = (message["content"] for message in row["messages"])
        worked, boxed = response.removeprefix("<think>").split("</think>")
        equations = [step.rsplit("=", 1) for step in worked.split(",")]
        assert all(eval(left) == int(right) for left, right in equations)
        assert len(equations) == row["difficulty"] - 1
        assert boxed == f"\\boxed{{{equations[-1][1]}}}" == f"\\boxed{{{eval(question)}}}"


def test_prompt_reader_keeps_every_row_and_ids_are_unique_over_both_files(out):
    loaded = [
        load_prompts(
            out / name, render=lambda messages: messages[0]["content"].encode(), max_prompt_tokens=99
        )
        for name in ("train.jsonl", "heldout.jsonl")
    ]
    assert [len(one.prompts) for one in loaded] == [30_000, 255]
    assert not any(one.dropped or one.renamed for one in loaded)
    assert loaded[0].token_ids.keys().isdisjoint(loaded[1].token_ids)


def test_same_seed_gives_the_same_bytes_and_another_seed_others(tmp_path):
    sizes = ("--train", 400, "--heldout", 10, "--sft", 50)
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        assert _run("--out", tmp_path / name, "--seed", seed, *sizes).returncode == 0
    for file in ("train.jsonl", "heldout.jsonl", "sft.jsonl"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
        assert (tmp_path / "a" / file).read_bytes() != (tmp_path / "c" / file).read_bytes()
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == ["heldout.jsonl", "sft.jsonl", "train.jsonl"]


def test_table_says_how_many_chains_exist(tmp_path):
    text = _run("--out", tmp_path, "--train", 100, "--heldout", 5, "--sft", 10).stdout
    assert [line.split()[:2] for line in text.splitlines()[1:4]] == [
        ["2", "200"],
        ["3", "4,000"],
        ["4", "80,000"],
    ]


def test_conversion_gives_klear_rows_and_counts_what_it_drops(tmp_path):
    source = tmp_path / "gsm.jsonl"
    rows = [
        {"question": "1+1?", "answer": "it is\n#### 2"},
        {"problem": "2+2?", "answer": "4", "difficulty": 1, "id": "x"},
        {"problem": "3+3?", "answer": ""},
    ]
    source.write_text("\n".join(map(json.dumps, rows)))
    done = _run("--out", tmp_path / "out", "--from", source)
    assert "kept 2 rows, dropped 1 no_answer" in done.stdout
    first, second = _rows(tmp_path / "out" / "train.jsonl")
    assert first["reward_model"]["ground_truth"] == "2"
    assert second == {
        "id": "x",
        "data_source": "gsm",
        "prompt": [{"role": "user", "content": "2+2?"}],
        "ability": "math",
        "reward_model": {"ground_truth": "4", "style": "rule"},
        "extra_info": {"index": 1, "difficulty": 1.0},
    }


def test_sources_are_merged_and_evaluation_problems_left_out(tmp_path, monkeypatch, capsys):
    # in this process: loading torch anew would take most of the time
    monkeypatch.syspath_prepend(ROOT / "tools")
    main = load_tool("prepare_math_data").main
    held_out = "A tram leaves the depot at noon with twelve riders and nobody else boards it."
    files = {
        "one": [{"problem": "1+1?", "answer": "2"}, {"problem": held_out, "answer": "12"}],
        "two": [{"problem": "1+1", "answer": "2"}, {"problem": "2+2?", "answer": "4"}],
        "eval": [{"problem": held_out, "answer": "12"}],
    }
    for name, rows in files.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    one, two, held = (tmp_path / f"{name}.jsonl" for name in files)
    out = tmp_path / "out"
    arguments = ("--out", out, "--from", one, two, "--against", held, "--cut", "all:difficulty:0:9")
    assert main([str(argument) for argument in arguments]) == 0
    text = capsys.readouterr().out
    assert "kept 2 rows, dropped 1 contaminated, dropped 1 repeated_text" in text
    assert "eval.jsonl: 1 problems, 1 rows left out for them" in text
    assert len(_rows(tmp_path / "out" / "train.jsonl")) == 2
    assert _rows(tmp_path / "out" / "all.jsonl") == []


@pytest.mark.parametrize(
    ("args", "match"),
    [
        (("--from", "gone.jsonl"), "gone.jsonl: no such data file"),
        (("--heldout", 10**10), "--heldout: got 10000000000, but there are only"),
        (("--from", "README.md", "--measure", "gone"), "--measure: gone is no Hugging Face model directory"),
        (("--from", "README.md", "--ngram", 3), "argument --ngram: got 3, must be 5 to 50"),
        (
            ("--from", "README.md", "--cut", "x:1:2"),
            "argument --cut: got 'x:1:2', must be NAME:pass_rate:LOW:HIGH",
        ),
        (
            ("--from", "README.md", "--pass-rate", "0.9:0.1"),
            "argument --pass-rate: got '0.9:0.1', the lower bound",
        ),
        (("--train", 0), "argument --train: got '0', must be a whole number of at least 1"),
    ],
    ids=["missing", "too_many", "no_model", "short_runs", "cut", "window", "zero"],
)
def test_wrong_arguments_are_one_clear_error_and_leave_no_file(tmp_path, args, match):
    done = _run("--out", tmp_path / "out", *args)
    assert done.returncode == 2
    assert match in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()

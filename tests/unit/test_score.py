"""Files of responses graded by the rewards of training."""

import json

import pytest

from megatron_rl.cli import main
from megatron_rl.errors import DataError
from megatron_rl.score.command import read_cases
from megatron_rl.score.graders import GRADERS
from megatron_rl.score.names import REWARD_NAMES

ROWS = [
    {"id": "a", "gold": "5", "response": "so \\boxed{5}", "expected": True},
    {"id": 7, "gold": "5", "response": "\\boxed{\ud800}", "expected": False},
    {"id": "a", "gold": "5", "response": "five", "expected": True},
    {"id": "d", "gold": "", "response": "\\boxed{}"},
]


@pytest.fixture
def cases(tmp_path):
    path = tmp_path / "cases.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)) + "\n\n")
    return path


def test_every_name_has_a_grader():
    assert set(GRADERS) == set(REWARD_NAMES)


def test_one_line_per_case_in_order_on_stdout_and_a_summary_on_stderr(cases, capsys):
    assert main(["score", "--reward", "math_answer", "--cases", str(cases)]) == 0
    out, err = capsys.readouterr()
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["id"] for line in lines] == ["a", 7, "a", "d"]
    assert [line["score"] for line in lines] == [1.0, 0.0, 0.0, 0.0]
    assert [line["verdict"] for line in lines] == ["correct", "wrong", "no_answer", "bad_gold"]
    assert {tuple(line) for line in lines} == {("id", "score", "verdict", "reason", "seconds")}
    assert "4 graded in" in err
    assert "bad_gold 1  correct 1  no_answer 1  wrong 1" in err
    assert "as expected: 2 of 3\n  a: expected 1, got 0" in err


def test_the_output_file_is_replaced_as_a_whole(cases, tmp_path, capsys):
    out = tmp_path / "new" / "grades.jsonl"
    command = ["score", "--reward", "math_answer", "--cases", str(cases), "--out", str(out), "--workers", "1"]
    assert main([*command, "--timeout-s", "2"]) == 0
    assert capsys.readouterr().out == ""
    graded = out.read_text()
    assert len(graded.splitlines()) == 4
    cases.write_text('{"id": 1}\n')
    assert main(command) == 2
    assert out.read_text() == graded
    assert [path.name for path in out.parent.iterdir()] == ["grades.jsonl"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "got list, need an object"),
        ('{"gold": "5", "response": "x"}', "no `id`; need an object with `id` and `response`"),
        ('{"gold": "5"}', "no `id` and no `response`"),
        ('{"id": null, "gold": "5", "response": "x"}', "`id` is null"),
        ('{"id": true, "gold": "5", "response": "x"}', "`id` is true"),
        ('{"id": 1, "gold": "5"}', "no `response`"),
        ('{"id": 1, "gold": "5", "response": 5}', "`response` is 5"),
        ('{"id": 1, "response": "x"}', "no `gold`"),
        ('{"id": 1, "gold": "5", "response": "x", "expected": 2}', "`expected` is 2"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_a_bad_line_is_named_before_anything_is_graded(cases, capsys, line, message):
    with cases.open("a") as stream:
        stream.write(line + "\n")
    assert main(["score", "--reward", "math_answer", "--cases", str(cases)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error: {cases}:6: ")
    assert message in err


@pytest.mark.parametrize("content", [None, "", "\n \n"])
def test_a_missing_or_empty_file_is_an_error(tmp_path, content):
    path = tmp_path / "cases.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(DataError, match=r"no such file|the file is empty"):
        read_cases(path, dict)


def test_an_output_that_cannot_be_written_is_refused_before_anything_is_graded(cases, tmp_path, capsys):
    command = ["score", "--reward", "math_answer", "--cases", str(tmp_path / "none"), "--out"]
    for out, reason in ((tmp_path, "is a directory"), (cases / "new" / "out.jsonl", "cases.jsonl is no directory")):
        assert main([*command, str(out)]) == 2
        assert f"error: --out {out}: " in (said := capsys.readouterr().err)
        assert reason in said


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "soon"])
def test_a_timeout_that_is_no_time_is_refused(cases, capsys, seconds):
    with pytest.raises(SystemExit, match="2"):
        main(["score", "--reward", "math_answer", "--cases", str(cases), "--timeout-s", seconds])
    assert "must be a number above 0 and at most 1,000,000" in capsys.readouterr().err

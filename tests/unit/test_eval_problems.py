"""Which problems an evaluation holds: each once, none lost in silence, those of a window of days."""

from __future__ import annotations

import datetime
import json

import pytest

from megatron_rl.data.prompts import load_prompts
from megatron_rl.errors import DataError
from megatron_rl.evaluation.problems import (
    Window,
    check_complete,
    select_problems,
    set_counts,
    without_bad_golds,
)
from megatron_rl.recipe.dataset import DatasetConfig


def load(tmp_path, rows, *, max_prompt_tokens=1000):
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_prompts(
        path,
        render=lambda messages: [ord(char) for char in messages[-1]["content"]],
        max_prompt_tokens=max_prompt_tokens,
        dataset=DatasetConfig(duplicates="content"),
    )


def ids(prompts):
    return [prompt.id for prompt in prompts.prompts]


def day(text):
    return datetime.date.fromisoformat(text)


def test_copies_of_a_row_are_one_problem_whatever_their_ids(tmp_path):
    """avg@32 files: the rows 32 times over, with ids of their own or without."""
    rows = [
        {"id": f"{name}-{copy}", "problem": f"how much is {name}", "answer": name}
        for copy in range(32)
        for name in ("7", "8")
    ]
    found = load(tmp_path, rows)
    assert ids(found) == ["7-0", "8-0"]
    assert set_counts(found) == {"rows": 64, "problems": 2, "left_out": {"duplicate": 62}}
    without_ids = [{"problem": row["problem"], "answer": row["answer"]} for row in rows]
    assert len(load(tmp_path, without_ids).prompts) == 2


def test_problems_with_the_same_answer_are_two_problems(tmp_path):
    rows = [{"problem": "4 + 100", "answer": "104"}, {"problem": "52 * 2", "answer": "104"}]
    assert len(load(tmp_path, rows).prompts) == 2


def test_a_window_holds_its_first_day_and_not_its_last(tmp_path):
    rows = [
        {"id": "before", "problem": "a", "answer": "1", "date": "2024-07-31"},
        {"id": "first", "problem": "b", "answer": "1", "contest_date": "2024-08-01T00:00:00"},
        {"id": "inside", "problem": "c", "answer": "1", "extra_info": {"date": "2025-01-31T23:59:59"}},
        {"id": "last", "problem": "d", "answer": "1", "date": "2025-02-01"},
    ]
    prompts = load(tmp_path, rows)
    window = Window(since=day("2024-08-01"), until=day("2025-02-01"))
    found = select_problems("lcb", prompts, window=window)
    assert ids(found) == ["first", "inside"]
    assert set_counts(found)["left_out"] == {"outside_window": 2}
    assert ids(select_problems("lcb", prompts, window=Window(since=day("2025-01-01")))) == ["inside", "last"]
    assert ids(select_problems("lcb", prompts, window=Window(until=day("2024-08-01")))) == ["before"]


def test_a_problem_without_a_date_cannot_be_chosen_by_one(tmp_path):
    rows = [{"id": "x", "problem": "a", "answer": "1"}, {"problem": "b", "answer": "1", "date": "2024-08-01"}]
    with pytest.raises(DataError, match=r"lcb: 1 of 2 problems carry no date \(the first is 'x'\)"):
        select_problems("lcb", load(tmp_path, rows), window=Window(since=day("2024-01-01")))
    assert len(select_problems("lcb", load(tmp_path, rows)).prompts) == 2


def test_an_empty_window_says_where_the_problems_are(tmp_path):
    rows = [{"problem": "b", "answer": "1", "date": "2024-08-03"}]
    with pytest.raises(
        DataError, match=r"no problem lies in \[2025-01-01, the last\); .* from 2024-08-03 to"
    ):
        select_problems("lcb", load(tmp_path, rows), window=Window(since=day("2025-01-01")))


def test_rows_that_cannot_be_evaluated_are_an_error_and_copies_are_none(tmp_path):
    good = {"id": "a", "problem": "b", "answer": "1"}
    check_complete("s", "f", load(tmp_path, [good, good]))
    rows = [good, {"id": "c", "problem": "x" * 50, "answer": "1"}, {"id": "d", "problem": "b2", "answer": ""}]
    with pytest.raises(DataError, match=r"2 of 3 rows of f cannot be evaluated \(no_answer 1, too_long 1\)"):
        check_complete("s", "f", load(tmp_path, rows, max_prompt_tokens=10))


def test_golds_that_no_answer_can_be_compared_with_are_an_error_too(tmp_path):
    rows = [{"id": "a", "problem": "b", "answer": "1"}, {"id": "c", "problem": "d", "answer": "{1"}]
    found = without_bad_golds(load(tmp_path, rows), reward="math_answer")
    assert (ids(found), found.dropped["bad_gold"]) == (["a"], 1)
    with pytest.raises(DataError, match=r"1 of 2 rows of f cannot be evaluated \(bad_gold 1\)") as caught:
        check_complete("s", "f", found)
    assert "too_long" not in str(caught.value)


def test_programming_problems_with_contest_dates_are_chosen_by_window(tmp_path):
    tests = json.dumps([{"input": "1 2", "output": "3", "testtype": "stdin"}])
    rows = [
        {
            "question_id": name, "question_title": name, "question_content": f"Add two numbers, {name}.",
            "platform": "toy", "contest_date": f"{date}T00:00:00", "difficulty": "easy", "starter_code": "",
            "metadata": "{}", "public_test_cases": public, "private_test_cases": "[]",
        }
        for name, date, public in (
            ("old", "2024-07-27", tests), ("new", "2024-08-03", tests), ("bare", "2024-09-01", "[]"),
        )
    ]  # fmt: skip
    found = without_bad_golds(load(tmp_path, rows), reward="code_tests")
    window = Window(since=day("2024-08-01"), until=day("2025-02-01"))
    assert ids(select_problems("lcb", found, window=window)) == ["new"]
    # to math_answer an object with tests is no answer
    assert ids(without_bad_golds(found, reward="math_answer")) == []


def test_the_first_problems_are_taken_after_the_window(tmp_path):
    rows = [{"id": str(n), "problem": f"p{n}", "answer": "1", "date": f"2024-0{n}-01"} for n in range(1, 8)]
    found = select_problems("s", load(tmp_path, rows), window=Window(since=day("2024-03-01")), limit=2)
    assert ids(found) == ["3", "4"]
    assert set_counts(found) == {
        "rows": 7,
        "problems": 2,
        "left_out": {"beyond_limit": 3, "outside_window": 2},
    }

"""A training set is verifiable, repeats nothing, leaves out evaluation problems, and accounts for every row."""

from __future__ import annotations

import json

import pytest

from megatron_rl.data import prepare as module
from megatron_rl.data.golds import first_gold, gold_fault
from megatron_rl.data.prepare import Cut, Options, prepare
from megatron_rl.errors import DataError
from megatron_rl.recipe.dataset import DatasetConfig, DifficultyConfig
from megatron_rl.rewards.math_answer import MathAnswer

HELD_OUT = "A tram leaves the depot at noon with twelve riders and nobody else boards it. How many ride?"
FIRST = [
    {"id": "a", "problem": "What is 1 + 1?", "answer": "2", "difficulty": 1},
    {"id": "b", "problem": "What is 1 + 2?", "answer": "3", "difficulty": 2},
    {"id": "c", "problem": "Show that it holds.", "answer": "proof"},
    {"id": "d", "problem": "Two of them?", "answer": "(a) 3, (b) 4"},
    {"id": "e", "problem": "Why?", "answer": "because the sum of two odd numbers must always be even"},
    {"id": "f", "problem": "Broken?", "answer": "\\frac{1}{2"},
    {"id": "g", "problem": "Halve one.", "answer": "1/2", "difficulty": 9},
    {"id": "h", "problem": "Nothing?", "answer": ""},
    {"id": "i", "problem": "At noon the tram leaves. " + HELD_OUT, "answer": "12"},
    {"id": "j", "problem": "What is 5 + 5?", "answer": "10"},
]
SECOND = [
    {"id": "a", "problem": "What is 1 + 1?", "answer": "2"},
    {"id": "b", "problem": "what is  $1+2$", "answer": "3.0"},
    {"id": "j", "problem": "What is 5+5?", "answer": "11"},
    {"id": "g", "problem": "What is 2 + 2?", "answer": ["4", "four"], "difficulty": 3},
]


@pytest.fixture
def grader():
    reward = MathAnswer(workers=1, timeout_s=5.0)
    yield reward
    reward.close()


def _write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def options(tmp_path):
    return Options(
        sources=[_write(tmp_path / "first.jsonl", FIRST), _write(tmp_path / "second.jsonl", SECOND)],
        against=[_write(tmp_path / "eval.jsonl", [{"id": "e1", "problem": HELD_OUT}])],
        difficulties=(1, 5),
        cuts=[Cut(name="hard", by="difficulty", low=2, high=5)],
    )


def _with(options, **changes):
    return module.Options(**{name: getattr(options, name) for name in options.__slots__} | changes)


def _rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_row_is_kept_or_left_out_for_one_reason(tmp_path, options, grader):
    report = prepare(options, tmp_path / "out", grader=grader)
    assert dict(report.reasons()) == {
        "proof": 1,
        "multi_part": 1,
        "prose": 1,
        "bad_gold": 1,
        "bad_difficulty": 1,
        "no_answer": 1,
        "contaminated": 1,
        "conflicting_answer": 2,
        "duplicate": 1,
        "repeated_text": 1,
    }
    assert sum(report.kept.values()) + report.reasons().total() == sum(report.num_rows.values()) == 14
    rows = _rows(tmp_path / "out" / "dropped.jsonl")
    left_out = {(row["id"], row["reason"]) for row in rows}
    assert len({(row["source"], row["id"]) for row in rows}) == len(rows) == report.reasons().total()
    assert {("f", "bad_gold"), ("i", "contaminated"), ("j", "conflicting_answer")} <= left_out


def test_kept_rows_have_the_klear_schema_and_cuts_hold_those_of_their_window(tmp_path, options, grader):
    report = prepare(options, tmp_path / "out", grader=grader)
    rows = _rows(tmp_path / "out" / "train.jsonl")
    assert [row["id"] for row in rows] == ["a", "b", "g"]
    assert rows[2] == {
        "id": "g",
        "data_source": "second",
        "prompt": [{"role": "user", "content": "What is 2 + 2?"}],
        "ability": "math",
        "reward_model": {"ground_truth": ["4", "four"], "style": "rule"},
        "extra_info": {"index": 2, "difficulty": 3.0},
    }
    assert [row["id"] for row in _rows(tmp_path / "out" / "hard.jsonl")] == ["b", "g"]
    assert report.cuts == {"hard": 2}
    assert report.contaminated_by == {"eval.jsonl": 1}


def test_the_report_names_counts_reasons_and_ids_and_no_problem(tmp_path, options, grader):
    prepare(options, tmp_path / "out", grader=grader)
    data = json.loads((tmp_path / "out" / "report.json").read_text())
    assert (data["rows"], data["kept"], data["sources"]["second.jsonl"]["kept"]) == (14, 3, 1)
    assert data["examples"]["contaminated"] == ["i"]
    text = (tmp_path / "out" / "report.txt").read_text()
    assert "conflicting_answer: same problem with another gold; none of them is kept: j, j" in text
    assert "What is" not in text


def test_same_arguments_give_the_same_bytes_and_nothing_else_stays(tmp_path, options, grader):
    for name in ("one", "two"):
        prepare(options, tmp_path / name, grader=grader)
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert names == ["dropped.jsonl", "hard.jsonl", "report.json", "report.txt", "train.jsonl"]
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_a_limit_draws_by_seed_and_keeps_the_order(tmp_path, grader):
    rows = [{"id": str(i), "problem": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(200)]
    source = _write(tmp_path / "many.jsonl", rows)
    drawn = []
    for seed in (1, 2):
        report = prepare(
            Options(sources=[source], limit=20, seed=seed), tmp_path / f"out{seed}", grader=grader
        )
        drawn.append([int(row["id"]) for row in _rows(tmp_path / f"out{seed}" / "train.jsonl")])
        assert report.reasons() == {"over_limit": 180}
        assert len(_rows(tmp_path / f"out{seed}" / "dropped.jsonl")) == 180
    assert drawn[0] == sorted(drawn[0]) != drawn[1]
    assert len(drawn[0]) == len(drawn[1]) == 20


def test_text_that_is_no_utf8_is_written_as_escapes_and_read_again(tmp_path, grader):
    rows = [{"id": str(i), "problem": f"\ud800 What is {i} + 1?", "answer": str(i + 1)} for i in range(3)]
    source = _write(tmp_path / "odd.jsonl", rows)
    prepare(Options(sources=[source]), tmp_path / "out", grader=grader)
    written = _rows(tmp_path / "out" / "train.jsonl")
    assert [row["prompt"][0]["content"] for row in written] == [row["problem"] for row in rows]


def test_measured_pass_rates_select_and_are_written(tmp_path, options, grader):
    rates = {"a": 1.0, "b": 0.5}
    asked = []

    def measure(prompts):
        asked.extend(prompt.id for prompt in prompts)
        return rates

    report = prepare(
        _with(options, pass_rate=(0.1, 0.9), cuts=[Cut(name="mid", by="pass_rate", low=0.4, high=0.6)]),
        tmp_path / "out",
        grader=grader,
        measure=measure,
    )
    assert asked == ["a", "b", "j", "g"]
    assert {reason: report.reasons()[reason] for reason in ("too_easy", "no_pass_rate")} == {
        "too_easy": 1,
        "no_pass_rate": 1,
    }
    (row,) = _rows(tmp_path / "out" / "mid.jsonl")
    assert row["extra_info"] == {"index": 0, "difficulty": 2.0, "pass_rate": 0.5}


def test_a_prepared_file_can_be_prepared_again_with_its_pass_rates(tmp_path, options, grader):
    prepare(options, tmp_path / "one", grader=grader, measure=lambda prompts: {p.id: 0.25 for p in prompts})
    again = Options(sources=[tmp_path / "one" / "train.jsonl"], pass_rate=(0.2, 0.3))
    assert prepare(again, tmp_path / "two", grader=grader).kept.total() == 3


def test_a_column_gives_the_difficulty(tmp_path, grader):
    source = _write(
        tmp_path / "x.jsonl", [{"problem": "What is 1 + 1?", "answer": "2", "extra_info": {"m": 4}}]
    )
    dataset = DatasetConfig(
        difficulty=DifficultyConfig(column="extra_info.m", higher_is="easier", denominator=16.0)
    )
    prepare(Options(sources=[source], dataset=dataset), tmp_path / "out", grader=grader)
    (row,) = _rows(tmp_path / "out" / "train.jsonl")
    assert row["extra_info"]["difficulty"] == 0.75


def test_sources_of_one_name_are_told_apart_by_their_paths(tmp_path, grader):
    sources = []
    for number, name in enumerate(("one", "two")):
        (tmp_path / name).mkdir()
        sources.append(_write(tmp_path / name / "train.jsonl", [FIRST[number]]))
    report = prepare(Options(sources=sources), tmp_path / "out", grader=grader)
    assert report.kept == {str(source): 1 for source in sources}


@pytest.mark.parametrize(
    ("rows", "against", "match"),
    [
        ([{"problem": "?", "answer": ""}], [], r"no problem is left of 1 rows \(dropped: no_answer 1\)"),
        (FIRST[:1], [{"text": "?"}], r"eval\.jsonl: no evaluation problem can be read"),
    ],
)
def test_nothing_to_work_on_is_an_error_that_leaves_no_file(tmp_path, grader, rows, against, match):
    options = Options(
        sources=[_write(tmp_path / "x.jsonl", rows)],
        against=[_write(tmp_path / "eval.jsonl", against)] if against else [],
    )
    with pytest.raises(DataError, match=match):
        prepare(options, tmp_path / "out", grader=grader)
    assert not (tmp_path / "out").exists()


def test_what_a_killed_process_left_is_removed(tmp_path, options, grader):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".spool.jsonl.123.tmp").write_text("half a ro")
    prepare(options, tmp_path / "out", grader=grader)
    assert not list((tmp_path / "out").glob(".*"))


def test_an_earlier_result_stays_whole_where_a_later_one_fails(tmp_path, options, grader):
    prepare(options, tmp_path / "out", grader=grader)
    before = (tmp_path / "out" / "train.jsonl").read_bytes()
    (tmp_path / "second.jsonl").write_text('{"problem": "x", "answer": "1"}\n{broken\n')
    with pytest.raises(DataError, match=r"second\.jsonl:2: broken JSON"):
        prepare(options, tmp_path / "out", grader=grader)
    assert (tmp_path / "out" / "train.jsonl").read_bytes() == before
    assert not list((tmp_path / "out").glob(".*"))


@pytest.mark.parametrize(
    ("gold", "fault"),
    [
        ("(a) 3, (b) 4", "multi_part"),
        ("(i) x; (ii) y", "multi_part"),
        ("1) 3, 2) 4", "multi_part"),
        (r"(-\infty, 1) \cup (2, 3)", None),
        ("f(1)=2, f(2)=3", None),
        ("(1, 2)", None),
        (r"\text{the line through the origin}", None),
        ("it is the set of all even numbers that exceed seven", "prose"),
        ({"inputs": ["1"], "outputs": ["2"]}, "code"),
        (12, None),
    ],
    ids=str,
)
def test_golds_that_no_grader_can_compare_are_told_by_their_form(gold, fault):
    assert gold_fault(gold) == fault


@pytest.mark.parametrize(
    ("gold", "text"),
    [
        ('["1", "2"]', "1"),
        ('"7"', "7"),
        ("[0, 1]", "[0, 1]"),
        (["x"], "x"),
        (142.0, "142.0"),
        ("\\boxed{3}", "3"),
    ],
)
def test_one_answer_is_taken_out_of_every_form_of_gold(gold, text):
    assert first_gold(gold) == text

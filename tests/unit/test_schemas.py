"""Each public schema, by a row of its form with a problem of ours, read field by field; parquet and JSON alike."""

from __future__ import annotations

import json

import pyarrow
import pytest
from pyarrow import parquet

from megatron_rl.data.curriculum import is_in_window
from megatron_rl.data.prompts import load_prompts, prompts_from_rows
from megatron_rl.data.rows import read_rows
from megatron_rl.errors import DataError
from megatron_rl.recipe.dataset import DatasetConfig, DifficultyConfig
from megatron_rl.recipe.stages import CurriculumWindow

ASKED = "What is 12 + 30?"
USER = [{"role": "user", "content": ASKED}]
LEVELS = {"Small-1.5B": 3, "Small-7B": 12}


def verl(gold, *, source="toy", extra=None, content=ASKED, **more):
    row = {
        "data_source": source,
        "prompt": [{"content": content, "role": "user"}],
        "ability": "math",
        "reward_model": {"ground_truth": gold, "style": "rule"},
    }
    return row | ({} if extra is None else {"extra_info": extra}) | more


# name: row, expected answer, id (None: from the content), source, difficulty, part of meta
CASES = {
    "klear_math": (
        verl("42", source="math_longcot_math_verify", __index_level_0__="17"),
        ("42", None, "math_longcot_math_verify", None),
        {"__index_level_0__": "17", "ability": "math", "reward_model": {"style": "rule"}},
    ),
    "klear_code": (
        verl(
            json.dumps({"inputs": ["1 2\n"], "outputs": ["3\n"], "timeout": 4}),
            source="coder1_longcot",
            hash="a1b2",
        ),
        ('{"inputs": ["1 2\\n"], "outputs": ["3\\n"], "timeout": 4}', None, "coder1_longcot", None),
        {"hash": "a1b2"},
    ),
    "skywork": (
        verl('["42"]', source="train-math-toy", extra={"index": 5, "model_difficulty": LEVELS}),
        ('["42"]', "train-math-toy-5", "train-math-toy", None),
        {"model_difficulty": LEVELS, "index": 5},
    ),
    "dapo": (
        verl("42", source="math_dapo", extra={"index": "9f-uuid"}),
        ("42", "math_dapo-9f-uuid", "math_dapo", None),
        {"index": "9f-uuid"},
    ),
    "eval_number_gold": (
        verl(42.0, source="", extra={"index": 3, "raw_problem": ASKED, "split": None}),
        (42.0, "3", "", None),
        {"raw_problem": ASKED, "split": None},
    ),
    "eval_list_gold": (
        verl(["42", "42.0"], source="minerva", extra={"id": 8}),
        (["42", "42.0"], "minerva-8", "minerva", None),
        {},
    ),
    "deepscaler": (
        {"problem": ASKED, "answer": "42", "solution": "Add them."},
        ("42", None, "", None),
        {"solution": "Add them."},
    ),
    "polaris": ({"problem": ASKED, "answer": "42", "difficulty": "5/8"}, ("42", None, "", 0.625), {}),
    "big_math": (
        {
            "problem": ASKED,
            "answer": "42",
            "source": "toy",
            "domain": ["Arithmetic"],
            "llama8b_solve_rate": 0.25,
        },
        ("42", None, "", 0.75),
        {"domain": ["Arithmetic"], "llama8b_solve_rate": 0.25},
    ),
    "orz_eval": (
        {"prompt": [{"from": "user", "value": ASKED}], "final_answer": "42", "file_name": "toy"},
        ("42", None, "", None),
        {"file_name": "toy"},
    ),
    "deepmath": (
        {
            "question": ASKED,
            "final_answer": "42",
            "difficulty": 4.5,
            "topic": "Sums",
            "r1_solution_1": "It is 42.",
        },
        ("42", None, "", 4.5),
        {"topic": "Sums", "r1_solution_1": "It is 42."},
    ),
    "openmath": (
        {
            "problem": ASKED,
            "expected_answer": "42",
            "problem_type": "has_answer_extracted",
            "pass_rate_72b_tir": "0.5",
            "generated_solution": "So 42.",
        },
        ("42", None, "", 0.5),
        {"generated_solution": "So 42.", "pass_rate_72b_tir": "0.5"},
    ),
    "numina": (
        {
            "problem": ASKED,
            "solution": "Add.",
            "answer": "42",
            "question_type": "math-word-problem",
            "problem_is_valid": "Yes",
            "solution_is_valid": "Yes",
            "source": "toy",
            "synthetic": False,
        },
        ("42", None, "", None),
        {"source": "toy", "synthetic": False, "solution": "Add."},
    ),
    "acereason": ({"problem": ASKED, "answer": "42"}, ("42", None, "", None), {}),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("form", ["lines", "array", "parquet"])
def test_a_public_schema_is_read_field_by_field(tmp_path, name, form):
    row, (answer, row_id, source, difficulty), meta = CASES[name]
    file = tmp_path / "rows.json"
    if form == "parquet":
        parquet.write_table(pyarrow.Table.from_pylist([row]), file)
    else:
        file.write_text(json.dumps(row if form == "lines" else [row], indent=None if form == "lines" else 2))
    (prompt,), dropped, renamed = prompts_from_rows(read_rows(file))
    assert (prompt.messages, dropped, renamed) == (USER, {}, 0)
    assert (prompt.answer, type(prompt.answer)) == (answer, type(answer))
    assert prompt.id == row_id if row_id else len(prompt.id) == 16
    assert (prompt.data_source, prompt.difficulty) == (source, difficulty)
    assert {key: prompt.meta[key] for key in meta} == meta


@pytest.mark.parametrize("form", ["array", "lines"])
def test_orz_arrays_of_two_turns_are_rows(tmp_path, form):
    file = tmp_path / "orz.json"
    turns = [{"from": "human", "value": ASKED}, {"from": "assistant", "ground_truth": {"value": "42"}}]
    rows = [turns, turns, [{"from": "human", "value": "?"}, {"from": "assistant"}]]
    file.write_text(json.dumps(rows) if form == "array" else "\n".join(map(json.dumps, rows)))
    (prompt,), dropped, _ = prompts_from_rows(read_rows(file))
    assert (prompt.messages, prompt.answer) == (USER, "42")
    assert dropped == {"duplicate": 1, "no_answer": 1}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"problem": "Show it.", "answer": "proof", "question_type": "MCQ"}, "proof"),
        ({"problem": "Show it.", "answer": "1", "question_type": "proof"}, "proof"),
        ({"problem": ASKED, "answer": "notfound", "problem_is_valid": "Yes"}, "no_answer"),
        ({"problem": ASKED, "answer": "1", "problem_is_valid": "Incomplete"}, "invalid"),
        (
            {"problem": ASKED, "answer": "1", "problem_is_valid": "Yes", "solution_is_valid": "No"},
            "invalid",
        ),
        ({"problem": "Show it.", "expected_answer": "1", "problem_type": "converted_proof"}, "proof"),
        ({"problem": ASKED, "expected_answer": None, "problem_type": "x"}, "no_answer"),
        (verl(json.dumps({"inputs": [], "outputs": []})), "no_answer"),
        (verl(json.dumps({"inputs": ["1"], "outputs": []})), "bad_tests"),
        (verl('{"inputs": ["1"'), "bad_tests"),
        (verl(json.dumps({"inputs_file": "a.txt", "outputs_file": "b.txt"})), "tests_in_file"),
        ({"question_content": "Add.", "public_test_cases": "[]", "private_test_cases": "x"}, "bad_tests"),
        ({"text": ASKED}, "no_prompt"),
    ],
)
def test_a_row_that_cannot_be_used_is_counted_under_its_reason(row, reason):
    prompts, dropped, _ = prompts_from_rows([row])
    assert (prompts, dropped) == ([], {reason: 1})


@pytest.mark.parametrize(
    ("options", "want"),
    [
        ({"column": "extra_info.model_difficulty.Small-1.5B", "denominator": 16.0}, 3 / 16),
        ({"column": "extra_info.model_difficulty.Small-7B"}, 12.0),
        (
            {
                "column": "extra_info.model_difficulty.Small-7B",
                "higher_is": "easier",
                "denominator": 16.0,
            },
            0.25,
        ),
        ({"column": "extra_info.model_difficulty.absent"}, None),
    ],
)
def test_difficulty_is_read_from_the_column_in_the_direction_that_is_declared(options, want):
    dataset = DatasetConfig(difficulty=DifficultyConfig(**options))
    (prompt,), _, _ = prompts_from_rows([CASES["skywork"][0]], dataset=dataset)
    assert prompt.difficulty == want


def test_a_column_that_falls_with_the_difficulty_is_the_pass_rate_of_windows():
    column = DifficultyConfig(column="difficulty", higher_is="easier")
    (prompt,), _, _ = prompts_from_rows([CASES["polaris"][0]], dataset=DatasetConfig(difficulty=column))
    assert (prompt.difficulty, prompt.meta["pass_rate"]) == (0.375, 0.625)
    assert is_in_window(prompt, CurriculumWindow(iterations=1, pass_rate=(0.6, 0.7)), {})


def test_a_pass_rate_above_its_denominator_is_an_error():
    dataset = DatasetConfig(
        difficulty=DifficultyConfig(column="extra_info.model_difficulty.Small-7B", higher_is="easier")
    )
    with pytest.raises(
        DataError, match=r"rows: row 1: dataset\.difficulty: .* is 12, .* set the denominator"
    ):
        prompts_from_rows([CASES["skywork"][0]], dataset=dataset)


def _load(tmp_path, rows, *, limit=1000, **options):
    file = tmp_path / "rows.json"
    file.write_text(json.dumps(rows))
    return load_prompts(
        file,
        render=lambda messages: list(messages[-1]["content"].encode()),
        max_prompt_tokens=limit,
        **options,
    )


def test_a_difficulty_column_that_no_row_has_is_an_error(tmp_path):
    dataset = DatasetConfig(difficulty=DifficultyConfig(column="hardness"))
    with pytest.raises(DataError, match=r"no row has a number in dataset\.difficulty\.column = hardness"):
        _load(tmp_path, [CASES["acereason"][0]], dataset=dataset)


def test_named_columns_win_over_recognised_ones():
    row = {"problem": "not this", "answer": "nor this", "task": {"text": ASKED, "gold.value": 42, "no": 7}}
    dataset = DatasetConfig(
        prompt="task.text", answer="task.gold.value", id="task.no", keep_columns=("answer",)
    )
    (prompt,), _, _ = prompts_from_rows([row], dataset=dataset)
    assert (prompt.messages, prompt.answer, prompt.id, prompt.meta) == (USER, 42, "7", {"answer": "nor this"})


def test_repeated_problems_count_once_by_content_where_asked(tmp_path):
    rows = [verl("42", source="aime", extra={"index": i}) for i in range(4)] + [
        verl("41", extra={"index": 0})
    ]
    assert len(_load(tmp_path, rows).prompts) == 5
    loaded = _load(tmp_path, rows, dataset=DatasetConfig(duplicates="content"))
    assert [prompt.answer for prompt in loaded.prompts] == ["42", "41"]
    assert loaded.dropped == {"duplicate": 3}


def test_the_files_own_instruction_is_taken_away_before_ours_is_put_around(tmp_path):
    rows = [verl("42", content=f"Solve this.\n\n{ASKED}\n\nEnd with the value."), verl("42", content="Bare?")]
    loaded = _load(
        tmp_path,
        rows,
        dataset=DatasetConfig(unwrap="Solve this. {problem} End with the value."),
        template="{problem} Box it: \\boxed{}.",
    )
    texts = [prompt.messages[0]["content"] for prompt in loaded.prompts]
    assert texts == [f"{ASKED} Box it: \\boxed{{}}.", "Bare? Box it: \\boxed{}."]


def test_ids_do_not_depend_on_the_template(tmp_path):
    rows = [CASES["acereason"][0]]
    assert _load(tmp_path, rows).prompts[0].id == _load(tmp_path, rows, template="Q: {problem}").prompts[0].id


def test_a_long_prompt_keeps_its_last_tokens_where_truncation_is_left(tmp_path):
    loaded = _load(tmp_path, [{"problem": "abcdef", "answer": "1"}, {"problem": "ab", "answer": "1"}],
                   limit=3, truncation="left")  # fmt: skip
    assert sorted(loaded.token_ids.values()) == [tuple(b"ab"), tuple(b"def")]
    assert (loaded.truncated, loaded.dropped) == (1, {})
    assert loaded.summary() == "kept 2 of 2 rows (1 cut on the left to the longest allowed)"

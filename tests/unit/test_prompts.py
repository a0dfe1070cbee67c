"""Rows of public schemas become prompts, and every row that does not is counted."""

from __future__ import annotations

import json

import pytest

from megatron_rl.data.prompts import load_prompts, prompts_from_rows
from megatron_rl.errors import DataError
from megatron_rl.recipe.dataset import DatasetConfig


def _one(row):
    prompts, dropped, _ = prompts_from_rows([row])
    assert not dropped
    return prompts[0]


def _load(tmp_path, rows, max_prompt_tokens=100, **options):
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows))
    return load_prompts(
        file,
        render=lambda messages: list(messages[-1]["content"].encode()),
        max_prompt_tokens=max_prompt_tokens,
        **options,
    )


KLEAR = {
    "data_source": "math",
    "prompt": [{"content": "1+1", "role": "user"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"index": 7, "difficulty": 3, "split": "train"},
}


def test_klear_row_gives_messages_answer_id_and_difficulty():
    prompt = _one(KLEAR)
    assert prompt.messages == [{"role": "user", "content": "1+1"}]
    assert (prompt.answer, prompt.id, prompt.data_source, prompt.difficulty) == ("2", "math-7", "math", 3.0)
    assert prompt.meta["split"] == "train"
    assert prompt.meta["ability"] == "math"


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        ({"problem": "1+1", "answer": "2"}, "2"),
        ({"question": "1+1", "final_answer": "2", "difficulty": 1}, "2"),
        ({"question": "1+1", "answer": "2"}, "2"),
        ({"question": "1+1", "answer": "one and one\n#### 1,234"}, "1234"),
        ({"prompt": "1+1", "answer": "2"}, "2"),
    ],
    ids=["problem", "final_answer", "question", "gsm8k", "prompt_text"],
)
def test_question_and_answer_schemas_are_recognised(row, answer):
    prompt = _one(row)
    assert prompt.messages == [{"role": "user", "content": "1+1"}]
    assert prompt.answer == answer


@pytest.mark.parametrize(
    "gold", [0, 142.0, "x", ["1", "2"], {"tests": [1]}, '["1"]', "[0, 1)", False], ids=repr
)
def test_gold_answer_stays_as_the_row_holds_it(gold):
    assert _one({**KLEAR, "reward_model": {"ground_truth": gold}}).answer is gold


@pytest.mark.parametrize("gold", [None, "", "  ", [], [""], [None], "[]", '[""]', {}, float("nan")], ids=repr)
def test_row_without_gold_answer_is_dropped_and_counted(gold):
    prompts, dropped, _ = prompts_from_rows([{**KLEAR, "reward_model": {"ground_truth": gold}}, KLEAR])
    assert len(prompts) == 1
    assert dropped == {"no_answer": 1}


@pytest.mark.parametrize(
    "row",
    [
        {"answer": "2"},
        {"problem": " ", "answer": "2"},
        {"prompt": [], "answer": "2"},
        {"prompt": [{"role": "user"}], "answer": "2"},
        {"prompt": ["1+1"], "answer": "2"},
        {"prompt": [{"role": "assistant", "content": "hi"}], "answer": "2"},
    ],
    ids=["absent", "blank", "empty", "no_content", "no_role", "ends_with_assistant"],
)
def test_row_without_prompt_is_dropped_and_counted(row):
    prompts, dropped, _ = prompts_from_rows([row])
    assert prompts == []
    assert dropped == {"no_prompt": 1}


@pytest.mark.parametrize(
    ("extra", "want"),
    [
        ({"difficulty": 4}, 4.0),
        ({"difficulty": "4.5"}, 4.5),
        ({"extra_info": {"difficulty": 2}, "difficulty": 4}, 2.0),
        ({"extra_info": None, "difficulty": 0}, 0.0),
        ({"difficulty": "hard"}, None),
        ({"difficulty": 10**400}, None),
        ({"difficulty": True}, None),
        ({"difficulty": float("nan")}, None),
        ({}, None),
    ],
)
def test_difficulty_comes_from_extra_info_first_then_from_the_row(extra, want):
    assert _one({"problem": "1+1", "answer": "2", **extra}).difficulty == want


def test_id_of_a_row_without_one_depends_on_its_content_alone():
    row = {"problem": "1+1", "answer": "2"}
    assert _one(row).id == _one({**row, "extra_column": 9}).id == _one(dict(reversed(row.items()))).id
    assert _one(row).id != _one({**row, "answer": "3"}).id


def test_identical_rows_with_one_id_are_dropped_and_different_ones_renamed():
    first, other = {"id": "a", "problem": "1+1", "answer": "2"}, {"id": "a", "problem": "2+2", "answer": "4"}
    prompts, dropped, renamed = prompts_from_rows([first, other, dict(first), dict(other)])
    assert [prompt.messages[0]["content"] for prompt in prompts] == ["1+1", "2+2"]
    assert prompts[0].id == "a"
    assert prompts[1].id.startswith("a-")
    assert dropped == {"duplicate": 2}
    assert renamed == 1


def test_too_long_prompts_are_dropped_and_every_row_is_accounted_for(tmp_path):
    rows = [{"problem": "x" * n, "answer": "1"} for n in (3, 4, 5)] + [{"problem": "y", "answer": ""}]
    loaded = _load(tmp_path, rows, max_prompt_tokens=4)
    assert [len(prompt.messages[0]["content"]) for prompt in loaded.prompts] == [3, 4]
    assert loaded.dropped == {"too_long": 1, "no_answer": 1}
    assert loaded.num_rows == 4
    assert loaded.summary() == "kept 2 of 4 rows (dropped: no_answer 1, too_long 1)"


def test_rendered_ids_are_kept_per_prompt(tmp_path):
    loaded = _load(tmp_path, [{"id": "p", "problem": "ab", "answer": "1"}])
    assert loaded.token_ids == {"p": (97, 98)}


def test_no_prompt_left_is_an_error_with_the_counts(tmp_path):
    rows = [{"problem": "long", "answer": "1"}, {"problem": "x", "answer": ""}, {"text": "?"}]
    with pytest.raises(DataError, match=r"of 3 rows \(dropped: no_answer 1, no_prompt 1, too_long 1\)"):
        _load(tmp_path, rows, max_prompt_tokens=2)


@pytest.mark.parametrize(
    ("row", "dataset", "advice"),
    [
        ({"problem": "long", "answer": "1"}, DatasetConfig(),
         "left of 1 rows (dropped: too_long 1); raise max_prompt_tokens = 2 or cut prompts"),
        ({"text": "?"}, DatasetConfig(), "no_prompt 1); a row needs `prompt` with"),
        ({"problem": "x"}, DatasetConfig(), "no_answer 1); a row needs `prompt` with"),
        ({"text": "?"}, DatasetConfig(prompt="txet", answer="gold"),
         "no_prompt 1); dataset.prompt = txet and dataset.answer = gold must be columns of the file; "),
    ],
)  # fmt: skip
def test_no_prompt_left_says_what_helps_against_the_reasons_at_hand(tmp_path, row, dataset, advice):
    with pytest.raises(DataError) as caught:
        _load(tmp_path, [row], max_prompt_tokens=2, dataset=dataset)
    assert advice in str(caught.value)
    assert ("max_prompt_tokens" in str(caught.value)) == ("too_long" in advice)


def test_the_digest_of_prompts_tells_everything_that_draws_seeds_and_rewards_depend_on(tmp_path):
    rows = [
        {"id": "a", "problem": "1+1", "answer": "2", "difficulty": 1},
        {"id": "b", "problem": "2+2", "answer": "4", "difficulty": 1},
    ]
    changes = ({"id": "c"}, {"problem": "1+2"}, {"answer": "3"}, {"difficulty": 2}, {"pass_rate": 0.5})
    others = [[{**rows[0], **change}, rows[1]] for change in changes]
    digests = {_load(tmp_path, each).digest() for each in [rows, rows[::-1], rows[:1], *others]}
    assert len(digests) == 8
    assert _load(tmp_path, rows).digest() == _load(tmp_path, rows).digest()

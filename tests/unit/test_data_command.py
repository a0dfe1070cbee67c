"""`megatron-rl data` counts every row and shows what is trained on, with and without a tokenizer."""

from __future__ import annotations

import json
import os
import sys

import pytest

from megatron_rl.cli import main
from megatron_rl.data.survey import histogram
from tests.helpers.tokenizers import CHATML, write_hf_tokenizer

PROMPTS = [
    {"id": "a", "problem": "1+1", "answer": "2", "difficulty": 1},
    {"id": "b", "problem": "1+1", "answer": "3", "difficulty": 2},
    {"id": "c", "problem": "2+2 and more", "answer": 4},
    {"problem": "3+3", "answer": ""},
    {"problem": "Show it.", "answer": "proof"},
    {"text": "?"},
    {"id": "a", "problem": "1+1", "answer": "2", "difficulty": 1},
]
TURNS = [("user", "1+1"), ("assistant", "<think>add</think>2"), ("user", "2+2"), ("assistant", "4")]
SFT = [
    {"messages": [{"role": role, "content": text} for role, text in TURNS]},
    {"messages": [{"role": "user", "content": "1"}]},
    {"messages": []},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_hf_tokenizer(tmp_path_factory.mktemp("model"), template=CHATML)


def _file(tmp_path, rows):
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return str(file)


def _json(capsys, *args):
    assert main(["data", *args, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_every_row_of_a_prompt_file_is_kept_or_counted_with_its_number(tmp_path, capsys):
    (found,) = _json(capsys, _file(tmp_path, PROMPTS))
    assert (found["kind"], found["num_rows"], found["kept"]) == ("prompts", 7, 3)
    assert found["dropped"] == {"no_answer": 1, "proof": 1, "no_prompt": 1, "duplicate": 1}
    assert found["dropped_rows"] == {"no_answer": [4], "proof": [5], "no_prompt": [6]}
    assert (found["repeated"], found["conflicting"]) == (1, 1)
    assert found["difficulty"] == {"1": 1, "2": 1, "none": 1}
    assert found["gold_types"] == {"str": 2, "int": 1}
    assert found["tokens"] == {}


def test_a_file_of_which_nothing_is_kept_is_told_how_columns_are_named(tmp_path, capsys):
    assert main(["data", _file(tmp_path, [{"frage": "1+1", "antwort": "2"}])]) == 0
    assert "nothing is left: a row needs" in capsys.readouterr().out
    assert main(["data", _file(tmp_path, PROMPTS)]) == 0
    assert "nothing is left" not in capsys.readouterr().out


def test_with_a_tokenizer_prompts_are_rendered_and_long_ones_counted(tmp_path, capsys, model):
    (found,) = _json(capsys, _file(tmp_path, PROMPTS), "--tokenizer", str(model), "--max-tokens", "25")
    assert (found["kept"], found["dropped"]["too_long"]) == (2, 1)
    assert found["shown"][0]["pieces"] == [
        ["<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n", False],
        ["", True],
    ]
    assert found["tokens"]["max"] == 22


def test_the_response_mask_of_a_conversation_is_visible(tmp_path, capsys, model):
    assert main(["data", _file(tmp_path, SFT), "--tokenizer", str(model)]) == 0
    text = capsys.readouterr().out
    assert "⟦<think>add</think>2<|im_end|>⟧" in text
    assert "⟦4<|im_end|>⟧" in text
    assert text.count("⟦") == 2
    assert "dropped     1 untrained (rows 2)" in text
    assert "dropped     1 no_messages (rows 3)" in text


def test_without_a_tokenizer_roles_stand_for_the_template(tmp_path, capsys):
    assert main(["data", _file(tmp_path, SFT), _file(tmp_path, SFT), "--show", "1"]) == 0
    text = capsys.readouterr().out
    assert "user: 1+1\nassistant: ⟦<think>add</think>2⟧" in text
    assert "tokens      unknown; give --tokenizer" in text


def test_a_recipe_gives_the_options_of_the_files_it_names(tmp_path, capsys, model):
    file = _file(tmp_path, [{"q": "1+1", "a": 2, "solved": 4}, {"q": "2+2", "a": 4, "solved": 16}])
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"""
name: toy
model: {{hf_path: {model}}}
stages:
  - kind: rl
    prompts: {file}
    dataset: {{prompt: q, answer: a, difficulty: {{column: solved, higher_is: easier, denominator: 16}}}}
    prompt_template: "{{problem}} Box it."
    rewards: {{math_answer: 1.0}}
    iterations: 1
    prompts_per_iteration: 2
    group_size: 2
    sampling: {{max_response_tokens: 8, max_prompt_tokens: 64}}
    optimizer: {{lr: 1.0e-6}}
""")
    (found,) = _json(capsys, file, "--recipe", str(recipe))
    assert found["difficulty"] == {"0": 1, "0.75": 1}
    assert "1+1 Box it.<|im_end|>" in found["shown"][0]["pieces"][0][0]


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "the file is empty"),
        (b'{"a": 1}\n{"a":', "rows.jsonl:2: broken JSON"),
        (None, "no such data file"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_clear_error(tmp_path, capsys, content, match):
    file = tmp_path / "rows.jsonl"
    if content is not None:
        file.write_bytes(content)
    assert main(["data", str(file)]) == 2
    assert match in capsys.readouterr().err


def test_every_file_that_cannot_be_read_is_named_and_the_others_are_shown(tmp_path, capsys):
    (tmp_path / "good.jsonl").write_text(json.dumps({"problem": "1+1", "answer": "2"}) + "\n")
    names = [str(tmp_path / name) for name in ("gone.jsonl", "good.jsonl", "lost.jsonl")]
    assert main(["data", *names]) == 2
    out, err = capsys.readouterr()
    assert names[1] in out
    assert [line.split(": ")[0] for line in err.splitlines()] == ["error", f"  {names[0]}", f"  {names[2]}"]


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path, monkeypatch):
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert main(["data", _file(tmp_path, PROMPTS)]) == 0


def test_many_values_are_shown_in_ten_bands_that_hold_all_of_them():
    found = histogram([i / 100 for i in range(101)] + [None])
    assert len(found) == 11
    assert sum(found.values()) == 102
    assert found["none"] == 1

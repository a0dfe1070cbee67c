"""A stage of so many epochs has the steps that its file gives it."""

from __future__ import annotations

import json

import pytest

from megatron_rl.errors import RecipeError
from megatron_rl.recipe.epochs import steps_of_epochs
from megatron_rl.recipe.load import load_recipe, resolved_yaml

RECIPE = """
name: toy
model: {{hf_path: model}}
stages:
  - kind: sft
    data: {data}
    {length}
    global_batch_size: 4
    tokens_per_microbatch: 4096
    optimizer: {{lr: 0.1}}
"""


def _load(tmp_path, length, *, rows=10):
    data = tmp_path / "sft.jsonl"
    if rows is not None:
        data.write_text("".join(json.dumps({"prompt": str(i), "response": "2"}) + "\n" for i in range(rows)))
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE.format(data=data, length=length))
    return load_recipe(file)


@pytest.mark.parametrize(
    ("epochs", "rows", "steps"), [(1, 8, 2), (1, 9, 3), (4, 10, 10), (0.5, 8, 1), (0.1, 4, 1)]
)
def test_steps_draw_every_row_at_least_so_many_times(epochs, rows, steps):
    assert steps_of_epochs(epochs, num_rows=rows, global_batch_size=4) == steps


def test_epochs_become_steps_and_the_resolved_recipe_loads_again(tmp_path):
    loaded = _load(tmp_path, "epochs: 4")
    assert loaded.recipe.stages[0].steps == 10
    again = tmp_path / "resolved.yaml"
    again.write_text(resolved_yaml(loaded))
    assert load_recipe(again).recipe == loaded.recipe


@pytest.mark.parametrize(
    ("length", "match"),
    [
        ("", r"stages\.0\.steps.*: missing, must be a whole number of at least 1; or give epochs"),
        (
            "{steps: 7, epochs: 4}",
            r"stages\.0\.steps.*: got 7, but epochs = 4 of the 10 rows of .* are 10 steps of 4",
        ),
        ("epochs: 0", r"stages\.0\.epochs.*: got 0, must be a number above 0"),
    ],
)
def test_lengths_that_say_nothing_or_contradict_are_refused(tmp_path, length, match):
    length = length.strip("{}").replace(", ", "\n    ")
    with pytest.raises(RecipeError, match=match):
        _load(tmp_path, length)


def test_epochs_of_a_missing_file_are_left_to_the_check_of_files(tmp_path):
    assert _load(tmp_path, "epochs: 4", rows=None).recipe.stages[0].steps == 0

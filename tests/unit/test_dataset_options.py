"""Options of how rows are read are checked with the recipe."""

from __future__ import annotations

import dataclasses
import re
import textwrap

import pytest

from megatron_rl.recipe.dataset import (
    ConversationConfig,
    DatasetConfig,
    conversation_problems,
    dataset_problems,
    template_problems,
)
from megatron_rl.recipe.load import load_recipe
from tests.helpers.source import ROOT


@pytest.mark.parametrize("template", ["no place", "{problem} {problem}", "{Problem}"])
def test_a_template_without_exactly_one_place_is_a_problem(template):
    (problem,) = template_problems(template, "stages.0.prompt_template")
    assert "must hold it once" in problem.text


@pytest.mark.parametrize("template", ["{problem}", "{problem} Answer within \\boxed{}."])
def test_braces_of_a_template_are_its_own(template):
    assert list(template_problems(template, "x")) == []


@pytest.mark.parametrize("unwrap", ["{problem}", " {problem}\n", "nothing"])
def test_a_wrapping_that_wraps_nothing_is_a_problem(unwrap):
    assert [p.path for p in dataset_problems(DatasetConfig(unwrap=unwrap), "d")] == ["d.unwrap"]


@pytest.mark.parametrize(
    ("columns", "path"),
    [
        ({"prompt": "a"}, "c.response"),
        ({"response": "a"}, "c.prompt"),
        ({"prompt": "a", "response": "b", "messages": "m"}, "c.messages"),
    ],
)
def test_columns_that_make_no_conversation_are_a_problem(columns, path):
    assert [p.path for p in conversation_problems(ConversationConfig(**columns), "c")] == [path]


def test_the_options_that_the_readme_shows_make_a_recipe_and_are_all_there_are(tmp_path):
    text = (ROOT / "megatron_rl/data/README.md").read_text()
    block = re.search(r"```yaml\n(.*?)```", text, re.DOTALL)[1]
    assert "max_response_tokens" not in block
    block = block.replace("sampling: {", "sampling: {max_response_tokens: 8, ")
    file = tmp_path / "recipe.yaml"
    file.write_text(
        "name: toy\nmodel: {hf_path: m}\nstages:\n  - kind: rl\n    prompts: p\n    rewards: {math_answer: 1.0}\n"
        "    iterations: 1\n    prompts_per_iteration: 2\n    group_size: 2\n    optimizer: {lr: 1.0e-6}\n"
        + textwrap.indent(block, "    ")
    )
    stage = load_recipe(file).recipe.stages[0]
    assert (
        list(dataset_problems(stage.dataset, "d"))
        == list(template_problems(stage.prompt_template, "t"))
        == []
    )
    shown = re.findall(r"^  (\w+):", block, re.MULTILINE)
    assert shown == [field.name for field in dataclasses.fields(DatasetConfig)]

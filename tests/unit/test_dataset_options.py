"""Options of how rows are read are checked with the recipe."""

from __future__ import annotations

import pytest

from megatron_rl.recipe.dataset import (
    ConversationConfig,
    DatasetConfig,
    conversation_problems,
    dataset_problems,
    template_problems,
)


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

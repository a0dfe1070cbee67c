"""`eval` of an RL stage: what `check` refuses, and how its values become the plan of an evaluation."""

from __future__ import annotations

import datetime

import pytest

from megatron_rl.errors import RecipeError
from megatron_rl.evaluation.in_training import eval_plan, eval_window, longest_sequence
from megatron_rl.evaluation.problems import Window
from megatron_rl.recipe.load import load_recipe
from megatron_rl.recipe.resolve import check_recipe
from megatron_rl.recipe.stages import RlStage
from megatron_rl.verify.shorten import shorten
from tests.helpers.recipes import write_recipe


@pytest.fixture
def load(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write_recipe(tmp_path)

    def checked(*overrides):
        loaded = load_recipe(path, [f"stages.1.eval.{override}" for override in overrides])
        check_recipe(loaded, world_size=1)
        return loaded.recipe

    return checked


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("pass_at=[1, 4]", "pass_at (override): got 4, must be at most samples = 2"),
        ("pass_at=[0]", "pass_at.0 (override): got 0, must be a whole number of at least 1"),
        ("top_k=0", "top_k (override): got 0, must be at least 1; -1 is no limit"),
        (
            "max_response_tokens=225",
            "= 32 + 225 = 257, but the model has 256 positions; lower it, or evaluate",
        ),
        ("windows={lcb: [2024-08-01, 2025-02-01]}", "windows.lcb (override): no set of this name"),
        ("windows={held_out: [2024-08-01, 2025-02-01]}", "did you mean 'heldout'"),
        ("windows={heldout: [2025-02-01, 2024-08-01]}", "got [2025-02-01, 2024-08-01], must be two days"),
        ("windows={heldout: [2024-08, 2025-02-01]}", "must be two days, the earlier first"),
        ("windows={heldout: [20240801, 2025-02-01]}", "windows.heldout"),
        ("sets={}", "sets (override): is empty, name at least one prompt file"),
    ],
)
def test_an_evaluation_that_makes_no_sense_is_refused_with_its_place(load, override, message):
    with pytest.raises(RecipeError) as refusal:
        load(override)
    assert message in str(refusal.value)
    assert "stages.1.eval." in str(refusal.value)


def test_values_of_the_recipe_are_those_of_the_plan(load):
    recipe = load(
        "samples=8", "pass_at=[1, 4]", "temperature=0.6", "top_p=0.95", "top_k=20", "max_response_tokens=96"
    )
    stage = recipe.stages[1]
    assert isinstance(stage, RlStage) and stage.eval is not None
    plan = eval_plan(stage, stage.eval, run_seed=5)
    assert (plan.samples, plan.pass_at, plan.run_seed) == (8, (1, 4), 5)
    draw = plan.draw("heldout")
    assert (draw.temperature, draw.top_p, draw.top_k, draw.max_tokens) == (0.6, 0.95, 20, 96)
    assert draw.every_test
    # the engine has to have room for it
    assert longest_sequence(stage) == stage.sampling.max_prompt_tokens + 96


def test_responses_are_as_long_as_rollouts_unless_the_recipe_says_otherwise(load):
    stage = load().stages[1]
    assert isinstance(stage, RlStage) and stage.eval is not None
    assert eval_plan(stage, stage.eval, run_seed=1).max_tokens == 64
    assert longest_sequence(stage) == stage.sampling.max_prompt_tokens + 64


def test_a_window_belongs_to_its_set_alone(load):
    recipe = load("windows={heldout: [2024-08-01, 2025-02-01]}")
    stage = recipe.stages[1]
    assert isinstance(stage, RlStage) and stage.eval is not None
    since, until = datetime.date(2024, 8, 1), datetime.date(2025, 2, 1)
    assert eval_window(stage.eval, "heldout") == Window(since=since, until=until)
    assert not eval_window(stage.eval, "other")


def test_a_proof_keeps_what_its_few_samples_allow(load):
    stage = shorten(
        load("samples=8", "pass_at=[1, 4]", "windows={heldout: [2024-08-01, 2025-02-01]}")
    ).stages[1]
    assert isinstance(stage, RlStage) and stage.eval is not None
    assert (stage.eval.samples, stage.eval.pass_at, stage.eval.windows) == (2, (1,), {})

"""`check` names every contradiction of dynamic sampling, overlong responses, mapped rewards and promotion."""

from __future__ import annotations

import pytest

from megatron_rl.errors import RecipeError
from megatron_rl.recipe.load import load_recipe
from megatron_rl.recipe.resolve import check_recipe
from megatron_rl.recipe.summary import summary_table
from tests.helpers.recipes import write_recipe

REFILL = "stages.1.dynamic_sampling={kind: refill, generate_prompts: 12, max_rounds: 3}"
NO_WINDOWS = "stages.1.curriculum=[]"
TRUNCATED = "{on: truncated_frac, window: 1, threshold: 0.5}"
PLATEAU = "on: reward_plateau, window: 3, threshold: 0.0"


def check(tmp_path, monkeypatch, *overrides):
    monkeypatch.chdir(tmp_path)
    return check_recipe(load_recipe(write_recipe(tmp_path), overrides), world_size=1)


@pytest.mark.parametrize(
    ("override", "path", "message"),
    [
        (["stages.1.dynamic_sampling={kind: refill, generate_prompts: 7}"], "dynamic_sampling.generate_prompts",
         "got 7, must be at least prompts_per_iteration = 8"),
        (["stages.1.dynamic_sampling={kind: oversample, generate_prompts: 16, max_rounds: 2}"],
         "dynamic_sampling.max_rounds", "got 2, but oversample has one round"),
        ([REFILL, "stages.1.algorithm.drop_zero_advantage=false"], "dynamic_sampling",
         "algorithm.drop_zero_advantage = false contradicts"),
        (["stages.1.overlong={kind: penalty}"], "overlong.buffer_tokens",
         "got 4096, must be at most sampling.max_response_tokens = 64; DAPO takes a fifth of it, 12"),
        (["stages.1.overlong={kind: filter, buffer_tokens: 8}"], "overlong.buffer_tokens", "which filter does not use"),
        (["stages.1.grader.all_or_nothing=true"], "grader.all_or_nothing", "is of code_tests, but the rewards are"),
        (["stages.1.grader.scale=[1, -1]"], "grader.scale",
         "got [1, -1], the reward of a wrong answer must come first"),
        (["stages.1.curriculum.0.pass_rate=[0, 1]"], "curriculum.0", "got both, must have one of"),
        (["stages.1.curriculum.0.difficulty=null"], "curriculum.0", "got neither, must have one of"),
        (["stages.1.curriculum=[{iterations: 6, pass_rate: [0.5, 1.5]}]"], "curriculum.0.pass_rate",
         "got [0.5, 1.5], must be shares from 0 to 1"),
        (["stages.1.curriculum=[{iterations: 6, pass_rate: [0.5, 0.1]}]"], "curriculum.0.pass_rate",
         "the lower bound must come first"),
        ([NO_WINDOWS, f"stages.1.promote={{{PLATEAU}}}"], "promote",
         "is asked after 6 iterations for the first time, but there are only 6"),
        ([NO_WINDOWS, "stages.1.promote={on: truncated_frac, window: 1, threshold: 0.0}"], "promote.threshold",
         "got 0, must be a share above 0"),
        ([f"stages.1.curriculum.1.promote={{{PLATEAU}}}"], "curriculum.1.promote", "there are only 4"),
        ([f"stages.1.curriculum=[{{iterations: 6, difficulty: [0, 9], promote: {TRUNCATED}}}]",
          f"stages.1.promote={TRUNCATED}"], "promote", "every window has its own"),
        (["stages.1.rescore={drop_above: 0.5, drop_below: 0.5}"], "rescore.drop_below",
         "must be below drop_above = 0.5"),
    ],
)  # fmt: skip
def test_a_contradiction_is_named_with_its_place(tmp_path, monkeypatch, override, path, message):
    with pytest.raises(RecipeError) as caught:
        check(tmp_path, monkeypatch, *override)
    (line,) = str(caught.value).splitlines()[1:]
    assert line.strip().startswith((f"stages.1.{path} (", f"stages.1.{path}:")) and message in line


@pytest.mark.parametrize(
    "overrides",
    [
        [REFILL, "stages.1.overlong={kind: penalty, buffer_tokens: 64}", "stages.1.rescore={samples: 4}"],
        ["stages.1.overlong={kind: filter}", "stages.1.grader={scale: [-1, 1], missing_think_close: -0.5}"],
        ["stages.1.promote={on: truncated_frac, window: 1, threshold: 1.0}"],
        ["stages.1.curriculum=[{iterations: 6, pass_rate: [0, 1]}]", "compat=klear_repo"],
    ],
)
def test_what_fits_together_passes(tmp_path, monkeypatch, overrides):
    assert check(tmp_path, monkeypatch, *overrides).stages[1].iterations == 6


def test_derived_numbers_count_what_dynamic_sampling_may_generate(tmp_path, monkeypatch):
    assert check(tmp_path, monkeypatch, REFILL).stages[1].rollouts_per_iteration == 12 * 3 * 4


def test_the_table_of_check_says_what_is_only_a_bound(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    promote = "stages.1.promote={on: truncated_frac, window: 1, threshold: 1}"
    loaded = load_recipe(write_recipe(tmp_path), [REFILL, promote])
    table = summary_table(loaded, check_recipe(loaded, world_size=1))
    rows = [" ".join(line.split()) for line in table.splitlines()]
    assert "iterations at most 6" in rows and "rollouts per iteration at most 144" in rows


def test_the_kind_of_overlong_is_one_so_that_penalty_and_filter_never_meet(tmp_path, monkeypatch):
    with pytest.raises(RecipeError, match=r"overlong\.kind .*must be one of penalty, filter"):
        check(tmp_path, monkeypatch, "stages.1.overlong={kind: both}")

"""What `compat` sets, what it leaves alone, and where that is shown."""

from __future__ import annotations

import pytest

from megatron_rl.errors import RecipeError
from megatron_rl.recipe.compat import EXPANSIONS
from megatron_rl.recipe.load import compat_line, load_recipe, resolved_yaml
from tests.helpers.recipes import RECIPE

# what Klear's released code does where its paper says otherwise
KLEAR = {
    "algorithm.dual_clip": 10.0,
    "algorithm.advantage_std": "unbiased",
    "algorithm.normaliser": "micro_batch",
    "algorithm.zero_advantage_by": "all_pass",
    "grader.scale": (-1.0, 1.0),
    "grader.missing_think_close": -0.5,
    "grader.missing_think_open": -2.0,
}


def load(tmp_path, *overrides, text=RECIPE):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return load_recipe(path, overrides)


def value(stage, key):
    section, name = key.split(".")
    return getattr(getattr(stage, section), name)


def test_klear_repo_sets_every_key_of_the_table_in_rl_stages(tmp_path):
    loaded = load(tmp_path, "compat=klear_repo")
    stage = loaded.recipe.stages[1]
    assert {key: value(stage, key) for key in EXPANSIONS["klear_repo"]} == KLEAR
    assert {loaded.origins[f"stages.1.{key}"] for key in KLEAR} == {"compat"}
    assert loaded.recipe.stages[0] == load(tmp_path).recipe.stages[0]
    assert compat_line(loaded) == (
        f"compat klear_repo: set {len(KLEAR)} keys that the recipe leaves out; recipe.resolved.yaml marks them"
    )


def test_without_compat_the_paper_holds(tmp_path):
    loaded = load(tmp_path)
    stage = loaded.recipe.stages[1]
    assert (stage.algorithm.dual_clip, stage.algorithm.zero_advantage_by) == (None, "verdict")
    assert (stage.grader.scale, stage.grader.missing_think_close) == ((0.0, 1.0), None)
    assert "compat" not in loaded.origins.values() and compat_line(loaded) is None


@pytest.mark.parametrize(
    "written", ["stages.1.algorithm.dual_clip=3.0", "stages.1.algorithm={dual_clip: 3.0}"]
)
def test_what_is_written_down_wins_and_keeps_its_origin(tmp_path, written):
    loaded = load(tmp_path, "compat=klear_repo", written)
    assert loaded.recipe.stages[1].algorithm.dual_clip == 3.0
    assert loaded.origins["stages.1.algorithm.dual_clip"] == "override"
    assert loaded.origins["stages.1.grader.scale"] == "compat"


def test_null_is_written_down_too(tmp_path):
    text = RECIPE.replace(
        "    iterations: 6\n", "    iterations: 6\n    grader: {missing_think_open: null}\n"
    )
    loaded = load(tmp_path, "compat=klear_repo", text=text)
    assert loaded.recipe.stages[1].grader.missing_think_open is None
    assert loaded.origins["stages.1.grader.missing_think_open"] == "file"


def test_the_resolved_recipe_marks_it_and_loads_again_to_the_same(tmp_path):
    loaded = load(tmp_path, "compat=klear_repo")
    text = resolved_yaml(loaded)
    assert "dual_clip: 10.0  # compat" in text and "compat: klear_repo  # override" in text
    assert load(tmp_path, text=text).recipe == loaded.recipe


def test_an_unknown_compat_is_an_error_with_a_suggestion(tmp_path):
    with pytest.raises(
        RecipeError, match=r"compat \(override\): got 'klear', must be one of none, klear_repo"
    ):
        load(tmp_path, "compat=klear")


@pytest.mark.parametrize("stages", ["stages=[]", "stages=1", "stages=[1]", "stages.1.algorithm=1"])
def test_a_malformed_recipe_is_reported_as_without_compat(tmp_path, stages):
    with pytest.raises(RecipeError) as plain:
        load(tmp_path, stages)
    with pytest.raises(RecipeError) as with_compat:
        load(tmp_path, "compat=klear_repo", stages)
    assert str(with_compat.value) == str(plain.value)

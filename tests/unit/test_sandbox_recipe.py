"""The `sandbox` of an RL stage in `check`: limits that no program could live in, and what tests cost at worst."""

from __future__ import annotations

import pytest

from megatron_rl.errors import RecipeError
from megatron_rl.recipe.load import load_recipe
from megatron_rl.recipe.resolve import check_recipe
from megatron_rl.recipe.summary import summary_table
from tests.helpers.recipes import write_recipe

CODE = "stages.1.rewards={code_tests: 1.0}"


@pytest.mark.parametrize(
    ("sandbox", "key", "message"),
    [
        ("{memory_mib: 32}", "memory_mib", "got 32, but Python alone needs about half of 64"),
        ("{first_uid: 100}", "first_uid", "got 100, must be from 1000"),
        ("{first_uid: 4000000000}", "first_uid", "got 4000000000, must be"),
        ("{python: python3}", "python", "got 'python3', must be an absolute path"),
        ("{slots: 0}", "slots", "got 0, must be a whole number of at least 1"),
        ("{wall_s: 0}", "wall_s", "got 0, must be a number above 0"),
    ],
)
def test_a_sandbox_that_cannot_work_is_named(tmp_path, monkeypatch, sandbox, key, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError) as caught:
        check_recipe(load_recipe(write_recipe(tmp_path), [CODE, f"stages.1.sandbox={sandbox}"]), world_size=1)
    (line,) = [line for line in str(caught.value).splitlines() if message in line]
    assert line.strip().startswith(f"stages.1.sandbox.{key}")


def test_check_says_what_the_tests_of_an_iteration_may_cost_and_whether_bubblewrap_is_here(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    path = write_recipe(tmp_path)
    loaded = load_recipe(path, [CODE, "stages.1.sandbox={slots: 4, max_tests: 10, wall_s: 2.0}"])
    table = summary_table(loaded, check_recipe(loaded, world_size=1))
    # 8 prompts x 4 rollouts x 10 tests
    assert "at most 320; 160 s if every one ran into its 2 s" in table
    assert "4 slots; bubblewrap " in table
    plain = load_recipe(path)
    assert "sandbox" not in summary_table(plain, check_recipe(plain, world_size=1))

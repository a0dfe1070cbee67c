"""tools/golden_trajectory.py: which differences it sees, on the same processor and on another."""

from __future__ import annotations

import copy
import json

import pytest

from megatron_rl.recipe.load import load_recipe
from tests.helpers.checkpoints import load_tool

TOOL = load_tool("golden_trajectory")
KEPT = json.loads(TOOL.TRAJECTORY.read_text())


def changed(step: int | None = None, *, elsewhere: bool = False, **values):
    got = copy.deepcopy(KEPT)
    (got if step is None else got["steps"][step - 1]).update(values)
    if elsewhere:
        got["fingerprint"]["processor"] = "another"
    return list(TOOL.differences(KEPT, got))


def test_the_kept_trajectory_has_twenty_steps_of_the_golden_recipe():
    stages = load_recipe(TOOL.GOLDEN / "recipe.yaml").recipe.stages
    assert [step["stage"] for step in KEPT["steps"]] == ["sft"] * stages[0].steps + ["rl"] * stages[
        1
    ].iterations
    assert [step["step"] for step in KEPT["steps"]] == list(range(1, 21))
    assert len({step.get("samples") for step in KEPT["steps"]}) == 1 + stages[1].iterations
    assert changed() == [] and changed(elsewhere=True) == []


@pytest.mark.parametrize("name", ["loss", "grad_norm", "lr", "entropy"])
def test_on_the_same_processor_the_last_bit_counts_and_is_named_by_step_and_amount(name):
    value = KEPT["steps"][4][name] * (1 + 2**-50)
    (line,) = changed(5, **{name: value})
    assert line.startswith(f"step 5 (sft): {name} was {KEPT['steps'][4][name]}, is {value}, off by")


def test_other_samples_and_other_weights_are_seen_on_the_same_processor():
    assert changed(14, samples="x")[0].startswith("step 14 (rl): samples was")
    assert changed(end="x") == ["end: the weights of the final model differ"]
    assert changed(start="x")[0].startswith("start: ")
    assert changed(steps=KEPT["steps"][:19]) == ["steps: kept 20, this run made 19"]


def test_on_another_processor_rounding_is_allowed_and_more_is_not():
    loss, lr, reward = (KEPT["steps"][i - 1][name] for i, name in ((5, "loss"), (5, "lr"), (13, "reward")))
    assert changed(5, elsewhere=True, loss=loss * 1.05) == []
    assert len(changed(5, elsewhere=True, loss=loss * 1.2)) == 1
    assert len(changed(5, elsewhere=True, lr=lr * (1 + 1e-9))) == 1
    assert changed(13, elsewhere=True, reward=reward + 0.2) == []
    assert len(changed(13, elsewhere=True, reward=reward + 0.3)) == 1
    assert changed(20, elsewhere=True, reward=reward + 0.3, samples="x") == []


def test_on_another_processor_the_first_steps_from_a_seed_differ_by_rounding_alone():
    first = copy.deepcopy(KEPT["first_steps"])
    assert len(first) == TOOL.NUM_FIRST_STEPS
    first[2]["loss"] *= 1 + 5e-5
    assert changed(elsewhere=True, first_steps=first) == []
    (line,) = changed(first_steps=first)
    assert line.startswith("step 3 (sft): loss was")
    first[2]["loss"] *= 1 + 2e-4
    (line,) = changed(elsewhere=True, first_steps=first)
    assert line.startswith("beginner, step 3 (sft): loss was")

"""Dotted overrides set what the schema knows, and nothing else."""

import pytest

from megatron_rl.errors import RecipeError
from megatron_rl.recipe.load import load_recipe
from tests.helpers.recipes import RECIPE


def load(tmp_path, *overrides):
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return load_recipe(path, overrides).recipe


def refusal(tmp_path, *overrides):
    with pytest.raises(RecipeError) as caught:
        load(tmp_path, *overrides)
    return str(caught.value)


def test_list_positions_and_nested_keys_can_be_set(tmp_path):
    recipe = load(
        tmp_path, "stages.1.optimizer.lr=1e-6", "stages.1.curriculum.0.difficulty.1=4", "layout.tp=2"
    )
    assert recipe.stages[1].optimizer.lr == 1e-6
    assert recipe.stages[1].curriculum[0].difficulty == (2.0, 4.0)
    assert recipe.layout.tp == 2


def test_optional_fields_that_the_file_leaves_out_can_be_set(tmp_path):
    recipe = load(
        tmp_path, "stages.1.algorithm.dual_clip=3", "stages.1.engine.tp=2", "stages.1.eval.max_prompts=7"
    )
    assert recipe.stages[1].algorithm.dual_clip == 3.0
    assert recipe.stages[1].engine.tp == 2
    assert recipe.stages[1].eval.max_prompts == 7


def test_whole_mappings_and_lists_can_be_replaced(tmp_path):
    recipe = load(tmp_path, "stages.1.rewards={math_answer: 2}", "stages.1.curriculum=[]", "checkpoint=null")
    assert recipe.stages[1].rewards == {"math_answer": 2.0}
    assert recipe.stages[1].curriculum == ()
    assert recipe.checkpoint is None


def test_a_section_set_to_null_can_be_filled_again(tmp_path):
    assert load(tmp_path, "checkpoint=null", "checkpoint.every_steps=9").checkpoint.every_steps == 9


def test_the_last_override_of_a_path_wins(tmp_path):
    assert load(tmp_path, "run.seed=2", "run.seed=3").run.seed == 3


def test_a_value_may_hold_an_equals_sign(tmp_path):
    assert load(tmp_path, "model.hf_path=a=b").model.hf_path == "a=b"


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("stages.1.optimizer.lrr=1", "stages.1.optimizer.lrr (override): unknown key; did you mean 'lr'?"),
        ("stages.1.sampling.temprature=1",
         "stages.1.sampling.temprature (override): unknown key; did you mean 'temperature'?"),
        ("stages.0.group_size=2", "stages.0.group_size (override): unknown key; known here: kind, data"),
        ("stages.2.optimizer.lr=1",
         "stages.2.optimizer.lr (override): stages is a list and has no entry '2'; its positions are 0 to 1"),
        ("stages.rl.iterations=1", "stages is a list and has no entry 'rl'"),
        ("stages.-1.iterations=1", "stages is a list and has no entry '-1'"),
        ("layout.tp.x=1", "layout.tp.x (override): layout.tp is 1, which has no keys"),
        ("layout.tp=two", "layout.tp (override): got 'two', must be a whole number of at least 1"),
        ("run.seed=", "run.seed (override): got null, must be a whole number from 0 to 4,294,967,295"),
        ("engine.tp=1", "engine.tp (override): unknown key; did you mean 'stages.*.engine'?"),
        ("lr=1", "lr (override): unknown key; known here: name, compat"),
        ("layot.tp=1", "layot.tp (override): unknown key; did you mean 'layout'?"),
    ],
)  # fmt: skip
def test_a_path_without_a_place_is_refused(tmp_path, override, line):
    text = refusal(tmp_path, override)
    assert line in text
    assert ": 1 problem\n" in text


@pytest.mark.parametrize(
    ("override", "most"),
    [
        ("run.seed=4294967296", "4,294,967,295"),
        ("run.torch_threads=100000", "65,536"),
        ("run.collective_timeout_s=1e300", "1,000,000"),
        ("model.max_positions=1000000000000", "134,217,728"),
        ("stages.1.engine.replicas=1000000000000000000", "4,096"),
        ("stages.1.engine.request_timeout_s=1e10", "1,000,000"),
        ("stages.1.engine.bucket_mib=100000000000", "1,073,741,824"),
        ("stages.1.group_size=1000000000000", "1,048,576"),
        ("stages.1.grader.memory_gib=1e20", "1,048,576"),
        ("stages.1.sandbox.slots=1000000", "65,536"),
        ("stages.1.optimizer.lr=10", "1"),
        ("stages.1.sampling.temperature=0.001", "100"),
    ],
)
def test_a_size_that_no_machine_has_or_waits_for_is_refused_with_what_is_allowed(tmp_path, override, most):
    path, _, _ = override.partition("=")
    line = refusal(tmp_path, override).splitlines()[1]
    assert line.startswith(f"  {path} (override): got ")
    assert line.removesuffix(" or null").endswith((f" and at most {most}", f" to {most}"))


def test_long_values_are_shown_by_their_ends(tmp_path):
    long = "a" * 5000
    for override in (
        f"name={long}",
        f"stages.1.group_size={long}",
        f"run.seed=[{long}",
        "model.dtype=1" + "0" * 6000,
    ):
        text = refusal(tmp_path, override)
        assert len(text) < 800 and " characters)" in text, text


@pytest.mark.parametrize("text", ["layout.tp", "=1", "layout..tp=1", ".tp=1"])
def test_text_that_is_no_override_is_refused(tmp_path, text):
    assert refusal(tmp_path, text) == f"override {text!r}: must look like path=value, such as layout.tp=2"


def test_problems_of_overrides_and_of_the_file_come_together(tmp_path):
    text = refusal(tmp_path, "layout.tq=2", "stages.1.group_size=x", "run.seed=-1")
    assert "3 problems" in text and "layout.tq" in text and "group_size" in text and "run.seed" in text

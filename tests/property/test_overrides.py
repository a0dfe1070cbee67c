"""Any value at any leaf survives the way through an override, the resolved recipe, and back."""

from __future__ import annotations

import string

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.recipe.load import load_recipe, resolved_yaml
from megatron_rl.recipe.origins import leaves
from megatron_rl.recipe.yaml_text import format_value, parse_value
from tests.helpers.recipes import RECIPE

SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(string.ascii_letters, min_size=1), inner, max_size=3)
    ),
)


@given(VALUES)
def test_formatted_values_parse_to_themselves(value):
    assert parse_value(format_value(value)) == value


POSITIVE = st.integers(min_value=1, max_value=10**6)
PATHS = {
    "model.hf_path": st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
    "layout.tp": POSITIVE,
    "run.seed": st.integers(min_value=0, max_value=2**32 - 1),
    "run.deterministic": st.none() | st.booleans(),
    "stages.0.optimizer.lr": st.floats(min_value=1e-12, max_value=1.0),
    "stages.1.algorithm.surrogate": st.sampled_from(["gppo", "clip_higher", "grpo"]),
    "stages.1.algorithm.dual_clip": st.none() | st.floats(min_value=1.5, max_value=20.0),
    "stages.1.curriculum.1.difficulty": st.tuples(st.floats(-9, 9), st.floats(-9, 9)),
    "stages.1.eval.max_prompts": st.none() | POSITIVE,
}
OVERRIDES = st.dictionaries(st.sampled_from(sorted(PATHS)), st.none()).flatmap(
    lambda chosen: st.fixed_dictionaries({path: PATHS[path] for path in chosen})
)


@settings(max_examples=40, deadline=None)
@given(OVERRIDES)
def test_overrides_change_their_leaves_alone_and_survive_the_resolved_recipe(tmp_path_factory, values):
    path = tmp_path_factory.mktemp("recipe") / "recipe.yaml"
    path.write_text(RECIPE)
    before = dict(leaves(load_recipe(path).recipe))
    loaded = load_recipe(path, [f"{dotted}={format_value(value)}" for dotted, value in values.items()])
    after = dict(leaves(loaded.recipe))
    for leaf, value in after.items():
        dotted = ".".join(leaf)
        assert value == (values[dotted] if dotted in values else before[leaf])
        assert (loaded.origins[dotted] == "override") == (dotted in values)
    path.write_text(resolved_yaml(loaded), encoding="utf-8")
    assert load_recipe(path).recipe == loaded.recipe

"""Recipes are read by YAML 1.2 rules, and every problem of a file is reported at once."""

import pytest

from megatron_rl.errors import RecipeError
from megatron_rl.recipe.load import load_recipe, resolved_yaml
from megatron_rl.recipe.yaml_text import format_value, parse_document, parse_value
from tests.helpers.recipes import RECIPE


def load(tmp_path, text=RECIPE, overrides=()):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return load_recipe(path, overrides)


def problems(tmp_path, text=RECIPE, overrides=()):
    """Dotted path (with its place) to message of each problem."""
    with pytest.raises(RecipeError) as caught:
        load(tmp_path, text, overrides)
    head, *lines = str(caught.value).splitlines()
    assert head.endswith(f"{len(lines)} problem" + ("s" if len(lines) > 1 else ""))
    return dict(line.strip().split(": ", 1) for line in lines)


def edit(old, new):
    assert RECIPE.count(old) == 1
    return RECIPE.replace(old, new)


def test_a_good_recipe_loads_with_its_defaults(tmp_path):
    recipe = load(tmp_path).recipe
    assert recipe.stages[0].optimizer.lr == 1e-3
    assert recipe.stages[0].optimizer.beta2 == 0.999
    assert recipe.stages[1].algorithm.surrogate == "gppo"
    assert recipe.stages[1].curriculum[1].difficulty == (3.0, 5.0)
    assert recipe.checkpoint.keep == 2


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6), ("1E3", 1000.0), (".5", 0.5), ("1.", 1.0), ("-2", -2), ("010", 10), ("0x10", 16),
        ("0o17", 15), ("yes", "yes"), ("on", "on"), ("true", True), ("1:30", "1:30"),
        ("2020-01-01", "2020-01-01"), ("1_000", "1_000"), ("~", None), ("", None), ("'1'", "1"),
        ("[1, a]", [1, "a"]), ("{a: 1}", {"a": 1}),
    ],
)  # fmt: skip
def test_scalars_follow_yaml_1_2(text, value):
    parsed = parse_value(text)
    assert parsed == value and type(parsed) is type(value)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        1e-6,
        1e22,
        0.1,
        "1e-6",
        "true",
        "",
        "a: b",
        "é\n\x07",
        "x y",
        "null",
        [1, [2.0]],
        {"a": 1},
    ],
)
def test_formatted_values_read_back_the_same(value):
    assert parse_value(format_value(value)) == value


def test_every_problem_of_a_file_is_reported_at_once(tmp_path):
    text = (
        RECIPE.replace("tp: 1", "tp: 2.5")
        .replace("pp: 1, vpp", "pp: true, vpp")
        .replace("sp: false", "sp: 1")
        .replace("seed: 1", "sed: 1")
        .replace("dtype: float32", "dtype: float23")
        .replace("    global_batch_size: 8\n", "")
        .replace("lr: 2e-5", "lr: -1")
    )
    assert problems(tmp_path, text) == {
        "model.dtype (line 2)": "got 'float23', must be one of float32, bfloat16; did you mean 'float32'?",
        "layout.tp (line 3)": "got 2.5, must be a whole number of at least 1",
        "layout.pp (line 3)": "got true, must be a whole number of at least 1",
        "layout.sp (line 3)": "got 1, must be true or false",
        "run.sed (line 4)": "unknown key; did you mean 'seed'?",
        "stages.0.global_batch_size (line 6)": (
            "missing, must be a whole number of at least 1 and at most 1,048,576"
        ),
        "stages.1.optimizer.lr (line 25)": "got -1, must be a number above 0 and at most 1",
    }


@pytest.mark.parametrize(
    ("old", "new", "path", "message"),
    [
        ("kind: rl", "kind: rll", "stages.1 (line 14)",
         "kind: got 'rll', must be one of sft, rl; did you mean 'rl'?"),
        ("lr: 2e-5", "lr: '2e-5'", "stages.1.optimizer.lr (line 26)",
         "got '2e-5', must be a number above 0 and at most 1"),
        ("lr: 2e-5", "lr: true", "stages.1.optimizer.lr (line 26)", "got true, must be a number above 0 and at most 1"),
        ("lr: 2e-5", "lr: .inf", "stages.1.optimizer.lr (line 26)", "got inf, must be a number above 0 and at most 1"),
        ("kind: rl\n", "kind: rl\n    kl: 0.1\n", "stages.1.kl (line 15)",
         "unknown key; did you mean 'algorithm.kl'?"),
        ("kind: rl\n", "kind: rl\n    temperature: 1\n", "stages.1.temperature (line 15)",
         "unknown key; did you mean 'sampling.temperature' or 'eval.temperature'?"),
        ("lr: 2e-5", "lrr: 1, lr: 1", "stages.1.optimizer.lrr (line 26)", "unknown key; did you mean 'lr'?"),
        ("[3, 5]", "[3]", "stages.1.curriculum.1.difficulty.1 (line 25)", "missing, must be a number"),
        ("name: small", "name: a/b", "name (line 1)",
         "got 'a/b', must be letters, digits, '_', '-' and '.', starting with a letter or digit, at most 100 of them"),
        ("heldout: heldout", "held/out: heldout", "stages.1.eval.sets.held/out (line 27)",
         "the name 'held/out' must be letters, digits, '_' and '-', starting with a letter or digit, at most 100 of "
         "them"),
        ("{every_steps: 5}", "5", "checkpoint (line 28)",
         "got 5, must be a mapping with the keys every_steps, keep, asynchronous, timeout_s or null"),
    ],
)  # fmt: skip
def test_each_problem_says_where_what_and_what_is_allowed(tmp_path, old, new, path, message):
    assert problems(tmp_path, edit(old, new)) == {path: message}


def test_there_is_no_context_parallelism_to_ask_for(tmp_path):
    (found,) = problems(tmp_path, edit("sp: false}", "sp: false, cp: 2}")).items()
    assert found[0] == "layout.cp (line 3)" and found[1].startswith("unknown key")


def test_duplicate_keys_are_refused_with_both_lines():
    with pytest.raises(RecipeError) as caught:
        parse_document("a: 1\nb:\n  c: 1\n  c: 2\na: 3\n", source="r.yaml")
    assert str(caught.value).splitlines() == [
        "r.yaml:4: b.c is set twice, first on line 3; delete one",
        "r.yaml:5: a is set twice, first on line 1; delete one",
    ]


@pytest.mark.parametrize(
    ("text", "start", "words"),
    [
        ("a: [1, 2\nb: 3\n", "r.yaml:2: not readable as YAML", "','"),
        ("a: &x 1\n", "r.yaml:1: ", "anchors"),
        ("a: 1\nb: !!python/object/apply:os.system [ls]\n", "r.yaml:2: ", "not allowed"),
        ("1: a\n", "r.yaml:1: ", "a key must be text"),
        ("a: !!int x\n", "r.yaml:1: ", "not allowed"),
        ("a: 1\n---\nb: 1\n", "r.yaml:2: ", "document"),
        ("a: \x00\n", "r.yaml: not readable", "special characters"),
        ("[" * 20_000, "r.yaml: ", "nested too deeply"),
        ("a: {" * 20_000, "r.yaml: ", "nested too deeply"),
    ],
    ids=range(9),
)
def test_text_that_is_not_a_plain_yaml_document_is_refused_with_its_line(text, start, words):
    with pytest.raises(RecipeError) as caught:
        parse_document(text, source="r.yaml")
    assert str(caught.value).startswith(start) and words in str(caught.value)


@pytest.mark.parametrize("text", ["", "- a\n", "just text\n"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path, text):
    with pytest.raises(RecipeError, match="must be a mapping"):
        load(tmp_path, text)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(RecipeError, match=r"nowhere\.yaml: no such recipe file"):
        load_recipe(tmp_path / "nowhere.yaml")


def test_origins_tell_file_override_and_default_apart(tmp_path):
    overrides = ["stages.1.optimizer.lr=1e-6", "stages.1.eval={every: 3, sets: {a: b}}"]
    origins = load(tmp_path, overrides=overrides).origins
    assert origins["name"] == "file"
    assert origins["stages.0.optimizer.lr"] == "file"
    assert origins["stages.0.optimizer.eps"] == "default"
    assert origins["stages.1.optimizer.lr"] == "override"
    assert origins["stages.1.eval.sets.a"] == "override"
    assert origins["stages.1.eval.samples"] == "default"
    assert origins["stages.1.curriculum.1.difficulty"] == "file"


def test_the_resolved_recipe_loads_again_to_the_same_recipe(tmp_path):
    loaded = load(
        tmp_path, overrides=["model.hf_path='a: b # c'", "stages.1.curriculum=[]", "checkpoint=null"]
    )
    text = resolved_yaml(loaded)
    assert load(tmp_path, text).recipe == loaded.recipe
    assert "lr: 0.001  # file" in text
    assert "curriculum: []  # override" in text
    assert 'hf_path: "a: b # c"  # override' in text
    assert "eps: 1.0e-08  # default" in text


def test_a_value_left_open_must_be_given(tmp_path):
    text = edit("hf_path: model", "hf_path: '???'").replace("prompts: train.jsonl", "prompts: ???")
    found = problems(tmp_path, text)
    assert set(found) == {"model.hf_path (line 2)", "stages.1.prompts (line 15)"}
    assert "add model.hf_path=VALUE" in found["model.hf_path (line 2)"]
    loaded = load(tmp_path, text, ["model.hf_path=base", "stages.1.prompts=mine.jsonl"])
    assert loaded.recipe.model.hf_path == "base"


def test_a_star_stands_for_every_entry_that_has_what_follows(tmp_path):
    loaded = load(tmp_path, overrides=["stages.*.engine.tp=2", "stages.*.optimizer.lr=3e-6", "stages.1.engine.tp=1"])
    sft, rl = loaded.recipe.stages
    assert (sft.optimizer.lr, rl.optimizer.lr, rl.engine.tp) == (3e-6, 3e-6, 1)
    assert loaded.origins["stages.0.optimizer.lr"] == loaded.origins["stages.1.engine.tp"] == "override"
    curriculum = load(tmp_path, overrides=["stages.*.curriculum.*.iterations=7"]).recipe.stages[1].curriculum
    assert [window.iterations for window in curriculum] == [7] * len(curriculum)


@pytest.mark.parametrize(
    ("override", "path", "complaint"),
    [
        ("stages.*.engin.tp=2", "stages.*.engin.tp", "no entry of stages has such a key"),
        ("stages.*.engine.tpp=2", "stages.1.engine.tpp", "unknown key; did you mean 'tp'?"),
        ("layout.*=2", "layout.*", "unknown key; known here: tp"),
    ],
)
def test_a_star_that_stands_for_nothing_is_an_error(tmp_path, override, path, complaint):
    found = problems(tmp_path, overrides=[override])
    assert list(found) == [f"{path} (override)"]
    assert found[f"{path} (override)"].startswith(complaint)

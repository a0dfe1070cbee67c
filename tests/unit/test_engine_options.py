"""`engine.vllm` and `engine.routing` in a recipe: what vLLM would not take, and what another key sets."""

import importlib.util
import re
from dataclasses import fields

import pytest
from pydantic import BaseModel, PositiveInt

from megatron_rl.errors import RecipeError
from megatron_rl.recipe import vllm_options
from megatron_rl.recipe.load import load_recipe, resolved_yaml
from megatron_rl.recipe.resolve import check_recipe
from megatron_rl.recipe.stages import EngineConfig
from megatron_rl.recipe.summary import summary_table
from megatron_rl.recipe.types import _scalar
from megatron_rl.rollout import vllm_worker
from megatron_rl.rollout.engine_server import one_line
from tests.helpers.recipes import write_recipe

ENGINE = "stages.1.engine"


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return write_recipe(tmp_path)


def checked(recipe, *options):
    return check_recipe(load_recipe(recipe, [f"{ENGINE}.{option}" for option in options]), world_size=1)


def test_options_of_vllm_are_taken_one_by_one_or_together_and_shown(recipe):
    options = ["vllm.max_num_batched_tokens=8192", "vllm.cpu_offload_gb=2", "vllm.kv_cache_dtype=fp8"]
    loaded = load_recipe(recipe, [f"{ENGINE}.{option}" for option in options])
    check_recipe(loaded, world_size=1)
    assert loaded.recipe.stages[1].engine.vllm == {
        "max_num_batched_tokens": 8192,
        "cpu_offload_gb": 2,
        "kv_cache_dtype": "fp8",
    }
    assert "        max_num_batched_tokens: 8192  # override\n" in resolved_yaml(loaded)
    checked(recipe, "vllm={enable_prefix_caching: true}")


@pytest.mark.parametrize(
    ("option", "text"),
    [
        (
            "max_num_batch_tokens=8192",
            r"the installed vLLM has no such argument; did you mean 'max_num_batched_tokens'\?",
        ),
        ("max_num_batched_tokens=many", r"got 'many', vLLM takes int$"),
        ("max_num_batched_tokens=true", r"got true, vLLM takes int$"),
        ("enforce_eager=1", r"got 1, vLLM takes bool$"),
        ("cpu_offload_gb=two", r"got 'two', vLLM takes float$"),
        ("compilation_config={mode: 3}", r"got a mapping, must be a number, text, true or false$"),
        ("block_size=null", r"got null, must be a number, text, true or false$"),
    ],
)
def test_an_option_that_vllm_does_not_have_or_take_is_named(recipe, option, text):
    with pytest.raises(RecipeError, match=rf"(?m){ENGINE}\.vllm\.\w+ \(override\): {text}"):
        checked(recipe, f"vllm.{option}")


@pytest.mark.parametrize("name", sorted(vllm_options.OWNED))
def test_what_another_key_sets_is_refused_with_its_name(recipe, name):
    instead = vllm_options.OWNED[name]
    with pytest.raises(RecipeError) as error:
        checked(recipe, f"vllm.{name}=1")
    assert f"{ENGINE}.vllm.{name} (override): is not set here: {instead}" in str(error.value)


def test_refusals_name_arguments_that_vllm_has_and_keys_that_recipes_have():
    assert set(vllm_options.OWNED) <= set(vllm_options.vllm_options())
    keys = {field.name for field in fields(EngineConfig)}
    named = {word.strip(".,;") for text in vllm_options.OWNED.values() for word in text.split()}
    assert {word.removeprefix("engine.") for word in named if word.startswith("engine.")} <= keys


def test_arguments_are_read_from_the_installed_source_without_importing_it():
    known = vllm_options.vllm_options()
    assert known["max_num_batched_tokens"] == {int} and known["kv_cache_dtype"] is None
    assert known["cpu_offload_gb"] == {float} and len(known) > 100


def test_without_vllm_the_table_says_that_names_were_not_checked(recipe, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(vllm_options, "find_spec", lambda name: None if name == "vllm" else find(name))
    loaded = load_recipe(recipe, [f"{ENGINE}.vllm={{no_such_thing: 1, block_size: 32}}"])
    table = summary_table(loaded, check_recipe(loaded, world_size=1))
    assert "no_such_thing, block_size: not checked, vLLM is not installed here" in table
    with pytest.raises(RecipeError, match=r"is not set here: set run\.seed"):
        checked(recipe, "vllm.seed=1")


def test_a_vllm_without_its_arguments_where_they_are_looked_for_checks_nothing(tmp_path):
    (tmp_path / "arg_utils.py").write_text("class Other:\n    x: int = 1\n")
    assert vllm_options._read(tmp_path / "arg_utils.py") is None
    assert vllm_options._read(tmp_path / "nothing.py") is None


@pytest.mark.parametrize("value", [None, [1], {"a": 1}])
def test_only_scalars_are_options(value):
    with pytest.raises(ValueError, match="no scalar"):
        _scalar(value)


@pytest.mark.parametrize("options", [{"max_num_batched_tokens": -5, "block_size": 64}, {}])
def test_what_vllm_refuses_is_said_with_the_options_that_it_was_given(options, monkeypatch):
    class Scheduler(BaseModel):
        max_num_batched_tokens: PositiveInt

    def load(start):
        Scheduler(max_num_batched_tokens=-5)

    monkeypatch.setattr(vllm_worker, "_set_environment", lambda start: None)
    monkeypatch.setattr(vllm_worker, "_load_llm", load)
    with pytest.raises(Exception, match=r"greater than 0") as caught:
        vllm_worker.build_llm({"vllm": options})
    told = one_line(caught.value)
    assert "1 validation error for Scheduler: max_num_batched_tokens: Input should be greater than 0" in told
    assert "\n" not in told and "input_value" not in told
    given = "; vLLM was given engine.vllm: {max_num_batched_tokens: -5, block_size: 64}, correct or remove what it"
    assert (given in told) is bool(options)


def test_batches_that_depend_on_time_are_refused_where_the_same_bits_are_asked_for(recipe):
    with pytest.raises(
        RecipeError, match=r"engine\.routing \(override\): got least_loaded with run.deterministic: tr"
    ):
        checked(recipe, "routing=least_loaded")
    loaded = load_recipe(recipe, [f"{ENGINE}.routing=least_loaded", "run.deterministic=null"])
    check_recipe(loaded, world_size=1)


def test_the_table_says_which_replica_runs_on_which_host(recipe):
    loaded = load_recipe(recipe, [f"{ENGINE}.hosts=[localhost:1, localhost:2]", f"{ENGINE}.replicas=5"])
    table = summary_table(loaded, check_recipe(loaded, world_size=1))
    assert re.search(r"engine replicas +localhost:1: 0, 2, 4; localhost:2: 1, 3\n", table)

"""`engine.vllm` and `engine.routing` in a recipe: what vLLM would not take, and what another key sets."""

import importlib.util
import re
from dataclasses import MISSING, fields

import pytest
from pydantic import BaseModel, PositiveInt

from megatron_rl.errors import RecipeError
from megatron_rl.recipe import vllm_options
from megatron_rl.recipe.load import load_recipe, resolved_yaml
from megatron_rl.recipe.resolve import check_recipe
from megatron_rl.recipe.stages import EngineConfig
from megatron_rl.recipe.summary import summary_table
from megatron_rl.recipe.types import _scalar
from megatron_rl.recipe.vllm_source import Argument, read_arguments
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
        ("max_num_batched_tokens=many", r"got 'many', vLLM takes int at least 1$"),
        ("max_num_batched_tokens=true", r"got true, vLLM takes int at least 1$"),
        ("max_num_batched_tokens=0", r"got 0, vLLM takes int at least 1$"),
        ("block_size=-16", r"got -16, vLLM takes int above 0$"),
        ("enforce_eager=1", r"got 1, vLLM takes bool$"),
        ("cpu_offload_gb=two", r"got 'two', vLLM takes float at least 0$"),
        ("cpu_offload_gb=-1", r"got -1, vLLM takes float at least 0$"),
        ("watermark=.nan", r"got nan, vLLM takes float at least 0 and below 1$"),
        (
            "kv_cache_dtype=fp9",
            r"got 'fp9', vLLM takes one of auto, float16, bfloat16, fp8, .*; did you mean 'fp8'\?$",
        ),
        ("kv_cache_dtype=8", r"got 8, vLLM takes one of auto, "),
        ("attention_backend=flash_atn", r"got 'flash_atn', vLLM takes one of .* and \d+ more"),
        ("offload_backend=disk", r"got 'disk', vLLM takes one of auto, uva, prefetch$"),
        (
            "cudagraph_capture_sizes=8",
            r"got 8, vLLM takes lists or mappings alone, which cannot be given here; rem",
        ),
        (
            "kv_transfer_config=nixl",
            r"got 'nixl', vLLM takes lists or mappings alone, which cannot be given here; rem",
        ),
        ("optimization_level=9", r"got 9, vLLM takes one of 0, 1, 2, 3$"),
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
    assert known["cpu_offload_gb"] == Argument(types=frozenset({float}), bounds=(("at least", 0.0),))
    assert "fp8" in known["kv_cache_dtype"].choices and "FLASH_ATTN" in known["attention_backend"].names
    # a configuration of its own is vLLM's to read
    assert known["compilation_config"] == Argument()
    assert len(known) > 100 and sum(argument != Argument() for argument in known.values()) > 200


def test_what_is_read_of_an_argument_agrees_with_the_installed_vllm():
    """Every default that vLLM has is a value that it takes."""
    from vllm.engine.arg_utils import EngineArgs

    known = vllm_options.vllm_options()
    for field in fields(EngineArgs):
        if field.default is not MISSING and type(field.default) in (bool, int, float, str):
            assert known[field.name].takes(field.default), field.name


def test_without_vllm_the_table_says_that_names_were_not_checked(recipe, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(vllm_options, "find_spec", lambda name: None if name == "vllm" else find(name))
    loaded = load_recipe(recipe, [f"{ENGINE}.vllm={{no_such_thing: 1, block_size: 32}}"])
    table = summary_table(loaded, check_recipe(loaded, world_size=1))
    assert "no_such_thing, block_size: not checked, vLLM is not installed here" in table
    with pytest.raises(RecipeError, match=r"is not set here: set run\.seed"):
        checked(recipe, "vllm.seed=1")


def test_a_vllm_without_its_arguments_where_they_are_looked_for_checks_nothing(tmp_path):
    assert read_arguments(tmp_path / "nothing") is None
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "arg_utils.py").write_text("class Other:\n    x: int = 1\n")
    assert read_arguments(tmp_path) is None


def test_what_cannot_be_followed_is_left_to_vllm(tmp_path):
    (tmp_path / "engine").mkdir()
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "__init__.py").write_text("from vllm.config.a import C, Kind\n")
    (tmp_path / "config" / "a.py").write_text(
        "Kind = Literal['x', 3]\nLoop = Loop\nclass C:\n    n: int = Field(default=1, ge=LEAST, lt=9)\n"
    )
    (tmp_path / "engine" / "arg_utils.py").write_text(
        "from vllm.config import C, Kind\nfrom vllm.config.a import Loop\nfrom elsewhere import Other\n"
        "class EngineArgs:\n    n: int = C.n\n    kind: Kind | None = None\n    other: Other | int = 1\n"
        "    loop: Loop = 1\n    gone: Gone = C.gone\n    text: 'int' = 1\n"
    )
    known = read_arguments(tmp_path)
    assert (known["n"].takes(8), known["n"].takes(9), known["n"].takes(-1)) == (True, False, True)
    assert [known["kind"].takes(value) for value in ("x", 3, 3.0, True, "y")] == [
        True,
        True,
        False,
        False,
        False,
    ]
    assert {name for name, argument in known.items() if argument == Argument()} == {
        "other",
        "loop",
        "gone",
        "text",
    }


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

    monkeypatch.setattr(vllm_worker, "set_environment", lambda start: None)
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

"""`engine.hosts` in a recipe: how an address is written, and what does not fit together."""

import pytest

from megatron_rl.errors import RecipeError
from megatron_rl.recipe.hosts import HostPort, parse_host_port
from megatron_rl.recipe.load import load_recipe
from megatron_rl.recipe.origins import format_resolved
from megatron_rl.recipe.resolve import check_recipe
from megatron_rl.recipe.summary import summary_table
from tests.helpers.recipes import write_recipe

ENGINE = "stages.1.engine"


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return write_recipe(tmp_path)


@pytest.mark.parametrize(
    ("text", "host", "port", "is_loopback"),
    [
        ("10.0.0.7:7100", "10.0.0.7", 7100, False),
        ("node7.cluster:0", "node7.cluster", 0, False),
        ("127.0.0.2:1", "127.0.0.2", 1, True),
        ("localhost:7100", "localhost", 7100, True),
        ("[::1]:7100", "::1", 7100, True),
        ("[fe80::1]:65535", "fe80::1", 65535, False),
    ],
)
def test_addresses_read_back_as_they_are_written(text, host, port, is_loopback):
    address = parse_host_port(text)
    assert (address, str(address)) == (HostPort(host, port), text)
    assert address.is_loopback() is is_loopback


@pytest.mark.parametrize(
    "text",
    ["10.0.0.7", ":7100", "10.0.0.7:", "10.0.0.7:65536", "10.0.0.7:-1", "a:b:1", " a:1", "::1:7100", ""],
)
def test_what_is_no_address_is_refused(text):
    with pytest.raises(ValueError, match=r"must be HOST:PORT, such as 10\.0\.0\.7:7100"):
        parse_host_port(text)


@pytest.mark.parametrize(
    ("overrides", "path", "text"),
    [
        (["hosts=[10.0.0.7]"], "hosts.0", "got '10.0.0.7', must be HOST:PORT"),
        (["hosts=[localhost:0]"], "hosts.0", "got 'localhost:0', must name the port that"),
        (["hosts=[localhost:1, localhost:1]", "replicas=2"], "hosts.1", "localhost:1 is there twice"),
        (
            ["hosts=[localhost:1, localhost:2]"],
            "hosts",
            "has 2 hosts for 1 replicas, so that some would stay idle",
        ),
        (
            ["hosts=[10.0.0.7:7100]"],
            "hosts.0",
            "10.0.0.7:7100 is another machine, which asks for a secret; set",
        ),
        (["secret_file=model/config.json"], "secret_file", "is not used without hosts"),
        (["hosts=[10.0.0.7:7100]", "secret_file=no/such"], "secret_file", "no file no/such in"),
    ],
)
def test_hosts_that_do_not_fit_are_problems(recipe, overrides, path, text):
    with pytest.raises(RecipeError) as caught:
        check_recipe(load_recipe(recipe, [f"{ENGINE}.{each}" for each in overrides]), world_size=1)
    (line,) = str(caught.value).splitlines()[1:]
    assert line.strip().startswith(f"{ENGINE}.{path} ")
    assert f": {text}" in line


def test_hosts_that_train_may_have_no_engine(recipe):
    more = ["hosts=[localhost:1, localhost:2]", "colocated=true"]
    loaded = load_recipe(recipe, [f"{ENGINE}.{each}" for each in more])
    table = summary_table(loaded, check_recipe(loaded, world_size=1))
    assert "localhost:1: 0; localhost:2: none" in table


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (["engine.sleep=true", "engine.colocated=false"], "got false with sleep: true"),
        (
            ["engine.colocated=true", "overlap=one_step", "algorithm.correction.kind=token_tis"],
            "got true with overlap one_step",
        ),
    ],
)
def test_where_engines_are_must_fit_what_they_do(recipe, more, text):
    stage = ENGINE.removesuffix(".engine")
    with pytest.raises(RecipeError) as caught:
        check_recipe(load_recipe(recipe, [f"{stage}.{each}" for each in more]), world_size=1)
    (line,) = str(caught.value).splitlines()[1:]
    assert f"{ENGINE}.colocated " in line and text in line


def test_a_recipe_with_hosts_is_saved_as_it_can_be_read(recipe, tmp_path):
    (tmp_path / "secret").write_text("s" * 32)
    hosts = ["10.0.0.7:7100", "[fe80::1]:7100"]
    overrides = [f'{ENGINE}.hosts=["10.0.0.7:7100", "[fe80::1]:7100"]', f"{ENGINE}.replicas=4"]
    loaded = load_recipe(recipe, [*overrides, f"{ENGINE}.secret_file=secret"])
    check_recipe(loaded, world_size=1)
    saved = tmp_path / "saved.yaml"
    saved.write_text(format_resolved(loaded.recipe, loaded.origins))
    engine = load_recipe(saved, []).recipe.stages[1].engine
    assert (list(engine.hosts), engine.replicas, engine.secret_file) == (hosts, 4, "secret")

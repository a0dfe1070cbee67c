"""What `megatron-rl eval` refuses, in one line and before anything starts; and the arithmetic of YaRN."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_rl.cli import main
from megatron_rl.errors import ModelError
from megatron_rl.evaluation.options import named_file
from megatron_rl.model.spec import ModelSpec, RopeScaling
from megatron_rl.rollout.yarn import plan_yarn
from tests.helpers.engine import qwen2_spec

SPEC = qwen2_spec(tied=True)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A directory with the outline of a model, whose weights nobody can load, and a file of problems."""
    monkeypatch.chdir(tmp_path)
    model = Path("model")
    model.mkdir()
    config = {
        "architectures": ["Qwen2ForCausalLM"], "hidden_size": 64, "num_attention_heads": 2,
        "num_key_value_heads": 1, "num_hidden_layers": 2, "intermediate_size": 128, "vocab_size": 251,
        "max_position_embeddings": 512, "tie_word_embeddings": True, "dtype": "float32",
    }  # fmt: skip
    (model / "config.json").write_text(json.dumps(config))
    for name in ("model.safetensors", "tokenizer.json"):
        (model / name).touch()
    Path("p.jsonl").write_text('{"id": "a", "problem": "1+1", "answer": "2"}\n')
    return tmp_path


def refused(capsys, *options: str) -> str:
    """What stands on stderr; exit code 2."""
    command = ["eval", "--model", "model", "--data", "p.jsonl", "--n", "4", *options]
    try:
        code = main(command)
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert "Traceback" not in err
    return err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--n", "0"], "--n: got '0', must be a whole number of at least 1"),
        (["--pass-at", "1,8"], "--pass-at: got 8 with --n 4, must be at most --n"),
        (["--pass-at", "0"], "got '0', must be a whole number"),
        (["--model", "nowhere"], "--model nowhere: no such directory"),
        (["--data", "gone.jsonl"], "--data gone: no file gone.jsonl"),
        (["--data", "x y=p.jsonl"], "must be FILE or NAME=FILE"),
        (["--data", "p=other/p.jsonl"], "2 sets are named 'p'"),
        (["--out", "nowhere/r.json"], "--out nowhere/r.json: no directory nowhere"),
        (["--out", "model"], "--out model: is a directory"),
        (["--out", "r.json", "--samples-out", "r.json"], "are both r.json"),
        (["--temperature", "0"], "--temperature 0 draws the same sample every time"),
        (["--temperature", "-1"], "must be 0, which is greedy, or a number from 0.01 to 100"),
        (["--temperature", "nan"], "must be 0, which is greedy, or a number from 0.01 to 100"),
        (["--temperature", "0.001"], "must be 0, which is greedy, or a number from 0.01 to 100"),
        (["--seed", "-1"], "--seed: got '-1', must be a whole number from 0 to 4,294,967,295"),
        (["--request-timeout-s", "1e300"], "must be a number above 0 and at most 1,000,000"),
        (["--top-p", "0"], "must be a number above 0 and at most 1"),
        (["--top-p", "1.5"], "must be a number above 0 and at most 1"),
        (["--top-k", "0"], "must be a whole number of at least 1"),
        (["--since", "august"], "must be a day such as 2024-08-01"),
        (["--since", "2025-01-01", "--until", "2025-01-01"], "the window is empty"),
        (["--yarn", "1"], "must be a factor above 1"),
        (["--yarn-original", "256"], "--yarn-original: not used without --yarn"),
        (["--prompt-template", "solve"], "must hold {problem} once"),
        (["--reward", "format"], "invalid choice: 'format'"),
        (["--max-tokens", "500", "--max-prompt-tokens", "13"], "the model has 512 positions; lower one of them, or"),
        (["--yarn", "2", "--max-tokens", "1000", "--max-prompt-tokens", "25"], "the model has 1024 positions"),
        (["--yarn", "2", "--yarn-original", "1024"], "original positions 1024, must be 1 to"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_before_anything_starts(here, capsys, options, message):
    assert message in refused(capsys, *options)


def test_every_value_that_is_none_of_its_option_is_named_at_once(here, capsys):
    said = refused(capsys, "--n", "0", "--top-p", "2", "--reward", "format", "--since", "august")
    block = said[said.index("error: ") :].splitlines()
    assert block[0] == "error: 4 problems"
    assert [line.split()[1].rstrip(":") for line in block[1:]] == ["--n", "--top-p", "--reward", "--since"]


def test_all_that_is_wrong_with_options_model_and_data_is_named_at_once(here, capsys):
    config = json.loads((here / "model" / "config.json").read_text())
    (here / "model" / "config.json").write_text(json.dumps({**config, "dtype": "float16"}))
    options = ("--pass-at", "8", "--data", "gone.jsonl", "--out", "nowhere/r.json", "--max-tokens", "1000")
    first, *rest = refused(capsys, *options).splitlines()
    assert first == f"error: {len(rest)} problems"
    wanted = (
        "--pass-at: got 8", "--data gone: no file", "--out nowhere/r.json: no directory", "--max-tokens: 256 tokens",
        "--model model: dtype float16",
    )  # fmt: skip
    for start in wanted:
        assert sum(line.startswith(f"  {start}") for line in rest) == 1, rest
    # the fixture's tokenizer is an empty file
    assert len(rest) == len(wanted) + 1 and "tokenizer" in rest[-1]


@pytest.mark.parametrize("missing", [("model.safetensors", "tokenizer.json")])
def test_all_that_a_model_lacks_is_named_at_once(here, capsys, missing):
    for name in missing:
        (here / "model" / name).unlink()
    said = refused(capsys, "--yarn-original", "256").splitlines()
    assert said[0] == "error: 3 problems" and len(said) == 4


def test_a_run_directory_is_pointed_to_what_it_holds(here, capsys):
    run = here / "run"
    (run / "checkpoints").mkdir(parents=True)
    assert "tools/convert_checkpoint.py export run DIR" in refused(capsys, "--model", "run")
    (run / "model").mkdir()
    (run / "model" / "config.json").touch()
    assert "give run/model, its final weights" in refused(capsys, "--model", "run")


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("config.json", "no config.json there; give a Hugging Face directory"),
        ("model.safetensors", "no *.safetensors there"),
        ("tokenizer.json", "no tokenizer there, none of tokenizer.json"),
    ],
)
def test_a_model_that_lacks_something_is_refused_by_name(here, capsys, missing, message):
    (here / "model" / missing).unlink()
    assert message in refused(capsys)


def test_a_dtype_that_no_engine_of_ours_computes_in_is_refused(here, capsys):
    config = json.loads((here / "model" / "config.json").read_text())
    (here / "model" / "config.json").write_text(json.dumps({**config, "dtype": "float16"}))
    assert "dtype float16 of config.json, must be float32 or bfloat16; give --dtype" in refused(capsys)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("data/aime24.jsonl", "aime24"),
        ("hard=data/x=y.jsonl", "hard"),
        ("data/math 500.test.parquet", "math_500_test"),
    ],
)
def test_a_set_is_named_after_its_file_unless_it_is_given_a_name(text, name):
    assert named_file(text)[0] == name


def test_a_file_with_an_equals_sign_in_its_name_is_that_file(here):
    Path("a=b.jsonl").touch()
    assert named_file("a=b.jsonl") == ("a_b", Path("a=b.jsonl"))


def test_klears_64k_budget_is_32768_positions_times_two_and_a_half():
    """Qwen3-8B names 40960 positions, of which 32768 were trained on."""
    spec = replace(SPEC, max_positions=40960, rope_theta=1e6)
    yarn = plan_yarn(spec, factor=2.5, original_positions=32768)
    assert yarn.max_positions == 81920
    # a response of 65536 tokens and a prompt of 16384 fit exactly
    assert yarn.max_positions == 65536 + 16384
    assert yarn.overrides(spec) == {
        "max_position_embeddings": 81920,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 2.5,
            "original_max_position_embeddings": 32768,
        },
    }
    assert plan_yarn(replace(SPEC, max_positions=32768), factor=2.5).max_positions == 81920


def test_a_factor_that_is_no_binary_fraction_loses_no_position():
    assert plan_yarn(replace(SPEC, max_positions=1000), factor=1.1).max_positions == 1100


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        (replace(SPEC, rope_scaling=RopeScaling(factor=8.0)), {"factor": 2.0}, "rope_type is llama3 with factor 8"),
        (SPEC, {"factor": 1.0}, "must give more than the 512"),
        (SPEC, {"factor": 1.5, "original_positions": 256}, "must give more than the 512 .* above 2"),
        (SPEC, {"factor": 2.0, "original_positions": 513}, "original positions 513, must be 1 to"),
        (SPEC, {"factor": float("inf")}, "must give more"),
    ],
)  # fmt: skip
def test_yarn_is_refused_where_it_is_impossible_or_gains_nothing(spec, options, message):
    with pytest.raises(ModelError, match=message):
        plan_yarn(spec, **options)


def test_a_config_that_is_stretched_already_is_refused_by_its_reader(here):
    config = json.loads((here / "model" / "config.json").read_text())
    config["rope_scaling"] = {"rope_type": "yarn", "factor": 4.0}
    (here / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ModelError, match=r'rope_scaling\.rope_type: got "yarn", must be "default" or "llama3"'
    ):
        ModelSpec.from_hf(here / "model")

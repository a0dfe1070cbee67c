"""What a report must say to count as proof, and what is refused before anything starts."""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.errors import MegatronRLError
from tests.helpers.gguf_model import make_source

ROOT = Path(__file__).resolve().parents[2]

PERFECT = {
    "answers": [{"prompt": "what?", "transformers": "this", "before": "xx", "after": "this"}] * 3,
    "num_tokens": 40,
    "trainer_to_transformers": 1e-6,
    "scrambled_engine_gap": 9.0,
    "scrambled_answers_equal": 0,
    "engine_to_trainer": 2e-6,
    "engine_to_transformers": 2e-6,
    "answers_equal": 3,
    "sync_bytes": 1000,
    "sync_s": [0.5, 0.25],
    "step_moved": 0.4,
    "trained_engine_to_trainer": 2e-6,
    "peak_rss_mib": [100, 200],
    "seconds": {},
}
SAME = {"tensors": 20, "changed": [], "files": []}


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("prove_bridge", ROOT / "tools" / "prove_bridge.py")
    module = importlib.util.module_from_spec(spec)
    # dataclasses look their module up
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_source(tmp_path_factory.mktemp("model"))


def failed(tool, **changed):
    """Claims that do not hold once `changed` is, and what is printed."""
    report = {**PERFECT, **{key: value for key, value in changed.items() if key in PERFECT}}
    comparison = tool.Comparison(**{key: changed.get(key, value) for key, value in SAME.items()})
    checks = tool.checks_of(report, comparison, layout="tp3 x pp2", engine="vLLM tp1")
    return [check.claim for check in checks if not check.holds], tool.table(report, checks)


def test_a_report_without_fault_is_proof(tool):
    claims, text = failed(tool)
    assert claims == []
    assert text.endswith("verdict: proven")
    assert "'xx'" in text and "all 20" in text and "300 MiB" in text


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("trainer_to_transformers", 1e-3),
        ("trainer_to_transformers", math.nan),
        ("scrambled_engine_gap", 1e-3),
        ("scrambled_answers_equal", 1),
        ("engine_to_trainer", math.nan),
        ("engine_to_transformers", 1.0),
        ("answers_equal", 2),
        ("changed", ["model.norm.weight"]),
        ("tensors", 0),
        ("files", ["tokenizer.json"]),
        ("step_moved", 0.0),
        ("trained_engine_to_trainer", 0.3),
    ],
)
def test_each_fault_refutes_by_itself(tool, key, value):
    claims, text = failed(tool, **{key: value})
    assert len(claims) == 1
    assert text.endswith("verdict: refuted, 1 of 10 checks failed")


def test_scrambled_weights_that_give_no_numbers_are_far_enough_apart(tool):
    assert failed(tool, scrambled_engine_gap=math.nan)[0] == []


def test_a_scrambled_model_has_the_shapes_and_values_but_no_tensor_of_the_source(tool, model, tmp_path):
    tool.write_scrambled(model, tmp_path / "scrambled")
    before, after = (load_file(path / "model.safetensors") for path in (model, tmp_path / "scrambled"))
    assert {name: t.shape for name, t in before.items()} == {name: t.shape for name, t in after.items()}
    for name, tensor in before.items():
        assert torch.equal(tensor.flatten().sort().values, after[name].flatten().sort().values), name
        assert not torch.equal(tensor, after[name]), name


def test_a_model_is_the_same_as_itself_in_another_dtype_and_split_over_files(tool, model, tmp_path):
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(model / "model.safetensors").items()}
    for number, names in enumerate((list(tensors)[:9], list(tensors)[9:])):
        for copy, dtype in (("half", torch.bfloat16), ("whole", torch.float32)):
            (tmp_path / copy).mkdir(exist_ok=True)
            shutil.copyfile(model / "config.json", tmp_path / copy / "config.json")
            save_file({n: tensors[n].to(dtype) for n in names}, tmp_path / copy / f"{number}.safetensors")
    # what a tied checkpoint may repeat
    save_file({"lm_head.weight": torch.zeros(1)}, tmp_path / "half" / "head.safetensors")
    found = tool.compare(tmp_path / "half", tmp_path / "whole", tied=True)
    assert (found.tensors, found.changed, found.files) == (len(tensors), [], [])
    assert tool.compare(tmp_path / "half", tmp_path / "whole", tied=False).changed == ["lm_head.weight"]


def test_one_changed_bit_and_one_missing_tensor_are_named(tool, model, tmp_path):
    copy = Path(shutil.copytree(model, tmp_path / "copy"))
    tensors = load_file(copy / "model.safetensors")
    tensors["model.norm.weight"].view(torch.int32)[7] ^= 1
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, copy / "model.safetensors")
    wanted = ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"]
    assert tool.compare(model, copy, tied=True).changed == wanted
    assert tool.compare(copy, model, tied=True).changed == wanted


def test_files_are_compared_byte_by_byte_and_the_config_by_its_meaning(tool, model, tmp_path):
    source, copy = (Path(shutil.copytree(model, tmp_path / name)) for name in ("source", "copy"))
    for path in (source, copy):
        (path / "tokenizer.json").write_text("{}")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16", "rope_theta": 10000.0}))
    assert tool.changed_files(source, copy) == []
    (copy / "config.json").write_text(json.dumps({**config, "initializer_range": 0.5}))
    (copy / "tokenizer.json").write_text("{ }")
    (copy / "new.json").write_text("{}")
    assert tool.changed_files(source, copy) == ["config.json", "new.json", "tokenizer.json"]
    (copy / "tokenizer.json").unlink()
    assert "tokenizer.json" in tool.changed_files(source, copy)


def test_what_takes_too_long_ends_and_says_so(tool, tmp_path):
    began = time.monotonic()
    with pytest.raises(MegatronRLError, match=r"--timeout-s: not finished after 0\.2 s"), tool.deadline(0.2):
        time.sleep(30)
    assert time.monotonic() - began < 10
    with tool.deadline(0.2):
        pass
    time.sleep(0.3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tp", "2"], "layout.tp: got 2, which does not divide the model's 9 attention heads"),
        (["--pp", "3"], "4 layers"),
        (["--engine-tp", "2"], "engine.tp: got 2, which does not divide the model's 9 attention heads"),
        (["--keep", "."], "--keep: . exists already"),
    ],
    ids=["tp", "pp", "engine_tp", "keep"],
)
def test_what_cannot_work_is_refused_before_anything_starts(tool, model, capsys, options, message):
    assert tool.main([str(model), *options]) == tool.BROKEN
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_a_directory_without_a_model_or_its_weights_is_refused(tool, model, tmp_path, capsys):
    assert tool.main([str(tmp_path)]) == tool.BROKEN
    assert "config.json: no such file" in capsys.readouterr().err
    shutil.copyfile(model / "config.json", tmp_path / "config.json")
    assert tool.main([str(tmp_path)]) == tool.BROKEN
    assert f"{tmp_path}: holds no .safetensors file" in capsys.readouterr().err
    (tmp_path / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:-8])
    assert tool.main([str(tmp_path)]) == tool.BROKEN
    assert f"{tmp_path}: not complete safetensors files" in capsys.readouterr().err

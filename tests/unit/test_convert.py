"""HF directories to distributed checkpoints and back: the same bytes, self-contained, whole or not there."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.errors import CheckpointError, LayoutError, ModelError
from megatron_rl.model.checkpoint_files import read_state
from megatron_rl.model.compare import compare_models
from megatron_rl.model.convert import export_hf, import_hf, open_model
from megatron_rl.model.hf_export import HfWriter
from megatron_rl.model.hf_tables import hf_tensors
from megatron_rl.model.spec import ModelSpec
from tests.helpers.checkpoints import INDEX, read_index, rewrite, same_bytes, split, tensors_of
from tests.helpers.models import make_tiny_hf

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
# 251 rows are no multiple of the padding of any layout, 272 are one of tp 1 alone
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {"family": "qwen2"},
    "qwen2-tied": {"family": "qwen2", "tied": True, "kv_heads": 1},
    "qwen3": {"family": "qwen3", "vocab": 272},
    "llama": {"family": "llama", "tied": True, "rope_factor": 8.0},
    "moe": {"family": "qwen3_moe", "experts": 4},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for name, options in MODELS.items():
        make_tiny_hf(root / name, num_layers=2, **options)
    return root


@pytest.fixture
def hf(models: Path, tmp_path: Path) -> Path:
    """A directory of its own to bend."""
    return Path(shutil.copytree(models / "qwen2", tmp_path / "hf"))


@pytest.fixture
def tied(models: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(models / "qwen2-tied", tmp_path / "tied"))


def convert(checkpoint: Path, out: Path, **options: Any) -> Path:
    with open_model(checkpoint, hf_source=options.pop("hf_source", None)) as model:
        export_hf(model, out, **options)
    return out


def round_trip(hf: Path, scratch: Path, **options: Any) -> Path:
    import_hf(hf, scratch / "imported")
    return convert(scratch / "imported", scratch / "exported", **options)


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 2), (4, 1)])
@pytest.mark.parametrize("name", MODELS)
def test_import_then_export_gives_back_every_byte(
    models: Path, tmp_path: Path, name: str, tp: int, pp: int
) -> None:
    import_hf(models / name, tmp_path / "imported", tp=tp, pp=pp)
    files = sorted(path.name for path in (tmp_path / "imported" / "model").glob("*.distcp"))
    assert files == [f"__{rank}_0.distcp" for rank in range(tp * pp)]
    exported = convert(tmp_path / "imported", tmp_path / "exported")
    assert same_bytes(tensors_of(models / name), tensors_of(exported)) == []
    assert ModelSpec.from_hf(exported) == ModelSpec.from_hf(models / name)


def test_mixed_dtypes_in_several_files_keep_their_dtypes_and_bytes(hf: Path, tmp_path: Path) -> None:
    # one dtype per layer and projection: tensors that megatron-core fuses or stacks differ
    dtypes = (torch.bfloat16, torch.float32, torch.float16)
    before = {name: t.to(dtypes[i % 3]) for i, (name, t) in enumerate(tensors_of(hf).items())}
    rewrite(hf, before)
    split(hf, 3)
    exported = round_trip(hf, tmp_path, max_file_bytes=100_000)
    assert len(list(exported.glob("*.safetensors"))) > 2
    assert same_bytes(before, tensors_of(exported)) == []


def test_a_float32_router_stays_float32(models: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(models / "moe", tmp_path / "hf"))
    before = {
        name: tensor if name.endswith("mlp.gate.weight") else tensor.bfloat16()
        for name, tensor in tensors_of(source).items()
    }
    rewrite(source, before)
    after = tensors_of(round_trip(source, tmp_path))
    assert same_bytes(before, after) == []
    assert sorted(name for name, tensor in after.items() if tensor.dtype is torch.float32) == [
        f"model.layers.{i}.mlp.gate.weight" for i in range(2)
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_dtype_asked_for_is_that_of_every_tensor(hf: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    before = tensors_of(hf)
    rewrite(hf, {"model.norm.weight": before["model.norm.weight"].bfloat16()})
    exported = round_trip(hf, tmp_path, dtype=dtype)
    want = {name: tensor.to(dtype) for name, tensor in tensors_of(hf).items()}
    assert same_bytes(want, tensors_of(exported)) == []
    config = json.loads((exported / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == str(dtype).removeprefix("torch.")


def test_an_import_to_bfloat16_rounds_once(hf: Path, tmp_path: Path) -> None:
    import_hf(hf, tmp_path / "imported", dtype=torch.bfloat16)
    exported = convert(tmp_path / "imported", tmp_path / "exported")
    want = {name: tensor.bfloat16() for name, tensor in tensors_of(hf).items()}
    assert same_bytes(want, tensors_of(exported)) == []


def test_the_index_lists_what_the_files_hold(hf: Path, tmp_path: Path) -> None:
    exported = round_trip(hf, tmp_path, max_file_bytes=100_000)
    files = {path.name: set(tensors_of_file(path)) for path in exported.glob("*.safetensors")}
    index = json.loads((exported / INDEX).read_text())
    assert {name: file for file, names in files.items() for name in names} == index["weight_map"]
    held = tensors_of(exported)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in held.values())
    for path in exported.glob("*.safetensors"):
        assert sum(held[name].nbytes for name in files[path.name]) <= 100_000 or len(files[path.name]) == 1


def tensors_of_file(path: Path) -> list[str]:
    return [name for name, file in read_index(path.parent).items() if file == path.name]


def test_an_export_is_self_contained(hf: Path, tmp_path: Path) -> None:
    along = {
        "tokenizer.json": b'{"a": 1}',
        "tokenizer_config.json": b"{}",
        "tokenizer.model": b"\x00\xff",
        "merges.txt": b"a b\r\n",
        "vocab.json": b"{}",
        "special_tokens_map.json": b"{ }",
        "LICENSE": b"do",
        "chat_template.jinja": b"{{ messages }}\n",
        "additional_chat_templates/tool.jinja": b"{{ tools }}",
    }
    for name, content in along.items():
        (hf / name).parent.mkdir(exist_ok=True)
        (hf / name).write_bytes(content)
    for name in ("README.md", "pytorch_model.bin", "model.py", "old.safetensors.index.json"):
        (hf / name).write_bytes(b"not of the export")
    exported = round_trip(hf, tmp_path)
    found = {str(path.relative_to(exported)) for path in exported.rglob("*") if path.is_file()}
    assert found == {*along, "config.json", "generation_config.json", "model.safetensors"}
    for name in (*along, "generation_config.json"):
        assert (exported / name).read_bytes() == (hf / name).read_bytes()
    # the source is not needed any more
    shutil.rmtree(hf)
    shutil.rmtree(exported)
    convert(tmp_path / "imported", exported)
    assert (exported / "chat_template.jinja").read_bytes() == along["chat_template.jinja"]


ROPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # what the config says, and what transformers 5 must make of it
    "5, plain": ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, {"rope_theta": 1e6}),
    "4, plain": ({"rope_theta": 1000000}, {"rope_theta": 1e6}),
    "4, null scaling": ({"rope_theta": 5e5, "rope_scaling": None}, {"rope_theta": 5e5}),
    "4, llama3": (
        {
            "rope_theta": 5e5,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
        {"rope_theta": 5e5, "rope_type": "llama3", "factor": 8.0},
    ),
    "neither": ({}, {"rope_theta": 10000.0}),
}


@pytest.mark.parametrize("rope", ROPES)
def test_rotary_settings_survive_in_both_spellings(models: Path, tmp_path: Path, rope: str) -> None:
    from transformers import AutoConfig

    said, meant = ROPES[rope]
    source = Path(shutil.copytree(models / "llama", tmp_path / "hf"))
    config = json.loads((source / "config.json").read_text())
    original = {key: value for key, value in config.items() if not key.startswith("rope")} | said
    (source / "config.json").write_text(json.dumps(original))
    exported = round_trip(source, tmp_path)
    assert ModelSpec.from_hf(exported) == ModelSpec.from_hf(source)
    read = AutoConfig.from_pretrained(exported).rope_parameters
    assert {key: read[key] for key in meant} == meant
    assert read == AutoConfig.from_pretrained(source).rope_parameters
    written = json.loads((exported / "config.json").read_text())
    if said:
        assert written["rope_theta"] == written["rope_parameters"]["rope_theta"] == meant["rope_theta"]
        assert ("rope_scaling" in written and bool(written["rope_scaling"])) == ("rope_type" in meant)
    rope_keys = {"rope_theta", "rope_scaling", "rope_parameters", "dtype", "torch_dtype"}
    assert {k: v for k, v in written.items() if k not in rope_keys} == {
        k: v for k, v in original.items() if k not in rope_keys
    }


def test_positions_that_a_recipe_states_are_those_of_the_export_and_no_difference(
    models: Path, tmp_path: Path
) -> None:
    import_hf(models / "qwen2", tmp_path / "imported")
    with open_model(tmp_path / "imported") as model, open_model(models / "qwen2") as source:
        stated = dataclasses.replace(model.spec, max_positions=model.spec.max_positions + 128)
        longer = dataclasses.replace(model, spec=stated)
        export_hf(longer, tmp_path / "out")
        with open_model(tmp_path / "out") as exported:
            assert compare_models(longer, exported).is_same()
            (difference,) = compare_models(source, exported).config
    assert difference.startswith("max_position_embeddings: ")


def test_converting_does_without_megatron_core() -> None:
    code = "import sys, tools.convert_checkpoint; print(sorted(n for n in sys.modules if n.startswith('megatron.')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_a_config_that_needs_no_change_stays_as_it_is(hf: Path, tmp_path: Path) -> None:
    config = json.loads((hf / "config.json").read_text())
    config |= {"torch_dtype": "float32", "rope_theta": 10000.0}
    (hf / "config.json").write_text(json.dumps(config, indent=7))
    exported = round_trip(hf, tmp_path)
    assert (exported / "config.json").read_bytes() == (hf / "config.json").read_bytes()


def test_a_tied_head_that_repeats_the_embedding_is_left_out(tied: Path, tmp_path: Path) -> None:
    before = tensors_of(tied)
    rewrite(tied, {HEAD: before[EMBEDDING].clone()})
    assert same_bytes(before, tensors_of(round_trip(tied, tmp_path))) == []
    with open_model(tied) as a, open_model(tmp_path / "exported") as b:
        assert compare_models(a, b).is_same()


def test_a_tied_head_that_differs_is_refused(tied: Path, tmp_path: Path) -> None:
    head = tensors_of(tied)[EMBEDDING].clone()
    head[250, 63] += 1.0
    rewrite(tied, {HEAD: head})
    with pytest.raises(ModelError, match=r"tie_word_embeddings, but lm_head\.weight differs"):
        import_hf(tied, tmp_path / "out")
    with pytest.raises(ModelError, match=r"tie_word_embeddings, but lm_head\.weight differs"):
        convert(tied, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_file_that_was_written_anew_is_read_anew(hf: Path, tmp_path: Path) -> None:
    first = tensors_of(round_trip(hf, tmp_path))
    rewrite(hf, {"model.norm.weight": torch.arange(64.0)})
    import_hf(hf, tmp_path / "again")
    second = tensors_of(convert(tmp_path / "again", tmp_path / "anew"))
    assert same_bytes(first, second) == ["model.norm.weight"]
    assert torch.equal(second["model.norm.weight"], torch.arange(64.0))


def test_a_hf_directory_exports_to_another_dtype_directly(hf: Path, tmp_path: Path) -> None:
    want = {name: tensor.bfloat16() for name, tensor in tensors_of(hf).items()}
    assert same_bytes(want, tensors_of(convert(hf, tmp_path / "out", dtype=torch.bfloat16))) == []


def writer_of(hf: Path, out: Path) -> tuple[HfWriter, dict[str, torch.Tensor]]:
    spec, held = ModelSpec.from_hf(hf), tensors_of(hf)
    writer = HfWriter(
        spec,
        hf_source=hf,
        out_dir=out,
        dtypes=dict.fromkeys(hf_tensors(spec), torch.float32),
        max_file_bytes=100_000,
    )
    return writer, {name: held[name] for name in hf_tensors(spec)}


def test_an_exporter_that_drops_a_tensor_publishes_nothing(hf: Path, tmp_path: Path) -> None:
    writer, tensors = writer_of(hf, tmp_path / "out")
    dropped = "model.layers.1.mlp.up_proj.weight"
    for name, tensor in tensors.items():
        if name != dropped:
            writer.add(name, tensor)
    with pytest.raises(ModelError, match=f"1 of the model's {len(tensors)} tensors are missing.*{dropped}"):
        writer.finish()
    writer.discard()
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize("harm", ["gone", "cut short", "of another shape"])
def test_files_that_do_not_hold_what_was_added_are_noticed(hf: Path, tmp_path: Path, harm: str) -> None:
    writer, tensors = writer_of(hf, tmp_path / "out")
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    file = sorted(writer.partial.glob("*.safetensors"))[1]
    if harm == "gone":
        file.unlink()
    elif harm == "cut short":
        file.write_bytes(file.read_bytes()[:-1])
    else:
        file.write_bytes(
            file.read_bytes()
            .replace(b'"shape":[64,64]', b'"shape":[4096 ]')
            .replace(b'"shape":[96,64]', b'"shape":[64,96]')
        )
    with pytest.raises(ModelError):
        writer.finish()
    writer.discard()
    assert not (tmp_path / "out").exists()


def test_degrees_that_do_not_divide_the_model_are_refused(models: Path, tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match=r"--tp 3 --pp 1: .*4 attention heads; use 2 or 4"):
        import_hf(models / "qwen2", tmp_path / "out", tp=3)
    with pytest.raises(LayoutError, match=r"--tp 1 --pp 4: .*2 layers"):
        import_hf(models / "qwen2", tmp_path / "out", pp=4)
    assert list(tmp_path.iterdir()) == []


def test_the_model_that_a_checkpoint_was_imported_from_is_recorded(models: Path, tmp_path: Path) -> None:
    import_hf(models / "llama", tmp_path / "out")
    saved = read_state(tmp_path / "out")
    assert (saved.optimizer_steps, saved.progress) == (0, {"stage": 0, "step": 0})
    assert saved.model["vocab_size"] == 251 and saved.model["rope_scaling"] == {"factor": 8.0}
    with pytest.raises(CheckpointError, match=r"holds another model than .*qwen3"):
        convert(tmp_path / "out", tmp_path / "exported", hf_source=models / "qwen3")


def added_memory(action: Callable[[], Any]) -> int:
    """Bytes that `action` added to this process at its peak, mapped files included."""
    # resets the peak to what is resident now
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    action()
    return resident("VmHWM") - before


def resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def test_a_conversion_holds_a_tensor_at_a_time_and_not_the_model(tmp_path: Path) -> None:
    hf = make_tiny_hf(tmp_path / "hf", num_layers=24, hidden=256, ffn=4096, vocab=8192)
    size = (hf / "model.safetensors").stat().st_size
    largest = max(tensor.nbytes for tensor in tensors_of(hf).values())
    assert size > 20 * largest
    round_trip(hf, tmp_path / "first")
    (tmp_path / "second").mkdir()
    imported = added_memory(lambda: import_hf(hf, tmp_path / "second" / "imported"))
    exported = added_memory(
        lambda: convert(tmp_path / "second" / "imported", tmp_path / "second" / "exported")
    )
    # a tensor, a block where bytes cannot go straight to their place, and what the allocator keeps
    assert max(imported, exported) < size / 4, (imported, exported, size)

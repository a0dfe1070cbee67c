"""tools/convert_checkpoint.py: what it prints, when it says that two models are the same, and its exit codes."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.helpers.checkpoints import load_tool, rewrite, tensors_of
from tests.helpers.models import make_tiny_hf

TOOL = load_tool("convert_checkpoint")
GATE = "model.layers.1.mlp.gate_proj.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_tiny_hf(tmp_path_factory.mktemp("models") / "hf", num_layers=2, kv_heads=1)
    (path / "tokenizer.json").write_text("{}")
    return path


@pytest.fixture(scope="module")
def imported(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("imports") / "imported"
    assert TOOL.main(["import", str(model), str(out), "--tp", "4"]) == 0
    return out


@pytest.fixture
def copy(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "copy"))


def run(capsys: pytest.CaptureFixture[str], *args: str | Path) -> tuple[int, str]:
    """Exit code, and what was said."""
    code = TOOL.main([str(arg) for arg in args])
    said = capsys.readouterr()
    return code, said.out + said.err


@pytest.mark.parametrize("command", ["", "import", "export", "verify"])
def test_help_explains_each_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        TOOL.main([command, "--help"] if command else ["--help"])
    assert caught.value.code == 0
    said = capsys.readouterr().out
    words = {
        "": "examples:",
        "import": "--tp",
        "export": "--hf-source",
        "verify": "Exit code 0: the same model",
    }
    assert words[command] in said


def test_each_direction_says_what_it_wrote_and_how_to_go_on(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = run(capsys, "import", model, tmp_path / "imported", "--tp", "2", "--pp", "2")
    wrote = re.search(rf"wrote {tmp_path / 'imported'}: qwen2, 2 layers, 4 files, (\S+) KiB, ", said)
    assert code == 0 and wrote is not None and float(wrote[1]) > 1
    assert f"model.hf_path={tmp_path / 'imported' / 'hf'} model.checkpoint={tmp_path / 'imported'}\n" in said
    code, said = run(capsys, "export", tmp_path / "imported", tmp_path / "out", "--max-file-gb", "0.0001")
    files = len(list((tmp_path / "out").glob("*.safetensors")))
    assert code == 0 and files > 1 and f"wrote {tmp_path / 'out'}: qwen2, 2 layers, {files} files, " in said


def test_a_checkpoint_and_its_source_are_the_same(
    model: Path, imported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = run(capsys, "verify", model, imported)
    num_bytes = sum(tensor.nbytes for tensor in tensors_of(model).values())
    assert code == 0
    assert f"tensors  27 compared, {num_bytes:,} bytes: 27 the same byte for byte" in said
    assert "files    2 compared: 2 the same\nconfig   no differences\nverdict  the same model\n" in said


def one_element(copy: Path) -> str:
    gate = tensors_of(copy)[GATE].clone()
    gate[5, 7] += 0.25
    rewrite(copy, {GATE: gate})
    return f"{GATE}: 1 of 6144 elements differ, by up to 0.25"


def one_bit_of_a_zero(copy: Path) -> str:
    gate = tensors_of(copy)[GATE].clone()
    gate[0, 0] = -0.0
    rewrite(copy, {GATE: gate})
    return f"{GATE}: 1 of 6144 elements differ, by up to"


def one_tensor_less(copy: Path) -> str:
    rewrite(copy, {GATE: None})
    return f"{GATE}: only in A"


def one_tensor_more(copy: Path) -> str:
    rewrite(copy, {"model.extra.weight": torch.ones(3)})
    return "model.extra.weight: only in B"


def one_shape(copy: Path) -> str:
    rewrite(copy, {GATE: torch.ones(64, 96)})
    return f"{GATE}: shape [96, 64] in A, [64, 96] in B"


def one_dtype(copy: Path) -> str:
    # rounded first, so that only the dtype differs in the end
    rewrite(copy, {GATE: tensors_of(copy)[GATE].bfloat16()})
    return f"{GATE}: dtype float32 in A, bfloat16 in B"


def one_tokenizer(copy: Path) -> str:
    (copy / "tokenizer.json").write_text("{ }")
    return "tokenizer.json: differs"


def one_file_less(copy: Path) -> str:
    (copy / "generation_config.json").unlink()
    return "generation_config.json: not in B"


def change_config(copy: Path, **changes: object) -> None:
    config = json.loads((copy / "config.json").read_text()) | changes
    (copy / "config.json").write_text(json.dumps(config))


def one_token_id(copy: Path) -> str:
    change_config(copy, eos_token_id=2)
    return "eos_token_id: 1 in A, 2 in B"


def rotary_base(copy: Path) -> str:
    change_config(copy, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    return "rope_theta: 10000.0 in A, 1000000.0 in B"


CHANGES = (
    one_element,
    one_bit_of_a_zero,
    one_tensor_less,
    one_tensor_more,
    one_shape,
    one_dtype,
    one_tokenizer,
    one_file_less,
    one_token_id,
    rotary_base,
)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_any_change_makes_it_another_model(
    change: Callable[[Path], str], model: Path, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = change(copy)
    code, said = run(capsys, "verify", model, copy)
    assert code == 1 and told in said and said.endswith("verdict  NOT the same model\n")


def test_rounding_is_a_difference_unless_it_is_allowed(
    model: Path, imported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys, "export", imported, tmp_path / "out", "--dtype", "bfloat16")[0] == 0
    code, said = run(capsys, "verify", model, tmp_path / "out")
    assert (
        code == 1
        and "0 the same byte for byte, 27 after rounding, 0 different" in said
        and "and 15 more" in said
    )
    code, said = run(capsys, "verify", model, tmp_path / "out", "--allow-rounding")
    assert code == 0 and said.endswith("verdict  the same model\n")
    # rounding does not hide a change
    rewrite(tmp_path / "out", {GATE: tensors_of(tmp_path / "out")[GATE] * 1.01})
    code, said = run(capsys, "verify", model, tmp_path / "out", "--allow-rounding")
    assert code == 1 and f"{GATE}: dtype float32 in A, bfloat16 in B; 6144 of 6144 elements differ" in said


def test_logits_of_megatron_core_and_transformers_are_compared(
    model: Path, imported: Path, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = run(capsys, "verify", imported, model, "--logits", "--bound", "1e-4")
    assert (
        code == 0 and "logits   of 55 tokens differ by up to" in said and "within the bound of 0.0001" in said
    )
    rewrite(copy, {GATE: tensors_of(copy)[GATE].flip(0)})
    code, said = run(capsys, "verify", imported, copy, "--logits")
    assert code == 1 and "OVER the bound of 0.001" in said


def test_logits_that_are_no_numbers_are_over_every_bound(
    model: Path, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rewrite(copy, {"model.norm.weight": torch.full((64,), float("nan"))})
    code, said = run(capsys, "verify", model, copy, "--logits", "--bound", "1e9")
    assert code == 1 and "OVER the bound" in said


def test_an_export_is_proven_before_it_is_published(
    imported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = run(capsys, "export", imported, tmp_path / "out", "--dtype", "bfloat16", "--verify")
    assert code == 0 and "27 after rounding, 0 different" in said and "within the bound of 0.001" in said


def test_an_export_that_cannot_be_proven_is_not_published(
    copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rewrite(copy, {"model.norm.weight": torch.full((64,), float("nan"))})
    assert run(capsys, "import", copy, tmp_path / "imported")[0] == 0
    code, said = run(capsys, "export", tmp_path / "imported", tmp_path / "out", "--verify")
    assert code == 1 and "27 the same byte for byte" in said and "OVER the bound" in said
    assert (
        f"error: {tmp_path / 'imported'}: the export does not hold the same model; nothing was written"
        in said
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "imported"]


def test_mistakes_are_one_line_and_exit_code_two(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = run(capsys, "import", model, tmp_path / "out", "--tp", "3")
    assert code == 2 and said.startswith("error: --tp 3 --pp 1: ") and said.count("\n") == 1
    code, said = run(capsys, "verify", model, tmp_path / "nothing")
    assert code == 2 and said.startswith(f"error: {tmp_path / 'nothing'}: is neither a checkpoint")
    with pytest.raises(SystemExit) as caught:
        TOOL.main(["import", str(model), str(tmp_path / "out"), "--tp", "0"])
    assert caught.value.code == 2 and "must be a whole number of at least 1" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []

"""Conversions that cannot be done, or are cut off: one clear error, and nothing that looks complete."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megatron_rl.errors import CheckpointError, MegatronRLError, ModelError
from megatron_rl.model import checkpoint_files
from megatron_rl.model.convert import export_hf, import_hf, open_model
from tests.helpers.checkpoints import (
    load_tool,
    read_index,
    rewrite,
    same_bytes,
    split,
    tensors_of,
    write_index,
)
from tests.helpers.full_disk import files_limited_to
from tests.helpers.models import make_tiny_hf
from tests.helpers.readable import make_reachable

UP = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_hf(tmp_path_factory.mktemp("models") / "hf", num_layers=1)


@pytest.fixture(scope="module")
def imported(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    import_hf(model, out := tmp_path_factory.mktemp("imports") / "imported", tp=2)
    return out


@pytest.fixture
def hf(model: Path, tmp_path: Path) -> Path:
    """A directory of its own to harm."""
    return Path(shutil.copytree(model, tmp_path / "hf"))


@pytest.fixture
def checkpoint(imported: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(imported, tmp_path / "checkpoint"))


def export(checkpoint: Path, out: Path) -> None:
    with open_model(checkpoint) as opened:
        export_hf(opened, out)


def refused(action: Callable[[], Any], scratch: Path) -> str:
    """What the user is told; nothing may be left of what was not written."""
    before = sorted(scratch.iterdir())
    with pytest.raises(MegatronRLError) as caught:
        action()
    assert sorted(scratch.iterdir()) == before
    message = str(caught.value)
    assert "\n" not in message
    return message


def cut_inside_the_data(hf: Path) -> str:
    file = split(hf)[1]
    file.write_bytes(file.read_bytes()[:-1])
    return "model-00002-of-00002.safetensors: not a complete safetensors file"


def cut_inside_the_header(hf: Path) -> str:
    file = hf / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    return "model.safetensors: not a complete safetensors file"


def empty_file(hf: Path) -> str:
    (hf / "model.safetensors").write_bytes(b"")
    return "model.safetensors: not a complete safetensors file"


def intervals_that_overlap(hf: Path) -> str:
    header = {name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for name in ("a", "b")}
    text = json.dumps(header).encode()
    (hf / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    return "model.safetensors: not a complete safetensors file"


def name_twice_in_a_header(hf: Path) -> str:
    entry = '{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
    text = f'{{"a":{entry},"a":{entry}}}'.encode()
    (hf / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    return "a stands twice in the header"


def name_in_two_files(hf: Path) -> str:
    first, second = split(hf)
    name = next(name for name, file in read_index(hf).items() if file == first.name)
    held = {n: tensors_of(hf)[n] for n, file in read_index(hf).items() if file == second.name}
    save_file(held | {name: tensors_of_file(first)[name]}, second, metadata={"format": "pt"})
    return f"in two files: {name}"


def tensors_of_file(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return dict(load_file(path))


def ghost_in_the_index(hf: Path) -> str:
    split(hf)
    write_index(hf, read_index(hf) | {"model.ghost.weight": "model-00001-of-00002.safetensors"})
    return "in no file: model.ghost.weight"


def tensor_in_another_file(hf: Path) -> str:
    files = split(hf)
    index = read_index(hf)
    other = next(file.name for file in files if file.name != index[UP])
    write_index(hf, index | {UP: other})
    return f"in another file than the index says: {UP}"


def tensor_that_the_index_forgot(hf: Path) -> str:
    split(hf)
    write_index(hf, {name: file for name, file in read_index(hf).items() if name != UP})
    return f"not in the index: {UP}"


def file_that_is_not_there(hf: Path) -> str:
    split(hf)[1].unlink()
    return "index.json names model-00002-of-00002.safetensors, not there"


def file_of_another_directory(hf: Path) -> str:
    split(hf)
    write_index(hf, dict.fromkeys(read_index(hf), "../hf/model.safetensors"))
    return "'../hf/model.safetensors' is not the name of a file in this directory"


def single_file_beside_an_index(hf: Path) -> str:
    shutil.copyfile(hf / "model.safetensors", hf / "kept")
    split(hf)
    (hf / "kept").rename(hf / "model.safetensors")
    return "model.safetensors is there as well as model.safetensors.index.json"


def missing_and_unexpected(hf: Path) -> str:
    rewrite(hf, {UP: None, "model.layers.0.mlp.extra.weight": torch.ones(3)})
    return f"missing: {UP}; unexpected: model.layers.0.mlp.extra.weight"


def other_prefix(hf: Path) -> str:
    """No name is guessed: neither the layers nor the head may get lost on the way."""
    tensors = tensors_of(hf)
    rewrite(hf, dict.fromkeys(tensors) | {name.replace("model.", "lm."): t for name, t in tensors.items()})
    return "missing: model.embed_tokens.weight, model.layers.0"


def wrong_shape(hf: Path) -> str:
    rewrite(hf, {UP: torch.ones(64, 96)})
    return f"wrong shape: {UP} [64, 96], must be [96, 64]"


def quantised(hf: Path) -> str:
    rewrite(hf, {UP: torch.ones(96, 64).to(torch.int8)})
    return f"{UP}: dtype is I8, must be one of F64, F32, F16, BF16; use the unquantised checkpoint"


def pickled_only(hf: Path) -> str:
    (hf / "model.safetensors").rename(hf / "pytorch_model.bin")
    return "pickled weights are not read"


def config_of_another_model(hf: Path) -> str:
    change_config(hf, intermediate_size=128)
    return "config.json belongs to another model"


def change_config(hf: Path, **changes: Any) -> None:
    path = hf / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def unknown_architecture(hf: Path) -> str:
    change_config(hf, architectures=["GPT2LMHeadModel"])
    return 'config.json: architectures: got ["GPT2LMHeadModel"], must be one of'


def unsupported_rope(hf: Path) -> str:
    change_config(hf, rope_parameters={"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0})
    return 'config.json: rope_parameters.rope_type: got "yarn"'


def no_config(hf: Path) -> str:
    (hf / "config.json").unlink()
    return "config.json: no such file"


HARMED_SOURCES = (
    cut_inside_the_data,
    cut_inside_the_header,
    empty_file,
    intervals_that_overlap,
    name_twice_in_a_header,
    name_in_two_files,
    ghost_in_the_index,
    tensor_in_another_file,
    tensor_that_the_index_forgot,
    file_that_is_not_there,
    file_of_another_directory,
    single_file_beside_an_index,
    missing_and_unexpected,
    other_prefix,
    wrong_shape,
    quantised,
    pickled_only,
    config_of_another_model,
    unknown_architecture,
    unsupported_rope,
    no_config,
)


@pytest.mark.parametrize("harm", HARMED_SOURCES, ids=lambda harm: harm.__name__)
def test_a_harmed_hf_directory_is_refused(harm: Callable[[Path], str], hf: Path, tmp_path: Path) -> None:
    told = harm(hf)
    message = refused(lambda: import_hf(hf, tmp_path / "out"), tmp_path)
    assert str(hf) in message and told in message
    if harm is not no_config:
        # without a config it is no HF directory at all
        assert told in refused(lambda: export(hf, tmp_path / "out"), tmp_path)


def not_a_checkpoint(checkpoint: Path) -> str:
    shutil.rmtree(checkpoint)
    checkpoint.mkdir()
    return "checkpoint: is neither a checkpoint (state.json) nor a run directory with one (checkpoints/)"


def not_there(checkpoint: Path) -> str:
    shutil.rmtree(checkpoint)
    return "checkpoint: is neither a checkpoint (state.json) nor a run directory with one (checkpoints/)"


def not_finished(checkpoint: Path) -> str:
    (checkpoint / "state.json").unlink()
    return "holds no state.json, so it was not finished"


def tensors_not_there(checkpoint: Path) -> str:
    (checkpoint / "model" / "__1_0.distcp").unlink()
    return "model/__1_0.distcp: is not there"


def tensors_cut_short(checkpoint: Path) -> str:
    file = checkpoint / "model" / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])
    return "model/__0_0.distcp: has"


def tensors_garbled(checkpoint: Path) -> str:
    file = checkpoint / "model" / "__1_0.distcp"
    file.write_bytes(bytes(file.stat().st_size))
    return "model.embed_tokens.weight: cannot be read: __1_0.distcp holds no tensor at byte 0"


def metadata_garbled(checkpoint: Path) -> str:
    file = checkpoint / "model" / ".metadata"
    file.write_bytes(b"x" * file.stat().st_size)
    return "model/.metadata: cannot be read"


def state_garbled(checkpoint: Path) -> str:
    (checkpoint / "state.json").write_text("{")
    return "state.json: not a complete state of a checkpoint"


def metadata_of_another_model(checkpoint: Path) -> str:
    other = make_tiny_hf(checkpoint.parent / "other", family="qwen3", num_layers=2)
    import_hf(other, checkpoint.parent / "imported other", tp=2)
    for part in ("model", "state.json"):
        source = checkpoint.parent / "imported other" / part
        shutil.rmtree(checkpoint / part) if source.is_dir() else (checkpoint / part).unlink()
        source.rename(checkpoint / part)
    state = json.loads((checkpoint / "state.json").read_text())
    here = checkpoint / "hf"
    state["files"] = {n: s for n, s in state["files"].items() if not n.startswith("hf/")}
    state[checkpoint_files._OWN_DIGEST] = checkpoint_files._own_digest(state)
    (checkpoint / "state.json").write_text(json.dumps(state))
    return f"holds another model than {here}"


HARMED_CHECKPOINTS = (
    not_a_checkpoint,
    not_there,
    not_finished,
    tensors_not_there,
    tensors_cut_short,
    tensors_garbled,
    metadata_garbled,
    state_garbled,
    metadata_of_another_model,
)


@pytest.mark.parametrize("harm", HARMED_CHECKPOINTS, ids=lambda harm: harm.__name__)
def test_a_harmed_checkpoint_is_refused(
    harm: Callable[[Path], str], checkpoint: Path, tmp_path: Path
) -> None:
    told = harm(checkpoint)
    assert told in refused(lambda: export(checkpoint, tmp_path / "out"), tmp_path)


def test_a_bare_distributed_checkpoint_is_refused_for_its_own_tensors(
    checkpoint: Path, model: Path, tmp_path: Path
) -> None:
    """One that megatron-core alone wrote has no state.json that would notice."""
    bare = checkpoint / "model"
    assert "pass --hf-source" in refused(lambda: export(bare, tmp_path / "out"), tmp_path)
    file = bare / "__1_0.distcp"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    told = refused(lambda: export_from(bare, model, tmp_path / "out"), tmp_path)
    assert f"model/__1_0.distcp: has {len(whole) - 1} bytes, must have at least {len(whole)}" in told
    file.write_bytes(whole)
    fewer = make_tiny_hf(tmp_path / "fewer", num_layers=1, ffn=64, family="qwen3")
    told = refused(lambda: export_from(bare, fewer, tmp_path / "out"), tmp_path)
    assert "missing: decoder.layers.self_attention.k_layernorm.weight" in told
    assert "unexpected: decoder.layers.self_attention.linear_qkv.bias" in told
    assert "wrong shape: decoder.layers.mlp.linear_fc1.weight [1, 192, 64], must be [1, 128, 64]" in told
    export_from(bare, model, tmp_path / "out")
    assert same_bytes(tensors_of(model), tensors_of(tmp_path / "out")) == []


def export_from(bare: Path, hf: Path, out: Path) -> None:
    with open_model(bare, hf_source=hf) as opened:
        export_hf(opened, out)


def test_a_part_that_no_file_holds_is_named(checkpoint: Path, model: Path, tmp_path: Path) -> None:
    from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
    from torch.distributed.checkpoint.storage import WriteResult

    metadata = FileSystemReader(checkpoint / "model").read_metadata()
    key = "decoder.layers.mlp.linear_fc2.weight"
    metadata.state_dict_metadata[key].chunks.pop()
    results = [
        WriteResult(index=i, size_in_bytes=0, storage_data=s) for i, s in metadata.storage_data.items()
    ]
    FileSystemWriter(checkpoint / "model").finish(metadata, [results])
    told = refused(lambda: export_from(checkpoint / "model", model, tmp_path / "out"), tmp_path)
    assert "model.layers.0.mlp.down_proj.weight: 3072 of 6144 elements are not there" in told


@pytest.mark.parametrize("kind", ["directory", "file"])
def test_an_output_that_exists_stays_as_it_is(hf: Path, checkpoint: Path, tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out"
    if kind == "directory":
        out.mkdir()
        (out / "mine").write_text("keep")
    else:
        out.write_text("keep")
    for action in (lambda: import_hf(hf, out), lambda: export(checkpoint, out)):
        assert f"{out}: exists already" in refused(action, tmp_path)
    assert ((out / "mine") if kind == "directory" else out).read_text() == "keep"


def test_an_empty_output_directory_is_filled(hf: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    import_hf(hf, tmp_path / "out")
    (tmp_path / "exported").mkdir()
    export(tmp_path / "out", tmp_path / "exported")
    assert same_bytes(tensors_of(hf), tensors_of(tmp_path / "exported")) == []


@pytest.mark.parametrize("room", [100, 50_000], ids=["for nothing", "for less than a file"])
@pytest.mark.parametrize("direction", ["import", "export"])
def test_a_full_disk_is_one_error_and_leaves_nothing(
    hf: Path, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], direction: str, room: int
) -> None:
    tool = load_tool("convert_checkpoint")
    before = sorted(tmp_path.iterdir())
    source = hf if direction == "import" else checkpoint
    with files_limited_to(room):
        assert tool.main([direction, str(source), str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"error: {tmp_path}") and "is there room" in told and told.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before


def in_a_child(action: Callable[[], int]) -> int:
    """Exit code, or minus the signal, of `action` in a forked process."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        code = 99
        try:
            code = action()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("direction", ["import", "export"])
def test_a_directory_that_may_not_be_written_is_one_error(
    hf: Path, checkpoint: Path, tmp_path: Path, direction: str
) -> None:
    tool, told = load_tool("convert_checkpoint"), tmp_path / "told"
    told.touch(0o666)
    told.chmod(0o666)
    closed = tmp_path / "closed"
    closed.mkdir(0o555)
    for path in (*hf.rglob("*"), *checkpoint.rglob("*")):
        path.chmod(0o755)
    make_reachable(tmp_path)
    source = hf if direction == "import" else checkpoint

    def act() -> int:
        if os.geteuid() == 0:
            # root may write anywhere
            os.setgid(65534)
            os.setuid(65534)
        with told.open("w") as stream:
            os.dup2(stream.fileno(), 2)
            sys.stderr = stream
            return int(tool.main([direction, str(source), str(closed / "out")]))

    assert in_a_child(act) == 2
    assert told.read_text().startswith(f"error: {closed}") and "Permission denied" in told.read_text()
    assert list(closed.iterdir()) == []


def killed_at(number: int, action: Callable[[], Any], root: Path) -> int:
    """Run `action` in a process that is killed at its `number`th access to the file system below `root`."""

    def act() -> int:
        left = number

        def hook(event: str, args: tuple[Any, ...]) -> None:
            nonlocal left
            if event in ("open", "os.rename", "os.mkdir", "os.remove", "shutil.copyfile") and any(
                isinstance(arg, str | Path) and str(arg).startswith(str(root)) for arg in args
            ):
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        action()
        return 0

    return in_a_child(act)


@pytest.mark.parametrize("direction", ["import", "export"])
def test_a_kill_at_any_moment_leaves_all_or_nothing(
    hf: Path, imported: Path, tmp_path: Path, direction: str
) -> None:
    from transformers import AutoModelForCausalLM

    root, out = tmp_path / "outputs", tmp_path / "outputs" / "out"
    root.mkdir()
    action = (lambda: import_hf(hf, out)) if direction == "import" else (lambda: export(imported, out))
    kills = complete = 0
    while killed_at(kills + 1, action, root) == -signal.SIGKILL:
        kills += 1
        if out.exists():
            # renamed already: what followed were waits for the disk
            assert is_complete(out, hf, tmp_path / f"check {kills}", direction)
            shutil.rmtree(out)
            continue
        for left in root.iterdir():
            assert left.name.startswith(".")
            if (left / ("state.json" if direction == "import" else "config.json")).is_file():
                # its last file, and all but the rename is done
                complete += is_complete(left, hf, tmp_path / f"check {kills}", direction)
            elif direction == "import":
                with pytest.raises(CheckpointError):
                    open_model(left).__enter__()
            else:
                with pytest.raises((OSError, ValueError)):
                    AutoModelForCausalLM.from_pretrained(left)
    # copies, tensors, config, syncs, and one rename
    assert kills > 10
    assert complete >= 1
    assert is_complete(out, hf, tmp_path / "check", direction)
    assert [path.name for path in root.iterdir()] == ["out"]


def is_complete(out: Path, hf: Path, scratch: Path, direction: str) -> bool:
    """Whether a directory that says it is complete holds every byte; False where its last file is not whole."""
    if direction == "import":
        try:
            export(out, scratch)
        except CheckpointError as error:
            assert "state.json: not a complete state" in str(error)
            return False
    elif not (out / "config.json").read_bytes():
        return False
    assert same_bytes(tensors_of(hf), tensors_of(scratch if direction == "import" else out)) == []
    return True


def test_an_interrupted_conversion_leaves_nothing(hf: Path, imported: Path, tmp_path: Path) -> None:
    def interrupt(_: Path) -> None:
        raise KeyboardInterrupt

    before = sorted(tmp_path.iterdir())
    with open_model(imported) as opened, pytest.raises(KeyboardInterrupt):
        export_hf(opened, tmp_path / "out", check=interrupt)
    assert sorted(tmp_path.iterdir()) == before


def test_a_check_that_fails_keeps_the_export_from_being_published(imported: Path, tmp_path: Path) -> None:
    seen: list[list[str]] = []

    def check(path: Path) -> None:
        seen.append(sorted(entry.name for entry in path.iterdir()))
        raise ModelError("not the same")

    with open_model(imported) as opened, pytest.raises(ModelError, match="not the same"):
        export_hf(opened, tmp_path / "out", check=check)
    assert seen == [["config.json", "generation_config.json", "model.safetensors"]]
    assert list(tmp_path.iterdir()) == []

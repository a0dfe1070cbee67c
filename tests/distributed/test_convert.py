"""Checkpoints that real runs save, exported in one process; imports that real runs and megatron-core itself load."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_rl.errors import CheckpointError
from megatron_rl.model.checkpoint_files import find_checkpoint
from megatron_rl.model.compare import compare_models
from megatron_rl.model.convert import export_hf, import_hf, open_model
from megatron_rl.model.spec import ModelSpec
from megatron_rl.parallel.layout import ParallelLayout
from tests.helpers.checkpoints import ROOT, load_tool, same_bytes, tensors_of
from tests.helpers.distributed import run_distributed
from tests.helpers.models import make_tiny_hf
from tests.helpers.training import SAVED_AT, Run, Session

WORLD_SIZE = 4
# 251 and 261 rows need padding, and 261 another one at tp 1, 2 and 4
MODELS: dict[str, dict[str, Any]] = {
    "qwen2-tied": {"family": "qwen2", "tied": True},
    "qwen3-onekv": {"family": "qwen3", "kv_heads": 1, "vocab": 261},
    "llama": {"family": "llama", "tied": True, "rope_factor": 8.0},
    "moe": {"family": "qwen3_moe", "vocab": 261},
}
RUNS: dict[str, dict[str, Any]] = {
    "qwen2-tied": {"tp": 2, "pp": 2},
    "qwen3-onekv": {"tp": 4, "dtype": "bfloat16"},
    "llama": {"pp": 2, "vpp": 2, "dtype": "bfloat16"},
    "moe": {"tp": 2, "sp": True, "ep": 2},
}
# (model, tp and pp of the import, layout that loads it)
LOADS: list[tuple[str, tuple[int, int], dict[str, Any]]] = [
    ("qwen2-tied", (4, 1), {"pp": 2, "vpp": 2}),
    ("qwen3-onekv", (1, 1), {"tp": 4}),
    ("qwen3-onekv", (2, 2), {"tp": 2, "sp": True}),
    ("moe", (2, 2), {"ep": 4}),
    ("moe", (1, 1), {"tp": 2, "sp": True, "pp": 2}),
]


def work(rank: int, world_size: int, root: Path) -> dict[str, Any]:
    """One world for everything: starting processes is what costs time here."""
    from megatron_rl.parallel import groups

    groups.init_process_groups(
        ParallelLayout(dp=world_size),
        rank=rank,
        world_size=world_size,
        master_addr="127.0.0.1",
        master_port=int(os.environ["MASTER_PORT"]),
        timeout_s=120,
    )
    seen: dict[str, Any] = {}
    for name, options in RUNS.items():
        run = Run(hf_path=str(root / name), root=str(root / f"run {name}" / "checkpoints"), **options)
        here = session(run, rank, world_size)
        here.start_stage()
        here.train(0, 1)
        here.store.save(here.policy, SAVED_AT)
        here.policy.save_hf(str(root / f"saved {name}"), hf_source=str(root / name))
    for number, (name, _, options) in enumerate(LOADS):
        run = Run(hf_path=str(root / name), root=str(root / "unused"), **options)
        seen[str(number)] = load_both(session(run, rank, world_size), root / f"import {number}")
    plain = session(Run(hf_path=str(root / "moe"), root=str(root / "unused"), pp=2), rank, world_size)
    seen["plain"] = load_plainly(plain, root / "import 3" / "model")
    seen["other"] = load_another_model(plain, root / "import 0")
    save_megatron_cores_own_model(root / "qwen3-onekv", root / "of megatron-core", rank, world_size)
    groups.destroy_process_groups()
    return seen


def session(run: Run, rank: int, world_size: int) -> Session:
    from megatron_rl.parallel import groups

    groups.destroy_model_groups()
    layout = ParallelLayout.for_world(
        tp=run.tp, pp=run.pp, vpp=run.vpp, sp=run.sp, ep=run.ep, world_size=world_size
    )
    groups.build_model_groups(layout, timeout_s=120)
    return Session(run, rank, world_size)


def load_both(here: Session, imported: Path) -> tuple[str, str]:
    """Digests of this rank's weights from the HF directory and from the imported checkpoint."""
    from_hf = here.digest()
    poison(here)
    assert here.digest() != from_hf
    here.store.load_model(here.policy, find_checkpoint(imported))
    return from_hf, here.digest()


def poison(here: Session) -> None:
    for chunk in here.policy.named_params():
        for param in chunk.values():
            param.fill_(float("nan"))


def load_plainly(here: Session, directory: Path) -> tuple[str, str]:
    """As anybody would with megatron-core alone, without a line of ours that reads."""
    from megatron.core import dist_checkpointing

    from_hf = here.digest()
    poison(here)
    (chunk,) = here.policy.chunks
    loaded = dist_checkpointing.load({"model": chunk.sharded_state_dict()}, str(directory))
    chunk.load_state_dict(loaded["model"])
    return from_hf, here.digest()


def save_megatron_cores_own_model(hf: Path, out: Path, rank: int, world_size: int) -> None:
    """A model of megatron-core's own layer spec, whose checkpoints name the norms in another way."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    from megatron_rl.model.build import transformer_config
    from megatron_rl.model.hf_io import load_hf
    from megatron_rl.model.hf_tables import padded_vocab
    from megatron_rl.parallel import groups

    groups.destroy_model_groups()
    layout = ParallelLayout(tp=2, dp=world_size // 2)
    groups.build_model_groups(layout, timeout_s=120)
    spec = ModelSpec.from_hf(hf)
    model = GPTModel(
        transformer_config(spec, layout, dtype=torch.float32, kind="local"),
        get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm"),
        vocab_size=padded_vocab(spec.vocab_size, layout.tp),
        max_sequence_length=64,
        position_embedding_type="rope",
    )
    load_hf([model], spec, layout, hf_path=hf, rank=rank)
    if rank == 0:
        out.mkdir()
    dist.barrier()
    save_by_torch({"model": model.sharded_state_dict()}, out, is_driver=rank == 0)


def save_by_torch(state: dict[str, Any], out: Path, *, is_driver: bool) -> None:
    """As megatron-core saves, but by torch's writer in this process, which may start none."""
    import torch.distributed.checkpoint as torch_checkpoint
    from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import is_main_replica
    from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
    from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner, mcore_to_pyt_state_dict

    sharded, common = save_preprocess(state)
    shards: dict[str, list[Any]] = defaultdict(list)
    for shard in nested_values(sharded):
        if is_main_replica(shard.replica_id):
            shards[getattr(shard, "unique_key", shard.key)].append(shard)
    torch_checkpoint.save(
        mcore_to_pyt_state_dict(dict(shards)),
        storage_writer=torch_checkpoint.FileSystemWriter(out),
        planner=MCoreSavePlanner(flatten_state_dict=False),
    )
    if is_driver:
        torch.save(common, out / "common.pt")
        save_config(CheckpointingConfig("torch_dist", 1), str(out))


def load_another_model(here: Session, imported: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        here.store.load_model(here.policy, find_checkpoint(imported))
    dist.barrier()
    return str(caught.value)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("convert")
    for name, options in MODELS.items():
        make_tiny_hf(root / name, **options)
    for number, (name, (tp, pp), _) in enumerate(LOADS):
        import_hf(root / name, root / f"import {number}", tp=tp, pp=pp)
    return root


@pytest.fixture(scope="module")
def ranks(root: Path) -> list[dict[str, Any]]:
    return run_distributed(work, WORLD_SIZE, root, timeout_s=280)


@pytest.mark.parametrize("name", RUNS)
def test_an_export_of_a_runs_checkpoint_is_what_the_run_itself_exports(
    name: str, root: Path, ranks: list[dict[str, Any]]
) -> None:
    out = root / f"exported {name}"
    with open_model(root / f"run {name}", hf_source=root / name) as model:
        export_hf(model, out)
    saved = tensors_of(root / f"saved {name}")
    assert same_bytes(saved, tensors_of(out)) == []
    dtype = torch.bfloat16 if "dtype" in RUNS[name] else torch.float32
    assert {tensor.dtype for tensor in saved.values()} == {dtype}
    original = tensors_of(root / name)
    # it learned: these are not the weights that it began with
    assert all(not torch.equal(saved[key].float(), original[key]) for key in saved if "norm" not in key)
    with open_model(out) as a, open_model(root / f"saved {name}") as b:
        assert compare_models(a, b).is_same()


@pytest.mark.parametrize(
    "number", range(len(LOADS)), ids=lambda i: f"{LOADS[i][0]}-{LOADS[i][1]}-{LOADS[i][2]}"
)
def test_any_layout_loads_an_import_as_it_loads_the_hf_directory(
    number: int, ranks: list[dict[str, Any]]
) -> None:
    digests = [rank[str(number)] for rank in ranks]
    assert all(from_hf == from_import for from_hf, from_import in digests)


def test_megatron_core_alone_loads_an_import(ranks: list[dict[str, Any]]) -> None:
    assert all(from_hf == from_import for from_hf, from_import in (rank["plain"] for rank in ranks))


def test_a_checkpoint_of_megatron_cores_own_layers_is_exported(
    root: Path, ranks: list[dict[str, Any]]
) -> None:
    del ranks
    with open_model(root / "of megatron-core", hf_source=root / "qwen3-onekv") as model:
        export_hf(model, root / "from megatron-core")
    assert same_bytes(tensors_of(root / "qwen3-onekv"), tensors_of(root / "from megatron-core")) == []


def test_an_import_of_another_model_is_refused_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert 'holds another model than model.hf_path (family: was "qwen2", is "qwen3_moe"' in rank["other"]


def test_the_tool_proves_an_export_by_the_logits_of_megatron_core(
    root: Path, ranks: list[dict[str, Any]], capfd: pytest.CaptureFixture[str]
) -> None:
    """In a process of its own: it makes process groups."""
    del ranks  # the run must have been saved
    out, source = root / "proven", root / "qwen3-onekv"
    command = [
        sys.executable,
        "tools/convert_checkpoint.py",
        "export",
        str(root / "run qwen3-onekv"),
        str(out),
    ]
    command += ["--hf-source", str(source), "--verify", "--bound", "1e-4"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250, env=environment())
    assert done.returncode == 0, done.stderr
    assert "47 the same byte for byte, 0 after rounding, 0 different" in done.stdout
    assert "within the bound of 0.0001" in done.stdout
    tool = load_tool("convert_checkpoint")
    assert tool.main(["verify", str(out), str(root / "saved qwen3-onekv"), "--logits"]) == 0


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def test_a_run_is_found_by_its_directory_its_checkpoints_or_one_of_them(
    root: Path, ranks: list[dict[str, Any]]
) -> None:
    del ranks
    run = root / "run llama"
    name = f"stage_{SAVED_AT['stage']}_step_{SAVED_AT['step']:06d}"
    for path in (run, run / "checkpoints", run / "checkpoints" / name):
        assert find_checkpoint(path).path == run / "checkpoints" / name


def test_runs_of_each_layout_were_saved(root: Path, ranks: list[dict[str, Any]]) -> None:
    """The exports above prove something only if the checkpoints were cut as the layouts say."""
    del ranks
    for name, options in RUNS.items():
        layout = replace(Run(hf_path="", root=""), **options)
        (model,) = (root / f"run {name}").glob("checkpoints/*/model")
        writers = len(list(model.glob("*.distcp")))
        assert writers >= layout.tp * layout.pp * layout.ep, name

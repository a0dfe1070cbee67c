"""Models as files, converted in one process and a tensor at a time: no process group, no model in memory.

import_hf    HF directory -> OUT/{state.json, model/, hf/}, a checkpoint that any layout starts from; `hf/` holds
             what goes with the weights: config, tokenizer, templates
export_hf    that, or a run's checkpoint saved in any layout, or a HF directory -> HF directory
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from importlib.metadata import version
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from megatron_rl.errors import CheckpointError, LayoutError, ModelError
from megatron_rl.model.checkpoint_files import (
    MODEL_DIR,
    SavedState,
    find_checkpoint,
    inventory,
    write_state,
)
from megatron_rl.model.checkpoint_match import check_same_model, flat_spec
from megatron_rl.model.dist_read import METADATA_FILE, open_distributed
from megatron_rl.model.dist_tables import places
from megatron_rl.model.dist_write import write_distributed
from megatron_rl.model.hf_export import CONFIG_FILE, MAX_FILE_BYTES, HfWriter, copy_side_files
from megatron_rl.model.hf_files import HfCheckpoint, check_redundant_head, check_tensors, open_checkpoint
from megatron_rl.model.hf_tables import hf_tensors
from megatron_rl.model.new_directory import NewDirectory
from megatron_rl.model.spec import ModelSpec
from megatron_rl.model.tensor_files import Scratch
from megatron_rl.parallel.layout import ParallelLayout

HF_DIR = "hf"
_HEAD_ROWS = 4096  # of a redundant head that are compared at once
# where an import counts from: no stage has begun
_START = {"stage": 0, "step": 0}


class Tensors(Protocol):
    """The HF tensors of something on disk."""

    def names(self) -> set[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> torch.dtype: ...

    def read_into(self, name: str, out: Tensor) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenModel:
    """A model on disk: its tensors, and the HF directory with its config and tokenizer."""

    path: Path
    spec: ModelSpec
    tensors: Tensors
    hf_files: Path
    sharded: Path | None  # directory of the distributed checkpoint; None for a HF directory


@contextmanager
def open_model(path: Path, *, hf_source: Path | None = None) -> Iterator[OpenModel]:
    """Open a HF directory, an imported checkpoint, a checkpoint of a run, or a run (its latest checkpoint).

    `hf_source` replaces the HF directory that a checkpoint names; one that megatron-core alone wrote names none. Raises
    ModelError and CheckpointError for what is incomplete, and for a HF directory of another model.
    """
    if (path / CONFIG_FILE).is_file():
        spec = ModelSpec.from_hf(path)
        if hf_source is not None and ModelSpec.from_hf(hf_source) != spec:
            raise ModelError(f"{hf_source}: config.json describes another model than {path}")
        with open_checkpoint(path) as tensors:
            yield OpenModel(path=path, spec=spec, tensors=tensors, hf_files=hf_source or path, sharded=None)
        return
    saved = None if (path / METADATA_FILE).is_file() else find_checkpoint(path)
    hf_files = hf_source or _hf_files_of(path, saved)
    stated = None if saved is None else saved.recipe.get("model.max_positions")
    spec = ModelSpec.from_hf(hf_files, max_positions=stated)
    hf_dtypes: dict[str, torch.dtype] = {}
    if saved is not None:
        check_same_model(saved, flat_spec(spec), place=str(hf_files))
        hf_dtypes = {name: getattr(torch, dtype) for name, dtype in saved.hf_dtypes.items()}
    sharded = path if saved is None else saved.path / MODEL_DIR
    with open_distributed(sharded, spec, hf_dtypes=hf_dtypes) as distributed:
        yield OpenModel(path=path, spec=spec, tensors=distributed, hf_files=hf_files, sharded=sharded)


def _hf_files_of(path: Path, saved: SavedState | None) -> Path:
    if saved is None:
        raise CheckpointError(
            f"{path}: does not say which model it holds; pass --hf-source with the HF directory of the model"
        )
    if (saved.path / HF_DIR).is_dir():
        return saved.path / HF_DIR
    hf_path = Path(str(saved.recipe.get("model.hf_path")))
    if not (hf_path / CONFIG_FILE).is_file():
        raise CheckpointError(
            f"{saved.path}: its run took config and tokenizer from model.hf_path = {hf_path}, which is not there; pass "
            "--hf-source with the directory's new place, or start in the directory that the run was started in"
        )
    return hf_path


def import_hf(
    hf_path: Path, out: Path, *, tp: int = 1, pp: int = 1, dtype: torch.dtype | None = None
) -> ModelSpec:
    """Write a checkpoint as a run at tp x pp would: one file per rank. Any other layout reads it too.

    `dtype` None keeps each tensor's own. `out` appears only when complete. Raises ModelError for a HF directory that
    cannot be read completely, LayoutError for degrees that do not divide the model, OSError for `out`.
    """
    spec = ModelSpec.from_hf(hf_path)
    layout = ParallelLayout(tp=tp, pp=pp, sp=tp > 1)
    try:
        spec.check_layout(layout)
    except LayoutError as error:
        raise LayoutError(f"--tp {tp} --pp {pp}: {error}") from None
    with open_checkpoint(hf_path) as source:
        _check_source(source, spec)
        directory = NewDirectory(out)
        try:
            _write_import(directory.partial, source, spec, layout, dtype=dtype)
            directory.publish()
        except BaseException:
            directory.discard()
            raise
    return spec


def _check_source(source: HfCheckpoint, spec: ModelSpec) -> None:
    check_tensors(source, spec)
    if spec.tied:
        for start in range(0, spec.vocab_size, _HEAD_ROWS):
            check_redundant_head(source, start=start, length=min(_HEAD_ROWS, spec.vocab_size - start))


def _write_import(
    partial: Path, source: HfCheckpoint, spec: ModelSpec, layout: ParallelLayout, *, dtype: torch.dtype | None
) -> None:
    hf_path = source.hf_path
    for part in (MODEL_DIR, HF_DIR):
        (partial / part).mkdir()
    copy_side_files(hf_path, partial / HF_DIR)
    shutil.copyfile(hf_path / CONFIG_FILE, partial / HF_DIR / CONFIG_FILE)
    dtypes = _stored_dtypes(source, spec, dtype)
    write_distributed(partial / MODEL_DIR, source, spec, layout, dtypes=dtypes)
    widened = {
        name: str(source.dtype(name)).removeprefix("torch.")
        for name, held in places(spec).items()
        if dtype is None and source.dtype(name) is not dtypes[held[0].key]
    }
    imported = SavedState(
        path=partial,
        progress=_START,
        optimizer_steps=0,
        recipe={"model.hf_path": str(hf_path.absolute())},
        recipe_digest="",
        model=flat_spec(spec),
        layout={},
        files=inventory(partial),
        hf_dtypes=widened,
    )
    write_state(imported, versions={"torch": version("torch")})


def _stored_dtypes(
    source: HfCheckpoint, spec: ModelSpec, dtype: torch.dtype | None
) -> Mapping[str, torch.dtype]:
    """Dtype of each stored tensor: one that holds every value of all HF tensors in it."""
    found: dict[str, list[torch.dtype]] = {}
    for name, held in places(spec).items():
        found.setdefault(held[0].key, []).append(source.dtype(name) if dtype is None else dtype)
    return {key: reduce(torch.promote_types, dtypes) for key, dtypes in found.items()}


def export_hf(
    model: OpenModel,
    out: Path,
    *,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    check: Callable[[Path], None] | None = None,
) -> None:
    """Write a self-contained HF directory; `dtype` None keeps each tensor's own.

    `out` appears only when complete, and when `check`, called on the complete directory before, does not raise.
    Raises ModelError and CheckpointError for tensors that cannot be read or written, OSError for `out`.
    """
    if isinstance(model.tensors, HfCheckpoint):
        _check_source(model.tensors, model.spec)
    shapes = hf_tensors(model.spec)
    dtypes = {name: dtype or model.tensors.dtype(name) for name in shapes}
    writer = HfWriter(
        model.spec, hf_source=model.hf_files, out_dir=out, dtypes=dtypes, max_file_bytes=max_file_bytes
    )
    scratch = Scratch()
    try:
        for name, shape in shapes.items():
            tensor = scratch.tensor(shape, dtypes[name])
            model.tensors.read_into(name, tensor)
            writer.add(name, tensor)
        writer.finish(check=check)
    except BaseException:
        writer.discard()
        raise

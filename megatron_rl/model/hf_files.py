"""A Hugging Face checkpoint directory on disk: find and check its tensors, write a new one."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_rl.errors import ModelError
from megatron_rl.model.hf_tables import EMBEDDING, HEAD, hf_tensors
from megatron_rl.model.spec import ModelSpec

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_FILE_BYTES = 5 * 1000**3
_COPIED_SUFFIXES = (".json", ".jinja", ".model", ".tiktoken", ".txt")
_SHOWN = 8  # tensor names an error lists before it counts the rest


class HfCheckpoint:
    """The tensors of one HF directory, opened lazily; reads slices, never whole files."""

    def __init__(self, hf_path: Path, files: Mapping[str, Any]) -> None:
        self.hf_path = hf_path
        self._files = files  # tensor name -> open safetensors file

    def names(self) -> set[str]:
        return set(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[name].get_slice(name).get_shape())

    def read(self, name: str, *, dim: int | None, start: int = 0, length: int = 0) -> Tensor:
        """The whole tensor (`dim` None), or elements `start : start + length` along `dim`."""
        if dim is None:
            return self._files[name].get_tensor(name)
        index = (slice(None),) * dim + (slice(start, start + length),)
        return self._files[name].get_slice(name)[index]


@contextmanager
def open_checkpoint(hf_path: str | Path) -> Iterator[HfCheckpoint]:
    """Open every safetensors file of a directory; ModelError for files that are absent or unreadable."""
    hf_path = Path(hf_path)
    paths = _tensor_files(hf_path)
    absent = [path.name for path in paths if not path.is_file()]
    if absent:
        raise ModelError(
            f"{hf_path}: {INDEX_FILE} names {_list(absent)}, not there; download the missing files again"
        )
    with ExitStack() as stack:
        files: dict[str, Any] = {}
        for path in paths:
            try:
                opened = stack.enter_context(safe_open(str(path), framework="pt"))
            except (SafetensorError, OSError) as error:
                reason = f"not a complete safetensors file: {error}; download it again"
                raise ModelError(f"{path}: {reason}") from None
            names: list[str] = opened.keys()
            for name in names:
                if name in files:
                    raise ModelError(f"{path}: {name}: stands in a second file of {hf_path} too")
                files[name] = opened
        yield HfCheckpoint(hf_path, files)


def _tensor_files(hf_path: Path) -> list[Path]:
    index = hf_path / INDEX_FILE
    if not index.is_file():
        single = hf_path / SINGLE_FILE
        if not single.is_file():
            raise ModelError(
                f"{hf_path}: neither {SINGLE_FILE} nor {INDEX_FILE} is there; pickled weights are not read"
            )
        return [single]
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return [hf_path / name for name in sorted(set(weight_map.values()))]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index}: not an index of safetensors files: {error!r}") from None


def check_tensors(checkpoint: HfCheckpoint, spec: ModelSpec) -> None:
    """Raise one ModelError that names all missing, unexpected and mis-shaped tensors."""
    wanted, found = hf_tensors(spec), checkpoint.names()
    complaints = []
    missing = [name for name in wanted if name not in found]
    if missing:
        complaints.append(f"missing: {_list(missing)}")
    unexpected = sorted(name for name in found if name not in wanted and not _is_harmless(name, spec))
    if unexpected:
        complaints.append(f"unexpected: {_list(unexpected)}")
    shapes = {name: (checkpoint.shape(name), shape) for name, shape in wanted.items() if name in found}
    wrong = [
        f"{name} {list(got)}, must be {list(shape)}" for name, (got, shape) in shapes.items() if got != shape
    ]
    if wrong:
        complaints.append(f"wrong shape: {_list(wrong)}")
    if complaints:
        raise ModelError(
            f"{checkpoint.hf_path}: the tensors do not fit its config.json ({'; '.join(complaints)}); "
            "the checkpoint is incomplete, or config.json belongs to another model"
        )


def _is_harmless(name: str, spec: ModelSpec) -> bool:
    """Buffers that old transformers saved, and the head of a tied model (`load_hf` compares it)."""
    return name.endswith("rotary_emb.inv_freq") or (name == HEAD and spec.tied)


def check_redundant_head(checkpoint: HfCheckpoint, *, start: int, length: int) -> None:
    """In a tied checkpoint that stores a head all the same, those rows must equal the embedding's."""
    if HEAD not in checkpoint.names():
        return
    if checkpoint.shape(HEAD) == checkpoint.shape(EMBEDDING):
        head, embedding = (checkpoint.read(n, dim=0, start=start, length=length) for n in (HEAD, EMBEDDING))
        if torch.equal(head, embedding):
            return
    raise ModelError(
        f"{checkpoint.hf_path}: config.json says tie_word_embeddings, but {HEAD} differs from {EMBEDDING}; "
        "set tie_word_embeddings to false, or remove the head from the checkpoint"
    )


def _list(items: list[str]) -> str:
    shown = ", ".join(items[:_SHOWN])
    return shown if len(items) <= _SHOWN else f"{shown} and {len(items) - _SHOWN} more"


class HfWriter:
    """Writes a checkpoint into a hidden directory beside `out_dir` and renames it when it is complete."""

    def __init__(
        self,
        spec: ModelSpec,
        *,
        hf_source: Path,
        out_dir: Path,
        dtype: torch.dtype,
        max_file_bytes: int = MAX_FILE_BYTES,
    ) -> None:
        """Raises ModelError when `out_dir` exists and holds anything."""
        if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
            raise ModelError(f"{out_dir}: exists already; choose another directory or remove it")
        self.out_dir, self.dtype = out_dir, dtype
        self.partial = out_dir.parent / f".{out_dir.name}.partial"
        shutil.rmtree(self.partial, ignore_errors=True)
        self.partial.mkdir(parents=True)
        try:
            _copy_side_files(hf_source, self.partial, dtype)
        except BaseException:
            self.discard()
            raise
        self._file_of = _plan_files(spec, dtype, max_file_bytes)
        self._left = {file: list(self._file_of.values()).count(file) for file in self._file_of.values()}
        self._pending: dict[str, Tensor] = {}
        self._bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Take one whole HF tensor; names come in the order of `hf_tensors`, each once."""
        self._pending[name] = tensor.to(self.dtype).contiguous()
        self._bytes += self._pending[name].nbytes
        file = self._file_of[name]
        self._left[file] -= 1
        if self._left[file] == 0:
            save_file(self._pending, str(self.partial / file), metadata={"format": "pt"})
            self._pending = {}

    def finish(self) -> None:
        """Write the index when there are several files, and give the directory its name."""
        assert not self._pending and not any(self._left.values()), "every tensor must have been added"
        if len(self._left) > 1:
            index = {"metadata": {"total_size": self._bytes}, "weight_map": self._file_of}
            (self.partial / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        if self.out_dir.exists():
            self.out_dir.rmdir()
        self.partial.rename(self.out_dir)

    def discard(self) -> None:
        shutil.rmtree(self.partial, ignore_errors=True)


def _plan_files(spec: ModelSpec, dtype: torch.dtype, max_bytes: int) -> dict[str, str]:
    """File of each tensor: filled in order, a new one when the next tensor would not fit."""
    number, filled = 1, 0
    numbers: dict[str, int] = {}
    for name, shape in hf_tensors(spec).items():
        size = math.prod(shape) * dtype.itemsize
        if filled and filled + size > max_bytes:
            number, filled = number + 1, 0
        numbers[name] = number
        filled += size
    if number == 1:
        return dict.fromkeys(numbers, SINGLE_FILE)
    return {name: f"model-{n:05d}-of-{number:05d}.safetensors" for name, n in numbers.items()}


def _copy_side_files(source: Path, target: Path, dtype: torch.dtype) -> None:
    """Tokenizer, generation settings and config, the latter with the dtype of the new weights."""
    for path in sorted(source.iterdir()):
        if path.is_file() and path.suffix in _COPIED_SUFFIXES and not path.name.endswith(".index.json"):
            shutil.copyfile(path, target / path.name)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    config[key] = str(dtype).removeprefix("torch.")
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

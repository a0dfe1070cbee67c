"""The tensors of a Hugging Face checkpoint directory on disk: find, check and read them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import Tensor

from megatron_rl.errors import ModelError
from megatron_rl.model.hf_tables import EMBEDDING, HEAD, hf_tensors
from megatron_rl.model.safetensors_file import read_header
from megatron_rl.model.spec import ModelSpec
from megatron_rl.model.tensor_files import Stored, TensorFile

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_SHOWN = 8  # tensor names an error lists before it counts the rest


class HfCheckpoint:
    """The tensors of one HF directory; reads slices, never whole files."""

    def __init__(self, hf_path: Path, tensors: Mapping[str, tuple[TensorFile, Stored]]) -> None:
        self.hf_path = hf_path
        self._tensors = tensors

    def names(self) -> set[str]:
        return set(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name][1].shape

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name][1].dtype

    def read(self, name: str, *, dim: int | None = None, start: int = 0, length: int = 0) -> Tensor:
        """The whole tensor (`dim` None), or elements `start : start + length` along `dim`."""
        shape = list(self.shape(name))
        if dim is not None:
            shape[dim] = length
        out = torch.empty(shape, dtype=self.dtype(name))
        self.read_into(name, out, dim=dim, start=start)
        return out

    def read_into(self, name: str, out: Tensor, *, dim: int | None = None, start: int = 0) -> None:
        """As `read`, into `out`, whose shape says how much; values are cast to its dtype."""
        file, stored = self._tensors[name]
        starts = [0] * len(stored.shape)
        if dim is not None:
            starts[dim] = start
        try:
            file.read_into(stored, out, starts=starts)
        except (OSError, EOFError) as error:
            raise ModelError(f"{file.path}: {name}: cannot be read: {error}") from None


@contextmanager
def open_checkpoint(hf_path: str | Path) -> Iterator[HfCheckpoint]:
    """Open the safetensors files of a directory.

    Raises ModelError for files that are absent or not whole, and where the index and the files disagree.
    """
    hf_path = Path(hf_path)
    index = _read_index(hf_path)
    paths = [hf_path / SINGLE_FILE] if index is None else sorted({hf_path / file for file in index.values()})
    absent = [path.name for path in paths if not path.is_file()]
    if absent:
        raise ModelError(
            f"{hf_path}: {INDEX_FILE} names {listed(absent)}, not there; download the missing files again"
        )
    headers = {path: read_header(path) for path in paths}
    if index is not None:
        _check_index(hf_path, index, headers)
    with ExitStack() as stack:
        tensors: dict[str, tuple[TensorFile, Stored]] = {}
        for path, header in headers.items():
            file = stack.enter_context(TensorFile(path))
            tensors.update({name: (file, stored) for name, stored in header.items()})
        yield HfCheckpoint(hf_path, tensors)


def _read_index(hf_path: Path) -> dict[str, str] | None:
    """File of each tensor; None for a checkpoint of one file."""
    path, single = hf_path / INDEX_FILE, hf_path / SINGLE_FILE
    if not path.is_file():
        if not single.is_file():
            raise ModelError(
                f"{hf_path}: neither {SINGLE_FILE} nor {INDEX_FILE} is there; pickled weights are not read"
            )
        return None
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        index = {str(name): _file_name(file) for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path}: not an index of safetensors files: {error!r}") from None
    if single.is_file() and SINGLE_FILE not in index.values():
        # transformers would read the one, vLLM the other
        raise ModelError(
            f"{hf_path}: {SINGLE_FILE} is there as well as {INDEX_FILE}, which does not name it; remove the one that "
            "is not meant"
        )
    return index


def _file_name(file: object) -> str:
    if not isinstance(file, str) or Path(file).name != file:
        raise ValueError(f"{file!r} is not the name of a file in this directory")
    return file


def _check_index(hf_path: Path, index: Mapping[str, str], headers: Mapping[Path, Iterable[str]]) -> None:
    """Raise one ModelError naming every tensor that is not where the index says, or not in the index."""
    found: dict[str, list[str]] = {}
    for path, names in headers.items():
        for name in names:
            found.setdefault(name, []).append(path.name)
    groups = {
        "in two files": [name for name, files in found.items() if len(files) > 1],
        "in no file": [name for name in index if name not in found],
        "in another file than the index says": [
            name for name, file in index.items() if name in found and file not in found[name]
        ],
        "not in the index": [name for name in found if name not in index],
    }
    complaints = [f"{what}: {listed(sorted(names))}" for what, names in groups.items() if names]
    if complaints:
        raise ModelError(
            f"{hf_path / INDEX_FILE}: does not fit the files ({'; '.join(complaints)}); files of different downloads "
            "were mixed, or the index was written by hand: download all of them again"
        )


def check_tensors(checkpoint: HfCheckpoint, spec: ModelSpec) -> None:
    """Raise one ModelError that names all missing, unexpected and mis-shaped tensors."""
    wanted, found = hf_tensors(spec), checkpoint.names()
    complaints = []
    missing = [name for name in wanted if name not in found]
    if missing:
        complaints.append(f"missing: {listed(missing)}")
    unexpected = sorted(name for name in found if name not in wanted and not is_harmless(name, spec))
    if unexpected:
        complaints.append(f"unexpected: {listed(unexpected)}")
    shapes = {name: (checkpoint.shape(name), shape) for name, shape in wanted.items() if name in found}
    wrong = [
        f"{name} {list(got)}, must be {list(shape)}" for name, (got, shape) in shapes.items() if got != shape
    ]
    if wrong:
        complaints.append(f"wrong shape: {listed(wrong)}")
    if complaints:
        raise ModelError(
            f"{checkpoint.hf_path}: the tensors do not fit its config.json ({'; '.join(complaints)}); "
            "the checkpoint is incomplete, or config.json belongs to another model"
        )


def is_harmless(name: str, spec: ModelSpec) -> bool:
    """Buffers that old transformers saved, and the head of a tied model, which `load_hf` compares."""
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


def listed(items: list[str]) -> str:
    """The first few names of an error, and how many more there are."""
    shown = ", ".join(items[:_SHOWN])
    return shown if len(items) <= _SHOWN else f"{shown} and {len(items) - _SHOWN} more"

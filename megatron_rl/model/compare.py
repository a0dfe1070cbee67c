"""Whether two models on disk are the same: every tensor by its bytes, the files beside them, the config."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rl.model.convert import OpenModel, Tensors
from megatron_rl.model.hf_export import CONFIG_FILE, side_files
from megatron_rl.model.hf_files import is_harmless
from megatron_rl.model.hf_tables import hf_tensors
from megatron_rl.model.spec import ModelSpec
from megatron_rl.model.tensor_files import Scratch

# compared by meaning, as dtypes of tensors and as ModelSpec: what transformers 4 and 5 spell differently, and the
# positions, which `model.max_positions` of a run's recipe states in place of its config.json
_BY_MEANING = {
    *("dtype", "torch_dtype", "rope_theta", "rope_scaling", "rope_parameters", "transformers_version"),
    "max_position_embeddings",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorDifference:
    """One tensor that is not the same in both. `is_rounding`: the dtypes differ, and nothing else."""

    name: str
    text: str
    is_rounding: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """What was compared and what differs; no difference means the same model, byte for byte."""

    num_tensors: int
    num_bytes: int  # of the first model's tensors
    tensors: tuple[TensorDifference, ...]
    num_files: int
    files: tuple[str, ...]
    config: tuple[str, ...]

    def is_same(self, *, allow_rounding: bool = False) -> bool:
        """Whether nothing differs; with `allow_rounding` the dtypes of tensors may."""
        real = [d for d in self.tensors if not (allow_rounding and d.is_rounding)]
        return not (real or self.files or self.config)


def compare_models(a: OpenModel, b: OpenModel) -> Comparison:
    """Compare all of two models, holding one tensor of each at a time."""
    names = _names(a), _names(b)
    differences = [TensorDifference(name=name, text="only in A") for name in names[0] - names[1]]
    differences += [TensorDifference(name=name, text="only in B") for name in names[1] - names[0]]
    num_bytes, scratches = 0, (Scratch(), Scratch())
    for name in sorted(names[0] & names[1]):
        difference, size = _compare_tensor(name, a.tensors, b.tensors, scratches)
        num_bytes += size
        if difference is not None:
            differences.append(difference)
    pairs = list(_file_pairs(a.hf_files, b.hf_files))
    return Comparison(
        num_tensors=len(names[0] | names[1]),
        num_bytes=num_bytes,
        tensors=tuple(sorted(differences, key=lambda d: d.name)),
        num_files=len(pairs),
        files=tuple(filter(None, (_compare_files(*pair) for pair in pairs))),
        config=tuple(_compare_configs(a, b)),
    )


def _names(model: OpenModel) -> set[str]:
    """All but what a checkpoint may hold without being another one, such as a copy of a tied head."""
    table = hf_tensors(model.spec)
    return {name for name in model.tensors.names() if name in table or not is_harmless(name, model.spec)}


def _compare_tensor(
    name: str, a: Tensors, b: Tensors, scratches: tuple[Scratch, Scratch]
) -> tuple[TensorDifference | None, int]:
    """What differs, if anything, and the bytes of the first."""
    shapes, dtypes = (a.shape(name), b.shape(name)), (a.dtype(name), b.dtype(name))
    if shapes[0] != shapes[1]:
        text = f"shape {list(shapes[0])} in A, {list(shapes[1])} in B"
        return TensorDifference(name=name, text=text), 0
    first, second = (_read(side, name, scratch) for side, scratch in zip((a, b), scratches, strict=True))
    if dtypes[0] is dtypes[1]:
        if torch.equal(first.view(torch.uint8), second.view(torch.uint8)):
            return None, first.nbytes
        return TensorDifference(name=name, text=_distance(first, second)), first.nbytes
    text = f"dtype {_short(dtypes[0])} in A, {_short(dtypes[1])} in B"
    narrow = min(dtypes, key=lambda dtype: dtype.itemsize)
    same = torch.equal(first.to(narrow).view(torch.uint8), second.to(narrow).view(torch.uint8))
    if not same:
        text += f"; {_distance(first, second)}"
    return TensorDifference(name=name, text=text, is_rounding=same), first.nbytes


def _read(tensors: Tensors, name: str, scratch: Scratch) -> Tensor:
    out = scratch.tensor(tensors.shape(name), tensors.dtype(name))
    tensors.read_into(name, out)
    return out


def _distance(a: Tensor, b: Tensor) -> str:
    gap = (a.double() - b.double()).abs()
    differing = int((gap != 0).sum())
    return f"{differing} of {gap.numel()} elements differ, by up to {gap.max().item():.3g}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _file_pairs(a: Path, b: Path) -> Iterator[tuple[Path, Path]]:
    relative = {path.relative_to(root) for root in (a, b) for path in side_files(root)}
    for name in sorted(relative):
        yield a / name, b / name


def _compare_files(a: Path, b: Path) -> str | None:
    for here, there, which in ((a, b, "A"), (b, a, "B")):
        if not here.is_file():
            return f"{there.name}: not in {which}"
    return None if a.read_bytes() == b.read_bytes() else f"{a.name}: differs"


def _compare_configs(a: OpenModel, b: OpenModel) -> Iterator[str]:
    yield from _differing_keys(_numbers(a.spec), _numbers(b.spec))
    configs = [_config(model.hf_files) for model in (a, b)]
    yield from _differing_keys(*configs)


def _numbers(spec: ModelSpec) -> dict[str, Any]:
    return {
        "max_position_embeddings": spec.max_positions,
        "rope_theta": spec.rope_theta,
        "rope_scaling": str(spec.rope_scaling),
    }


def _config(hf_files: Path) -> dict[str, Any]:
    config = json.loads((hf_files / CONFIG_FILE).read_text(encoding="utf-8"))
    return {key: value for key, value in config.items() if key not in _BY_MEANING}


def _differing_keys(a: dict[str, Any], b: dict[str, Any]) -> Iterator[str]:
    for key in sorted(a.keys() | b.keys()):
        if a.get(key) != b.get(key):
            yield f"{key}: {json.dumps(a.get(key))} in A, {json.dumps(b.get(key))} in B"

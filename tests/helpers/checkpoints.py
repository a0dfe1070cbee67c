"""Hugging Face directories as tests bend them, and tensors read by the safetensors package alone."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import torch
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).parents[2]
INDEX = "model.safetensors.index.json"


def load_tool(name: str) -> ModuleType:
    """A script of tools/ in this process: loading torch anew for each call would take most of the time."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a directory; a name in two files is an error."""
    held: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            assert name not in held, name
            held[name] = tensor
    return held


def rewrite(path: Path, change: Mapping[str, torch.Tensor | None]) -> None:
    """Replace, add or (None) remove tensors of a one-file checkpoint."""
    tensors = tensors_of(path) | dict(change)
    kept = {name: value.contiguous() for name, value in tensors.items() if value is not None}
    save_file(kept, path / "model.safetensors", metadata={"format": "pt"})


def split(path: Path, num_files: int = 2) -> list[Path]:
    """The same checkpoint in several files with an index; neighbours in the model stand in different files."""
    tensors = tensors_of(path)
    names = [f"model-{n + 1:05d}-of-{num_files:05d}.safetensors" for n in range(num_files)]
    weight_map = {name: names[i % num_files] for i, name in enumerate(sorted(tensors))}
    (path / "model.safetensors").unlink()
    for file in names:
        held = {name: tensors[name] for name in weight_map if weight_map[name] == file}
        save_file(held, path / file, metadata={"format": "pt"})
    write_index(path, weight_map)
    return [path / file for file in names]


def read_index(path: Path) -> dict[str, str]:
    return dict(json.loads((path / INDEX).read_text())["weight_map"])


def write_index(path: Path, weight_map: Mapping[str, str]) -> None:
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": dict(weight_map)}))


def same_bytes(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> list[str]:
    """Names that are not in both with the same dtype, shape and bytes; none: the same."""
    return sorted(
        name
        for name in a.keys() | b.keys()
        if name not in a or name not in b or _key(a[name]) != _key(b[name])
    )


def _key(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return tensor.dtype, tuple(tensor.shape), raw

"""Writes a Hugging Face directory tensor by tensor: self-contained, checked against its config, whole or not there."""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rl.errors import ModelError
from megatron_rl.model.hf_files import INDEX_FILE, SINGLE_FILE, listed
from megatron_rl.model.hf_tables import hf_tensors
from megatron_rl.model.new_directory import NewDirectory
from megatron_rl.model.safetensors_file import SafetensorsWriter, read_header
from megatron_rl.model.spec import ModelSpec

CONFIG_FILE = "config.json"
MAX_FILE_BYTES = 5 * 1000**3
# what goes along unchanged; weights, model cards and code of other formats do not
_COPIED_SUFFIXES = (".json", ".jinja", ".model", ".tiktoken", ".txt")
_COPIED_NAMES = ("LICENSE", "NOTICE")
_TEMPLATES_DIR = "additional_chat_templates"


class HfWriter:
    """Writes a checkpoint into a hidden directory beside `out_dir` and renames it when it is complete.

    At most one tensor is held, and that only while it is converted.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        hf_source: Path,
        out_dir: Path,
        dtypes: Mapping[str, torch.dtype],
        max_file_bytes: int = MAX_FILE_BYTES,
    ) -> None:
        """`dtypes`: of every tensor of the model. Config and tokenizer come from `hf_source`.

        Raises ModelError when `out_dir` exists and holds anything, OSError when it cannot be written.
        """
        self._directory = NewDirectory(out_dir)
        self.partial = self._directory.partial
        self._hf_source, self._max_positions = hf_source, spec.max_positions
        self._tensors = {name: (dtypes[name], shape) for name, shape in hf_tensors(spec).items()}
        self._file_of = _plan_files(self._tensors, max_file_bytes)
        self._open: dict[str, SafetensorsWriter] = {}
        self._written: set[str] = set()
        try:
            copy_side_files(hf_source, self.partial)
        except BaseException:
            self.discard()
            raise

    def add(self, name: str, tensor: Tensor) -> None:
        """Write one whole HF tensor, each once, cast to its dtype; in the order of `hf_tensors` for least memory."""
        assert name not in self._written, f"{name} was added before"
        file = self._file_of[name]
        if file not in self._open:
            tensors = {n: t for n, t in self._tensors.items() if self._file_of[n] == file}
            self._open[file] = SafetensorsWriter(self.partial / file, tensors)
        self._open[file].add(name, tensor.to(device="cpu", dtype=self._tensors[name][0]))
        self._written.add(name)
        if self._open[file].is_complete:
            self._open.pop(file).close()

    def finish(self, *, check: Callable[[Path], None] | None = None) -> None:
        """Compare what was written with what the config asks for, add index and config, and publish.

        `check` sees the complete directory before it gets its name; what it raises keeps it from being published.
        Raises ModelError naming tensors that are missing or not as they should be.
        """
        found = self._inventory()
        if len(set(self._file_of.values())) > 1:
            _write_index(self.partial, found)
        # last: without it nothing takes the directory for a model
        self._write_config()
        if check is not None:
            check(self.partial)
        self._directory.publish()

    def discard(self) -> None:
        for file in self._open.values():
            file.abandon()
        self._directory.discard()

    def _inventory(self) -> dict[str, dict[str, tuple[torch.dtype, tuple[int, ...]]]]:
        """File -> tensors, read from the headers on the disk."""
        self._raise_for(self._tensors.keys() - self._written)
        found = {
            path.name: {name: (stored.dtype, stored.shape) for name, stored in read_header(path).items()}
            for path in sorted(self.partial.glob("*.safetensors"))
        }
        counts = Counter(name for tensors in found.values() for name in tensors)
        held = {name: entry for tensors in found.values() for name, entry in tensors.items()}
        self._raise_for(
            name
            for name in self._tensors.keys() | held.keys()
            if counts[name] != 1 or held.get(name) != self._tensors.get(name)
        )
        return found

    def _raise_for(self, names: Iterable[str]) -> None:
        wrong = sorted(names)
        if wrong:
            raise ModelError(
                f"{self._directory.path}: was not written: {len(wrong)} of the model's {len(self._tensors)} tensors "
                f"are missing or not as config.json wants them: {listed(wrong)}"
            )

    def _write_config(self) -> None:
        text = (self._hf_source / CONFIG_FILE).read_bytes()
        config = json.loads(text)
        # the dtype that holds most elements speaks for the model
        elements: Counter[torch.dtype] = Counter()
        for dtype, shape in self._tensors.values():
            elements[dtype] += math.prod(shape)
        changed = exported_config(
            {**config, "max_position_embeddings": self._max_positions}, dtype=elements.most_common(1)[0][0]
        )
        if changed != config:
            text = (json.dumps(changed, indent=2, ensure_ascii=False) + "\n").encode()
        (self.partial / CONFIG_FILE).write_bytes(text)


def exported_config(config: Mapping[str, Any], *, dtype: torch.dtype) -> dict[str, Any]:
    """The original with the new dtype, and with dtype and rotary settings in the spellings of transformers 4 and 5.

    Nothing else changes. A reader that knows one spelling alone would take defaults for what it misses.
    """
    name = str(dtype).removeprefix("torch.")
    changed = {**config, "dtype": name, "torch_dtype": name}
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = rope.get("rope_theta", config.get("rope_theta"))
    kind = rope.get("rope_type", rope.get("type", "default"))
    settings = {key: value for key, value in rope.items() if key not in ("rope_theta", "rope_type", "type")}
    if theta is not None:
        changed["rope_theta"] = theta
        changed["rope_parameters"] = {**settings, "rope_type": kind, "rope_theta": theta}
    if kind != "default":
        changed["rope_scaling"] = {**settings, "rope_type": kind}
    return changed


def copy_side_files(source: Path, target: Path) -> None:
    """Tokenizer, chat templates, generation settings and licence, byte for byte; not the config."""
    for path in side_files(source):
        copy = target / path.relative_to(source)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, copy)


def side_files(hf_path: Path) -> list[Path]:
    """Files of a HF directory that go along with its weights unchanged. Raises OSError where it cannot be read."""
    found = [path for path in sorted(hf_path.iterdir()) if path.is_file() and _goes_along(path)]
    return found + sorted((hf_path / _TEMPLATES_DIR).glob("*.jinja"))


def _goes_along(path: Path) -> bool:
    if path.name == CONFIG_FILE or path.name.endswith(".index.json"):
        return False
    return path.suffix in _COPIED_SUFFIXES or path.name.startswith(_COPIED_NAMES)


def _plan_files(tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], max_bytes: int) -> dict[str, str]:
    """File of each tensor: filled in order, a new one when the next tensor would not fit."""
    number, filled = 1, 0
    numbers: dict[str, int] = {}
    for name, (dtype, shape) in tensors.items():
        size = math.prod(shape) * dtype.itemsize
        if filled and filled + size > max_bytes:
            number, filled = number + 1, 0
        numbers[name] = number
        filled += size
    if number == 1:
        return dict.fromkeys(numbers, SINGLE_FILE)
    return {name: f"model-{n:05d}-of-{number:05d}.safetensors" for name, n in numbers.items()}


def _write_index(
    directory: Path, found: Mapping[str, Mapping[str, tuple[torch.dtype, tuple[int, ...]]]]
) -> None:
    total = sum(
        math.prod(shape) * dtype.itemsize for tensors in found.values() for dtype, shape in tensors.values()
    )
    weight_map = {name: file for file, tensors in found.items() for name in tensors}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

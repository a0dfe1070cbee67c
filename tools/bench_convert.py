"""Measure conversion against the least that could be done with the same bytes, side by side in one run.

    load      HF directory into the shards of a model      against reading its tensors with safetensors
    import    HF directory to a distributed checkpoint     against reading and writing the bytes once
    export    that checkpoint to a HF directory            against safetensors writing the same tensors from memory
    save      the shards of a model to a HF directory      against the same

Both sides take turns. Every writer waits until its bytes are on the disk (fsync); sources are in the page cache. Memory
is what a side adds to the process at its peak, mapped files included.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from bench_common import machine, parse_args
from safetensors import safe_open
from safetensors.torch import save_file

from megatron_rl.errors import MegatronRLError
from megatron_rl.model.build import build_model
from megatron_rl.model.convert import export_hf, import_hf, open_model
from megatron_rl.model.hf_files import SINGLE_FILE
from megatron_rl.model.hf_io import load_hf, save_hf
from megatron_rl.model.hf_tables import hf_tensors
from megatron_rl.model.safetensors_file import SafetensorsWriter
from megatron_rl.model.spec import ModelSpec
from megatron_rl.parallel.groups import destroy_process_groups, init_process_groups
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.platform.process import run_process
from megatron_rl.platform.quiet import silence_library_warnings
from megatron_rl.train.launcher import free_port

MEGABYTE = 1000**2
HIDDEN, FFN, HEADS, KV_HEADS, VOCAB = 2048, 5504, 16, 4, 32000
LAYER_BYTES = 88_700_000  # bfloat16, at these sizes


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Seconds of each round, and bytes that one side added to the process at its peak."""

    seconds: tuple[float, ...]
    peak_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Our way and the least that must be done, alternating."""

    name: str
    ours: Measured
    least: Measured

    @property
    def ratio(self) -> float:
        return statistics.median(self.ours.seconds) / statistics.median(self.least.seconds)


def write_model(hf_path: Path, *, num_layers: int) -> ModelSpec:
    """A Qwen2-type model of bfloat16 noise."""
    config = {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": HIDDEN,
        "intermediate_size": FFN, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
        "num_hidden_layers": num_layers, "vocab_size": VOCAB, "max_position_embeddings": 4096,
        "rope_theta": 1e6, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    }  # fmt: skip
    hf_path.mkdir(parents=True)
    (hf_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    spec = ModelSpec.from_hf(hf_path)
    shapes = hf_tensors(spec)
    writer = SafetensorsWriter(hf_path / SINGLE_FILE, {n: (torch.bfloat16, s) for n, s in shapes.items()})
    noise = torch.randn(VOCAB * HIDDEN, generator=torch.Generator().manual_seed(0)).bfloat16()
    for number, (name, shape) in enumerate(shapes.items()):
        size = math.prod(shape)
        start = min(number, noise.numel() - size)
        writer.add(name, noise[start : start + size].view(shape))
    writer.close()
    return spec


class Bench:
    """One model, in a directory and in the memory of one rank, and the two ways of moving it between them."""

    def __init__(self, scratch: Path, hf_path: Path, *, rounds: int) -> None:
        self._scratch, self._hf_path, self._rounds = scratch, hf_path, rounds
        self.spec = ModelSpec.from_hf(hf_path)
        self._layout = ParallelLayout()
        self._chunks = build_model(self.spec, self._layout, dtype=torch.bfloat16, spec_kind="local")
        # memory that exists already on both sides: what it costs to obtain it is not the reader's doing
        self._tensors = {
            name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in hf_tensors(self.spec).items()
        }

    def run(self) -> list[Case]:
        # both sides once: memory that is touched for the first time costs more than the reading
        self.read()
        self.load()
        checkpoint = self._scratch / "checkpoint"
        import_hf(self._hf_path, checkpoint)
        return [
            self._case("load", self.load, self.read),
            self._case(
                "import", self._writing(lambda out: import_hf(self._hf_path, out)), self._writing(self.copy)
            ),
            self._case(
                "export", self._writing(lambda out: export(checkpoint, out)), self._writing(self.write)
            ),
            self._case("save", self._writing(self.save), self._writing(self.write)),
        ]

    def load(self) -> None:
        load_hf(self._chunks, self.spec, self._layout, hf_path=self._hf_path, rank=0)

    def read(self) -> None:
        with safe_open(str(self._hf_path / SINGLE_FILE), framework="pt") as file:
            for name, tensor in self._tensors.items():
                tensor.copy_(file.get_tensor(name))

    def copy(self, out: Path) -> None:
        self.read()
        with out.open("wb", buffering=0) as file:
            for tensor in self._tensors.values():
                file.write(tensor.view(torch.uint8).numpy().data)
            os.fsync(file.fileno())

    def write(self, out: Path) -> None:
        save_file(self._tensors, str(out), metadata={"format": "pt"})
        with out.open("rb") as file:
            os.fsync(file.fileno())

    def save(self, out: Path) -> None:
        save_hf(self._chunks, self.spec, self._layout, hf_source=self._hf_path, out_dir=out)

    def _writing(self, action: Callable[[Path], Any]) -> Callable[[], None]:
        """The action on a path that does not exist; removing it costs no time."""
        out = self._scratch / "out"

        def run() -> None:
            action(out)

        return run

    def _case(self, name: str, ours: Callable[[], None], least: Callable[[], None]) -> Case:
        times: tuple[list[float], list[float]] = ([], [])
        peaks = [0, 0]
        for _ in range(self._rounds):
            for side, action in enumerate((ours, least)):
                seconds, peak = measure(action)
                times[side].append(seconds)
                peaks[side] = max(peaks[side], peak)
                remove(self._scratch / "out")
        sides = [Measured(seconds=tuple(t), peak_bytes=p) for t, p in zip(times, peaks, strict=True)]
        return Case(name=name, ours=sides[0], least=sides[1])


def export(checkpoint: Path, out: Path) -> None:
    with open_model(checkpoint) as model:
        export_hf(model, out)


def measure(action: Callable[[], None]) -> tuple[float, int]:
    """(seconds, bytes added to the resident set at its peak)."""
    # resets the peak to what is resident now
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    began = time.perf_counter()
    action()
    return time.perf_counter() - began, max(0, _status("VmHWM") - before)


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def report(cases: Sequence[Case], *, num_bytes: int) -> None:
    print(
        f"{num_bytes / 1000**3:.2f} GB, {machine()}, torch {version('torch')}, safetensors {version('safetensors')}"
    )
    print(f"{'':8}{'ours s':>9}{'least s':>9}{'ratio':>8}{'ours MB':>10}{'least MB':>10}")
    for case in cases:
        medians = [statistics.median(side.seconds) for side in (case.ours, case.least)]
        peaks = [side.peak_bytes / MEGABYTE for side in (case.ours, case.least)]
        print(
            f"{case.name:8}{medians[0]:9.2f}{medians[1]:9.2f}{case.ratio:8.2f}{peaks[0]:10.0f}{peaks[1]:10.0f}"
        )


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv, description=__doc__, gb=2.0, what="the synthetic model", rounds=3, space=3)
    silence_library_warnings()
    torch.set_num_threads(1)
    num_layers = max(1, round((args.gb * 1000**3 - 2 * VOCAB * HIDDEN * 2) / LAYER_BYTES))
    try:
        with tempfile.TemporaryDirectory(dir=args.dir) as scratch:
            hf_path = Path(scratch, "hf")
            write_model(hf_path, num_layers=num_layers)
            init_process_groups(
                ParallelLayout(),
                rank=0,
                world_size=1,
                master_addr="127.0.0.1",
                master_port=free_port(),
                timeout_s=600.0,
            )
            cases = Bench(Path(scratch), hf_path, rounds=args.rounds).run()
            num_bytes = (hf_path / SINGLE_FILE).stat().st_size
            destroy_process_groups()
    except (MegatronRLError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    report(cases, num_bytes=num_bytes)
    if args.json:
        figures = [asdict(case) | {"ratio": case.ratio} for case in cases]
        text = json.dumps({"bytes": num_bytes, "machine": machine(), "cases": figures}, indent=2)
        args.json.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    run_process(main)

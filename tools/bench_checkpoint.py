"""Measure checkpoints of one process against torch.save of the same tensors, side by side in one run.

    plain     torch.save into one file; with fsync, and what of it is without
    sync      a save that writes, compares and publishes before it returns
    async     how long the same save holds the run up when a writer process does the writing: the copy into memory,
              and the questions whether it is done at every later step, each 0.5 s, with what follows from the answer;
              `behind` is how long that goes on, beside a trainer that does nothing
    load      model and optimizer, digests included; against torch.load of the plain file

Model (bfloat16) and optimizer (float32 weights and both moments) of a synthetic Qwen2-type model. The three ways of
saving take turns; everything is on the disk (fsync) before a save counts as written. What is read, to compare or to
load, comes from the page cache. The first asynchronous save also obtains its memory and is shown apart.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

import torch
from bench_common import machine, parse_args

from megatron_rl.errors import MegatronRLError
from megatron_rl.model.checkpoint import CheckpointStore
from megatron_rl.model.checkpoint_shards import model_state, owned_model, owned_optimizer
from megatron_rl.model.hf_files import SINGLE_FILE
from megatron_rl.model.hf_tables import hf_tensors
from megatron_rl.model.safetensors_file import SafetensorsWriter
from megatron_rl.model.spec import ModelSpec
from megatron_rl.parallel.groups import destroy_process_groups, init_process_groups
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.platform.process import run_process
from megatron_rl.platform.quiet import silence_library_warnings
from megatron_rl.recipe.schema import ModelConfig, Recipe
from megatron_rl.recipe.stages import OptimizerConfig, ScheduleConfig, SftStage
from megatron_rl.train.launcher import free_port
from megatron_rl.train.policy import Policy

HIDDEN, FFN, HEADS, KV_HEADS, VOCAB = 1024, 2816, 16, 4, 8000
LAYER_PARAMS = 11_300_000  # at these sizes
BYTES_PER_PARAM = 14  # a bfloat16 weight, its float32 copy and two moments
TIMEOUT_S = 600.0
PLAIN = "plain.pt"
STEP_S = 0.5  # of a training step that goes on meanwhile

Seconds = dict[str, list[float]]


def write_model(hf_path: Path, *, num_layers: int) -> ModelSpec:
    """A Qwen2-type model of zeros: no bytes are easier to store than others here."""
    config = {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": HIDDEN,
        "intermediate_size": FFN, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
        "num_hidden_layers": num_layers, "vocab_size": VOCAB, "max_position_embeddings": 4096,
        "rope_theta": 1e6, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    }  # fmt: skip
    hf_path.mkdir(parents=True)
    (hf_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    spec = ModelSpec.from_hf(hf_path)
    shapes = hf_tensors(spec)
    writer = SafetensorsWriter(hf_path / SINGLE_FILE, {n: (torch.bfloat16, s) for n, s in shapes.items()})
    for name, shape in shapes.items():
        writer.add(name, torch.zeros(shape, dtype=torch.bfloat16))
    writer.close()
    return spec


class Bench:
    """One model with its optimizer, saved in three ways below `scratch`."""

    def __init__(self, scratch: Path, *, num_layers: int) -> None:
        hf_path = scratch / "hf"
        spec = write_model(hf_path, num_layers=num_layers)
        config = ModelConfig(hf_path=str(hf_path), dtype="bfloat16", spec="local")
        optimizer = OptimizerConfig(lr=1e-5)
        stage = SftStage(
            kind="sft", data="-", steps=1, global_batch_size=1, tokens_per_microbatch=1, optimizer=optimizer
        )
        self._recipe = Recipe(name="bench", model=config, stages=(stage,))
        self._scratch = scratch
        self._policy = Policy(config, spec, ParallelLayout(), rank=0)
        self._policy.start_stage(optimizer, ScheduleConfig(), total_steps=1)
        # the moments exist from the first step on
        self._policy.optimizer_step()
        self._step = 0
        self._num_bytes = sum(
            BYTES_PER_PARAM * param.numel() for param in self._policy.chunks[0].parameters()
        )

    def run(self, rounds: int) -> tuple[int, Seconds]:
        """Bytes of one checkpoint, and seconds of every round by what was measured."""
        seconds: Seconds = {}
        with self._store("sync") as sync, self._store("async", asynchronous=True) as other:
            # what is done once in a run: plans, and memory to copy into
            self._save(sync)
            first = self._save_beside(other)["async"]
            for _ in range(rounds):
                self._free_pages()
                measured = self._plain()
                self._free_pages()
                measured["sync"] = self._save(sync)
                self._free_pages()
                measured |= self._save_beside(other)
                measured |= self._load(sync)
                for name, value in measured.items():
                    seconds.setdefault(name, []).append(value)
            saved = sync.latest()
            assert saved is not None
        seconds["async first"] = [first]
        return sum(file.num_bytes for file in saved.files.values()), seconds

    def _store(self, name: str, *, asynchronous: bool = False) -> CheckpointStore:
        return CheckpointStore(
            self._scratch / name,
            keep=1,
            rank=0,
            recipe=self._recipe,
            timeout_s=TIMEOUT_S,
            asynchronous=asynchronous,
        )

    def _progress(self) -> dict[str, int]:
        self._step += 1
        return {"stage": 0, "step": self._step}

    def _free_pages(self) -> None:
        """Leave as much memory as a checkpoint's pages need free and at hand.

        A virtual machine may have to ask its host for fresh pages, which here takes three times as long as writing:
        whichever way of saving found some left over would win.
        """
        ballast = self._scratch / "ballast"
        ballast.write_bytes(bytes(self._num_bytes))
        ballast.unlink()

    def _plain(self) -> dict[str, float]:
        state = model_state(self._policy)
        shards = [*owned_optimizer(self._policy.optimizer.inner, state).shards, *owned_model(state).shards]
        tensors = {f"{shard.key} {shard.starts}": shard.data for shard in shards}
        # the last one goes when this one is there, as with checkpoints: both need memory for their pages
        path, last = self._scratch / "plain.new", self._scratch / PLAIN
        began = time.perf_counter()
        with path.open("wb") as file:
            torch.save(tensors, file)
            file.flush()
            without = time.perf_counter() - began
            os.fsync(file.fileno())
        seconds = time.perf_counter() - began
        path.replace(last)
        return {"plain": seconds, "plain without fsync": without}

    def _save(self, store: CheckpointStore) -> float:
        return timed(lambda: store.save(self._policy, self._progress()))

    def _save_beside(self, store: CheckpointStore) -> dict[str, float]:
        copying = self._save(store)
        began = time.perf_counter()
        publishing = 0.0
        while store.is_saving:
            time.sleep(STEP_S)
            publishing += timed(store.poll)
        behind = time.perf_counter() - began
        return {
            "async": copying + publishing,
            "async copy": copying,
            "async publish": publishing,
            "behind": behind,
        }

    def _load(self, store: CheckpointStore) -> dict[str, float]:
        saved = store.latest()
        assert saved is not None

        def load() -> None:
            store.load_model(self._policy, saved)
            store.load_optimizer(self._policy, saved)

        plain = timed(lambda: torch.load(self._scratch / PLAIN, weights_only=True))
        return {"load": timed(load), "plain load": plain}


def timed(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def summary(seconds: Seconds) -> dict[str, dict[str, float]]:
    """Median of each measurement, and its ratio to the plain way: median of the ratios of the rounds."""
    figures = {}
    for name, values in seconds.items():
        base = seconds["plain load" if name == "load" else "plain"]
        pairs = list(zip(values, base, strict=False))
        figures[name] = {
            "median_s": statistics.median(values),
            "ratio": statistics.median(value / plain for value, plain in pairs),
        }
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv, description=__doc__, gb=0.7, what="one checkpoint", rounds=5, space=5)
    silence_library_warnings()
    torch.set_num_threads(1)
    num_layers = max(1, round((args.gb * 1000**3 / BYTES_PER_PARAM - VOCAB * HIDDEN) / LAYER_PARAMS))
    try:
        with tempfile.TemporaryDirectory(dir=args.dir) as scratch:
            init_process_groups(
                ParallelLayout(),
                rank=0,
                world_size=1,
                master_addr="127.0.0.1",
                master_port=free_port(),
                timeout_s=TIMEOUT_S,
            )
            num_bytes, seconds = Bench(Path(scratch), num_layers=num_layers).run(args.rounds)
            destroy_process_groups()
    except (MegatronRLError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    figures = summary(seconds)
    print(f"{num_bytes / 1000**3:.2f} GB, {machine()}, torch {version('torch')}, {args.rounds} rounds")
    print(f"{'':20}{'median s':>10}{'to plain':>10}")
    for name, figure in figures.items():
        print(f"{name:20}{figure['median_s']:10.3f}{figure['ratio']:10.2f}")
    if args.json:
        report = {"bytes": num_bytes, "machine": machine(), "figures": figures, "seconds": seconds}
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    run_process(main)

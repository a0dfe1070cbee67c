"""Kernels with one fault each, compiled as the gates do; run as a program, it prints their figures by name as JSON."""

import json
import sys

import torch
import triton
import triton.language as tl
from cubin import figures
from pretend import pretended


@triton.jit
def product(a_ptr, b_ptr, out_ptr, PRECISION: tl.constexpr):
    at = tl.arange(0, 64)[:, None] * 64 + tl.arange(0, 64)[None, :]
    tl.store(out_ptr + at, tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at), input_precision=PRECISION))


@triton.jit
def double(x_ptr, out_ptr, STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, (tl.load(x_ptr + at * STRIDE).to(out_ptr.dtype.element_ty) + 1.5))


@triton.jit
def statistics(x_ptr, out_ptr, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)).to(tl.float32)
    x = tl.exp2(x - tl.max(x, 0))
    tl.store(out_ptr, tl.sum(x * x, 0) / tl.sum(x, 0))


def main() -> None:
    found = []
    with pretended(90, lambda kernel: found.append(figures(kernel))):
        half, single, double_ = (
            torch.empty(1 << 16, device="cuda", dtype=dtype)
            for dtype in (torch.bfloat16, torch.float32, torch.float64)
        )
        product[(1,)](half, half, single, PRECISION="ieee", num_warps=4)
        product[(1,)](single, single, single, PRECISION="tf32", num_warps=4)
        double[(1,)](single, single, STRIDE=1, BLOCK=1024, num_warps=4)
        double[(1,)](single, single, STRIDE=3, BLOCK=1024, num_warps=4)
        double[(1,)](single, double_, STRIDE=1, BLOCK=1024, num_warps=4)
        # 16384 numbers for one warp: 512 for each lane, which keeps them until the largest is known
        statistics[(1,)](half, single, BLOCK=16384, num_warps=1)
    names = ("product", "tf32", "row", "strided", "float64", "spilling")
    json.dump(dict(zip(names, found, strict=True)), sys.stdout)


if __name__ == "__main__":
    main()

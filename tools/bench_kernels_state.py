"""Benchmark cases of ops that move or update flat state: adamw_ and the copies of a weight transfer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from bench_kernels_cases import EAGER, Case, Contender, Least, Outputs, Shape, Source, Tensors
from torch.optim._functional import adamw

from megatron_rl_kernels.dispatch import Impl

LR, BETAS, EPS, WEIGHT_DECAY = 1e-3, (0.9, 0.95), 1e-8, 0.1
STATE = ("master", "exp_avg", "exp_avg_sq")


def adamw_cases(shape: Shape, source: Source, impls: Iterable[Impl]) -> Iterator[Case]:
    from megatron_rl_kernels.adamw import adamw_

    n = shape.params
    tensors = {
        "master": source.normal(n, scale=0.02),
        "exp_avg": source.normal(n, scale=1e-3),
        "exp_avg_sq": source.normal(n, scale=1e-3).square_(),
        "grad": source.normal(n, scale=1e-3),
        "weight": torch.zeros(n, dtype=torch.bfloat16, device=source.device),
    }

    def ours(impl: Impl) -> Contender:
        def run(t: Tensors) -> Outputs:
            # float64 has no rounded copy
            weight = t["weight"] if t["weight"].dtype == torch.bfloat16 else None
            adamw_(
                t["master"],
                t["exp_avg"],
                t["exp_avg_sq"],
                t["grad"],
                lr=LR,
                betas=BETAS,
                eps=EPS,
                weight_decay=WEIGHT_DECAY,
                step=10,
                weight=weight,
                impl=impl,
            )
            return {name: t[name] for name in STATE}

        return Contender(run=run)

    def eager(t: Tensors, *, fused: bool) -> Outputs:
        step = torch.tensor(9.0, device=t["master"].device if fused else "cpu")
        state = ([t["master"]], [t["grad"]], [t["exp_avg"]], [t["exp_avg_sq"]])
        adamw(
            *state, [], [step], foreach=not fused, fused=fused, amsgrad=False, beta1=BETAS[0], beta2=BETAS[1],
            lr=LR, weight_decay=WEIGHT_DECAY, eps=EPS, maximize=False,
        )  # fmt: skip
        t["weight"].copy_(t["master"])
        return {name: t[name] for name in STATE}

    yield Case(
        op="adamw",
        is_cheap=True,
        shape=shape,
        tensors=tensors,
        row_wise=tuple(tensors),
        leaves=(),
        upstream={},
        contenders={
            **{impl: ours(impl) for impl in impls},
            EAGER: Contender(run=lambda t: eager(t, fused=False)),
            "torch fused": Contender(run=lambda t: eager(t, fused=True)),
        },
        reference=ours("reference"),
        least=Least(num_bytes=(30.0 * n, 30.0 * n)),
        num_rows=n,
    )


def reshard_copy_cases(shape: Shape, source: Source, impls: Iterable[Impl]) -> Iterator[Case]:
    """Half of each of a layer's matrices, cut by rows and by columns, packed for one receiver."""
    from megatron_rl_kernels.reshard_copy import CopyTable, Slice, reshard_pack

    side = max(8, int((shape.params / 2) ** 0.5) // 8 * 8)
    tensors = {
        "columns": source.normal(side, side, dtype=torch.bfloat16),
        "rows": source.normal(side, side, dtype=torch.bfloat16),
        "norm": source.normal(side, dtype=torch.bfloat16),
    }
    half = side // 2
    size = 2 * side * half + side
    tensors["flat"] = torch.zeros(size, dtype=torch.bfloat16, device=source.device)
    # checked once and used for every transfer; other tensors, other table
    tables: dict[int, CopyTable] = {}

    def table(t: Tensors) -> CopyTable:
        key = t["columns"].data_ptr()
        if key not in tables:
            slices = [
                Slice.along(t["columns"], dim=0, length=half, offset=0),
                Slice.along(t["rows"], dim=1, length=half, offset=side * half),
                Slice.along(t["norm"], dim=None, offset=2 * side * half),
            ]
            tables[key] = CopyTable(slices, flat_size=size, flat_dtype=t["flat"].dtype)
        return tables[key]

    def ours(impl: Impl) -> Contender:
        def run(t: Tensors) -> Outputs:
            reshard_pack(table(t), t["flat"], impl=impl)
            return {"flat": t["flat"]}

        return Contender(run=run)

    def eager(t: Tensors) -> Outputs:
        pieces = (t["columns"][:half].reshape(-1), t["rows"][:, :half].reshape(-1), t["norm"])
        return {"flat": torch.cat(pieces, out=t["flat"])}

    num_bytes = 2.0 * size * 2
    yield Case(
        op="reshard_copy",
        is_cheap=True,
        shape=shape,
        tensors=tensors,
        row_wise=(),
        leaves=(),
        upstream={},
        contenders={**{impl: ours(impl) for impl in impls}, EAGER: Contender(run=eager)},
        reference=ours("reference"),
        least=Least(num_bytes=(num_bytes, num_bytes)),
        num_rows=1,
    )


def rope_cases(shape: Shape, source: Source, impls: Iterable[Impl]) -> Iterator[Case]:
    from megatron_rl_kernels.rope import RopeAngles, rope_angles, rotate

    n, width = shape.tokens, 128
    inv_freq = 1e4 ** -(torch.arange(width // 2, device=source.device) / (width // 2))
    angles = rope_angles(torch.arange(n, device=source.device), inv_freq, dtype=shape.dtype)

    def ours(impl: Impl) -> Contender:
        return Contender(run=lambda t: {"out": rotate(t["x"], RopeAngles(t["cos"], t["sin"]), impl=impl)})

    def eager(t: Tensors) -> Outputs:
        x, cos, sin = t["x"], *(torch.cat((t[name],) * 2, dim=-1)[:, None] for name in ("cos", "sin"))
        left, right = x.chunk(2, dim=-1)
        return {"out": x * cos + torch.cat((-right, left), dim=-1) * sin}

    size = 2.0 * n * shape.heads * width * torch.empty(0, dtype=shape.dtype).element_size()
    yield Case(
        op="rope",
        shape=shape,
        tensors={
            "x": source.normal(n, shape.heads, width, dtype=shape.dtype),
            "cos": angles[0],
            "sin": angles[1],
        },
        row_wise=("x", "cos", "sin"),
        leaves=("x",),
        upstream={"out": source.normal(n, shape.heads, width, dtype=shape.dtype)},
        contenders={**{impl: ours(impl) for impl in impls}, EAGER: Contender(run=eager)},
        reference=ours("reference"),
        least=Least(num_bytes=(size, 2 * size)),
        num_rows=n,
    )

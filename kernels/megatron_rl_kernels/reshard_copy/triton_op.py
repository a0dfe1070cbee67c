"""Launch of the Triton copy: slices become rows of a table on the device, one program each."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from megatron_rl_kernels.reshard_copy.table import CopyTable, Slice
from megatron_rl_kernels.reshard_copy.triton_kernels import copy_kernel

# 16 KiB for a program, in units of 16 bytes: 64 bytes under way per thread
BLOCK = 1024
NUM_WARPS = 8
_ALIGNED = 16

_WORDS = {
    1: (tl.int8, torch.int8),
    2: (tl.int16, torch.int16),
    4: (tl.int32, torch.int32),
    8: (tl.int64, torch.int64),
}


@dataclass(frozen=True, slots=True)
class _Launch:
    """Slices that one launch moves: of one element size and one unit."""

    element_bytes: int
    vec: int
    rows: Tensor  # [programs, 6] int64 on the device


def copy_triton(table: CopyTable, flat: Tensor, *, pack: bool) -> None:
    """`pack`: tensors into `flat`; else back. The table of a device is made at its first copy and kept."""
    if flat.numel() == 0 or not table.filled:
        return
    key = "triton", flat.device, flat.data_ptr() % _ALIGNED == 0
    launches = table.derived.get(key)
    if launches is None:
        launches = table.derived[key] = _launches(table, flat.device, aligned=key[2])
    flat_word, flat_view = _WORDS[flat.element_size()]
    for launch in launches:  # type: ignore[attr-defined]
        copy_kernel[(launch.rows.shape[0],)](
            launch.rows,
            flat.view(flat_view),
            WORD=_WORDS[launch.element_bytes][0],
            FLAT_WORD=flat_word,
            VEC=launch.vec,
            PACK=pack,
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )
    # autograd must see what the kernel writes behind its back
    for tensor in [flat] if pack else [piece.tensor for _, piece in table.filled]:
        torch.autograd.graph.increment_version(tensor)


def _launches(table: CopyTable, device: torch.device, *, aligned: bool) -> list[_Launch]:
    groups: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
    for _, piece in table.filled:
        element_bytes = piece.tensor.element_size()
        # whole 16 bytes on the side with the narrower elements are whole 16 bytes on the other
        vec = _ALIGNED // min(element_bytes, table.flat_dtype.itemsize)
        if not (aligned and _fits(piece, vec)):
            vec = 1
        groups[element_bytes, vec].append(_rows(piece, vec))
    return [_Launch(size, vec, torch.cat(rows).to(device)) for (size, vec), rows in groups.items()]


def _fits(piece: Slice, vec: int) -> bool:
    """Whether every run starts and ends at whole units, and units at 16 bytes."""
    at = piece.tensor.data_ptr() + piece.start * piece.tensor.element_size()
    strides = (piece.stride,) if piece.rows > 1 else ()
    return at % _ALIGNED == 0 and all(value % vec == 0 for value in (piece.width, piece.offset, *strides))


def _rows(piece: Slice, vec: int) -> Tensor:
    """Table rows of a slice, everything but the address in units of `vec` elements."""
    unit_bytes = piece.tensor.element_size() * vec
    base = piece.tensor.data_ptr() + piece.start * piece.tensor.element_size()
    offset, num_runs, width, stride = piece.offset // vec, piece.rows, piece.width // vec, piece.stride // vec
    if num_runs == 1 or stride == width:
        num_runs, width = 1, num_runs * width
    if num_runs == 1 or width >= BLOCK:
        # a program stays inside one run
        per_run = -(-width // BLOCK)
        each = torch.arange(num_runs * per_run)
        run, column = each // per_run, each % per_run * BLOCK
        zero = torch.zeros_like(each)
        return torch.stack(
            (
                base + (run * stride + column) * unit_bytes,
                offset + run * width + column,
                (width - column).clamp(max=BLOCK),
                zero,
                zero + BLOCK,
                zero,
            ),
            dim=1,
        )
    size = num_runs * width
    each = torch.arange(-(-size // BLOCK)) * BLOCK
    zero = torch.zeros_like(each)
    return torch.stack(
        (
            base + each // width * (stride * unit_bytes),
            offset + each,
            (size - each).clamp(max=BLOCK),
            each % width,
            zero + width,
            zero + stride,
        ),
        dim=1,
    )

"""The block work of `linear_logprob` on Triton kernels and library products: layout checks and launches."""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from megatron_rl_kernels import tables
from megatron_rl_kernels.linear_logprob import triton_kernels as kernels
from megatron_rl_kernels.linear_logprob.autograd import Head, TokenRows
from megatron_rl_kernels.linear_logprob.stats import NUM_STATISTICS
from megatron_rl_kernels.tables import MatmulTile
from megatron_rl_kernels.triton_tools import INTERPRETED, check_last_stride

# programs that keep an H100 or H200 (132 multiprocessors) busy for two rounds
_WANTED_PROGRAMS = 264
# tiles of columns below which a split is not worth its statistics
_TILES_PER_SPLIT = 8
_MERGE_BLOCK = 1024
_ALIGNMENT_BYTES = 16


class TritonEngine:
    """Blocks in Triton, see autograd.Engine. bfloat16, float16 and float32; dz has the dtype of the operands."""

    def statistics(self, hidden: Tensor, weight: Tensor, target: Tensor, head: Head) -> Tensor:
        tile = tables.LINEAR_LOGPROB_FORWARD[_key(hidden)]
        num_tokens = hidden.shape[0]
        token_blocks = triton.cdiv(num_tokens, tile.m)
        split_rows = split_size(head.num_rows, token_blocks, tile)
        num_splits = triton.cdiv(head.num_rows, split_rows)
        inv, inv_stride = _inverse(head.inv_temperature, hidden)
        parts = torch.empty(
            (num_splits, NUM_STATISTICS, num_tokens), dtype=torch.float32, device=hidden.device
        )
        # launches go to the current device, which need not be the tensors'
        with torch.cuda.device_of(hidden):
            kernels.forward_statistics[(token_blocks * num_splits,)](
                descriptor(hidden, tile.m, tile.k),
                descriptor(weight[: head.num_rows], tile.n, tile.k),
                target.contiguous(),
                inv,
                inv_stride,
                parts,
                num_tokens,
                head.num_rows,
                hidden.shape[1],
                head.vocab_start,
                split_rows,
                num_splits,
                BM=tile.m,
                BN=tile.n,
                BK=tile.k,
                PARTS=tile.parts,
                GROUP=tile.group,
                ENTROPY=head.with_entropy,
                UPCAST=INTERPRETED,
                num_warps=tile.num_warps,
                num_stages=tile.num_stages,
            )
            return merged(parts)

    def operand(self, tensor: Tensor) -> Tensor:
        return tensor

    def workspace(self, hidden: Tensor, num_tokens: int, num_columns: int) -> Tensor:
        # rows start at multiples of 16 bytes, whatever the number of columns
        stride = triton.cdiv(num_columns, 64) * 64
        space = torch.empty((num_tokens, stride), dtype=hidden.dtype, device=hidden.device)
        return space[:, :num_columns]

    def grad_logits(
        self, hidden: Tensor, block: Tensor, rows: TokenRows, first_column: int, out: Tensor
    ) -> None:
        tile = tables.LINEAR_LOGPROB_BACKWARD[_key(hidden)]
        num_tokens, num_columns = out.shape
        inv, inv_stride = _inverse(rows.inv_temperature, hidden)
        blocks = triton.cdiv(num_tokens, tile.m) * triton.cdiv(num_columns, tile.n)
        with torch.cuda.device_of(hidden):
            kernels.gradient_of_logits[(blocks,)](
                descriptor(hidden, tile.m, tile.k),
                descriptor(block, tile.n, tile.k),
                rows.target.contiguous(),
                rows.base,
                inv,
                inv_stride,
                rows.grad,
                rows.slope,
                rows.slope if rows.pull is None else rows.pull,
                rows.slope if rows.offset is None else rows.offset,
                out,
                out.stride(0),
                num_tokens,
                num_columns,
                hidden.shape[1],
                first_column,
                BM=tile.m,
                BN=tile.n,
                BK=tile.k,
                PARTS=tile.parts,
                GROUP=tile.group,
                ENTROPY=rows.pull is not None,
                UPCAST=INTERPRETED,
                num_warps=tile.num_warps,
                num_stages=tile.num_stages,
            )

    def add_product(self, out: Tensor, left: Tensor, right: Tensor, *, keep: bool) -> None:
        beta = 1 if keep else 0
        if left.dtype == out.dtype:
            out.addmm_(left, right, beta=beta)
        elif out.is_cuda:
            torch.addmm(out, left, right, out_dtype=torch.float32, beta=beta, out=out)
        else:
            # no library product here sums bfloat16 in float32
            out.addmm_(left.float(), right.float(), beta=beta)


def check_layout(**matrices: Tensor) -> None:
    """Raise TypeError or ValueError for hidden states or weights [rows, H] that tensor descriptors cannot read."""
    op = "linear_logprob"
    check_last_stride(op, **matrices)
    for name, matrix in matrices.items():
        if matrix.dtype == torch.float64:
            raise TypeError(
                f"{op}: {name} of {matrix.dtype}, impl = 'triton' takes torch.bfloat16, torch.float16 and "
                "torch.float32; use impl = 'portable' or 'reference'"
            )
        rows, size = matrix.shape
        if size % 8:
            raise ValueError(
                f"{op}: {name} {tuple(matrix.shape)}, impl = 'triton' needs H to be a multiple of 8; "
                "use impl = 'portable' or pad H with zeros"
            )
        stride = matrix.stride(0) if rows > 1 else size
        if stride < size or stride * matrix.element_size() % _ALIGNMENT_BYTES:
            raise ValueError(
                f"{op}: {name} {tuple(matrix.shape)} has a row stride of {stride} elements, impl = 'triton' needs "
                f"one that is at least H and a multiple of {_ALIGNMENT_BYTES} bytes; pass {name}.contiguous()"
            )
        if matrix.numel() and matrix.data_ptr() % _ALIGNMENT_BYTES:
            raise ValueError(
                f"{op}: {name} {tuple(matrix.shape)} starts at an address that is not a multiple of "
                f"{_ALIGNMENT_BYTES} bytes, which impl = 'triton' needs; pass {name}.clone()"
            )


def descriptor(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Blocks [rows, columns] of a matrix that `check_layout` accepts."""
    # the stride of a single row is never used, and need not be aligned
    stride = matrix.stride(0) if matrix.shape[0] > 1 else matrix.shape[1]
    return TensorDescriptor(matrix, list(matrix.shape), [stride, 1], [rows, columns])


def split_size(num_rows: int, token_blocks: int, tile: MatmulTile) -> int:
    """Rows of the head per program: few enough to keep the device busy, a multiple of the tile's columns."""
    tiles = triton.cdiv(num_rows, tile.n)
    wanted = triton.cdiv(_WANTED_PROGRAMS, token_blocks)
    splits = max(1, min(wanted, tiles // _TILES_PER_SPLIT))
    return triton.cdiv(tiles, splits) * tile.n


def merged(parts: Tensor) -> Tensor:
    """[P, 5, N] float32 statistics of disjoint parts -> [5, N] of their union, in one launch."""
    num_parts, _, num_tokens = parts.shape
    out = torch.empty((NUM_STATISTICS, num_tokens), dtype=torch.float32, device=parts.device)
    grid = (triton.cdiv(num_tokens, _MERGE_BLOCK),)
    kernels.merge_splits[grid](parts, out, num_parts, num_tokens, BLOCK=_MERGE_BLOCK, num_warps=4)
    return out


def _key(tensor: Tensor) -> tuple[tables.Generation, tables.ElementSize]:
    return tables.generation(tensor.device), 4 if tensor.element_size() == 4 else 2


def _inverse(inv_temperature: float | Tensor, like: Tensor) -> tuple[Tensor, int]:
    """1 / temperature as a tensor, and its stride from token to token."""
    if isinstance(inv_temperature, float):
        return torch.full((1,), inv_temperature, dtype=torch.float32, device=like.device), 0
    return inv_temperature.contiguous(), 1

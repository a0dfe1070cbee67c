"""The definition of `reshard_pack` and `reshard_unpack`: every element by its index, one slice at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl_kernels.reshard_copy.table import CopyTable, Slice


def pack_reference(table: CopyTable, flat: Tensor) -> None:
    for _, piece in table.filled:
        values = piece.tensor.detach().view(-1)[_elements(piece)]
        flat[piece.offset : piece.offset + piece.size] = values.to(flat.dtype)


def unpack_reference(flat: Tensor, table: CopyTable) -> None:
    for _, piece in table.filled:
        values = flat[piece.offset : piece.offset + piece.size]
        piece.tensor.detach().view(-1)[_elements(piece)] = values.to(piece.tensor.dtype)


def _elements(piece: Slice) -> Tensor:
    """[rows * width] int64: the element of the tensor for each one of the flat buffer."""
    device = piece.tensor.device
    starts = piece.start + torch.arange(piece.rows, device=device) * piece.stride
    return (starts[:, None] + torch.arange(piece.width, device=device)).view(-1)

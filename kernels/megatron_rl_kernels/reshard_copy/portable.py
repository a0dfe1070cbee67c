"""`reshard_pack` and `reshard_unpack` as torch copies between views, for any device."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl_kernels.reshard_copy.table import CopyTable


def pack_portable(table: CopyTable, flat: Tensor) -> None:
    tensors, places = _views(table, flat)
    if tensors:
        torch._foreach_copy_(places, tensors)


def unpack_portable(flat: Tensor, table: CopyTable) -> None:
    tensors, places = _views(table, flat)
    if tensors:
        torch._foreach_copy_(tensors, places)


def _views(table: CopyTable, flat: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Each slice in its tensor, and the same shape in the flat buffer."""
    tensors = [piece.view() for _, piece in table.filled]
    places = [
        flat[piece.offset : piece.offset + piece.size].view(piece.rows, piece.width)
        for _, piece in table.filled
    ]
    return tensors, places

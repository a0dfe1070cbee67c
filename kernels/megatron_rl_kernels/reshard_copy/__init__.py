"""Gather slices of many tensors into one flat buffer, or scatter them back, in one copy: what a weight transfer packs.

`reference` defines the ops, `portable` is torch's copies, `triton` one kernel over a table of addresses.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_rl_kernels.dispatch import Impl, choose_impl
from megatron_rl_kernels.reshard_copy.portable import pack_portable, unpack_portable
from megatron_rl_kernels.reshard_copy.reference import pack_reference, unpack_reference
from megatron_rl_kernels.reshard_copy.table import CopyTable, Slice

__all__ = ["CopyTable", "Slice", "reshard_pack", "reshard_unpack"]

_OFFERED: tuple[Impl, ...] = ("reference", "portable", "triton")


@torch.no_grad()
def reshard_pack(slices: Sequence[Slice] | CopyTable, flat: Tensor, *, impl: Impl | None = None) -> None:
    """Write every slice to its place in `flat` [size], cast to its dtype; the rest of `flat` is left as it is.

    Same dtype: exact bits. float32 into bfloat16: to nearest even, a NaN stays some NaN. Two slices may read
    the same elements. A `CopyTable` saves the checks, and the table on the device, from call to call.
    Raises TypeError or ValueError naming the slice that does not fit, or overlaps another in `flat`.
    """
    table = _table(slices, flat)
    table.check_flat("reshard_pack", flat)
    chosen = choose_impl("reshard_pack", impl, device=flat.device, offered=_OFFERED)
    if chosen == "triton":
        # Triton is heavy, and only this implementation needs it
        from megatron_rl_kernels.reshard_copy.triton_op import copy_triton

        copy_triton(table, flat, pack=True)
    elif chosen == "reference":
        pack_reference(table, flat)
    else:
        pack_portable(table, flat)


@torch.no_grad()
def reshard_unpack(flat: Tensor, slices: Sequence[Slice] | CopyTable, *, impl: Impl | None = None) -> None:
    """Write `flat` [size], read only, into the tensors of the slices; their other elements are left as they are.

    The inverse of `reshard_pack`, with the same casts. Raises ValueError where two slices share an element of
    a tensor, besides what `reshard_pack` raises.
    """
    table = _table(slices, flat)
    table.check_flat("reshard_unpack", flat)
    table.check_writable("reshard_unpack")
    chosen = choose_impl("reshard_unpack", impl, device=flat.device, offered=_OFFERED)
    if chosen == "triton":
        # Triton is heavy, and only this implementation needs it
        from megatron_rl_kernels.reshard_copy.triton_op import copy_triton

        copy_triton(table, flat, pack=False)
    elif chosen == "reference":
        unpack_reference(flat, table)
    else:
        unpack_portable(flat, table)


def _table(slices: Sequence[Slice] | CopyTable, flat: Tensor) -> CopyTable:
    if isinstance(slices, CopyTable):
        return slices
    return CopyTable(slices, flat_size=flat.numel(), flat_dtype=flat.dtype)

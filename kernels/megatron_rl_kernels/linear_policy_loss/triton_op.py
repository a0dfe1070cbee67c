"""The head of one token chunk on Triton kernels and library products; see `portable.PortableHead` for the parts."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from megatron_rl_kernels import tables
from megatron_rl_kernels.linear_logprob.stats import empty_part
from megatron_rl_kernels.linear_logprob.triton_op import TritonEngine, descriptor
from megatron_rl_kernels.linear_policy_loss import triton_kernels as kernels
from megatron_rl_kernels.linear_policy_loss.types import TokenValues
from megatron_rl_kernels.tables import MatmulTile
from megatron_rl_kernels.triton_tools import INTERPRETED, check_last_stride

OP = "linear_policy_loss"
# tokens of a chunk where the caller does not say: below it, reading and writing the head's gradient shows
CHUNK_TOKENS = 4096

# tile.n is also how many columns share one largest logit
TILES: tables.Table = {
    ("interpreter", 2): MatmulTile(128, 128, 256, 1, 2, 8, 1),
    ("interpreter", 4): MatmulTile(128, 128, 256, 1, 2, 8, 1),
    ("sm_90", 2): MatmulTile(128, 128, 64, 1, 16, 8, 4),
    ("sm_90", 4): MatmulTile(64, 64, 32, 1, 16, 8, 3),
    ("other", 2): MatmulTile(128, 128, 64, 1, 16, 8, 3),
    ("other", 4): MatmulTile(64, 64, 32, 1, 16, 8, 3),
}
_MERGE_ROWS, _MERGE_TILES = 32, 64
_GRADIENT_ROWS = 32
_ALIGNMENT_BYTES = 16


class TritonHead:
    """bfloat16 or float32; the workspace has the dtype of the operands."""

    def __init__(
        self, weight: Tensor, *, num_rows: int, chunk_tokens: int, keep: bool, with_entropy_gradient: bool
    ) -> None:
        self._weight = weight[:num_rows]
        self._num_rows = num_rows
        self._keeps = keep
        element_size: tables.ElementSize = 4 if weight.dtype == torch.float32 else 2
        self._tile = TILES[tables.generation(weight.device), element_size]
        self._num_tiles = triton.cdiv(num_rows, self._tile.n)
        shape = (chunk_tokens if keep else 1, max(self._num_tiles, 1) * self._tile.n)
        self._workspace = weight.new_empty(shape)
        self._engine = TritonEngine()

    def statistics(self, chunk: Tensor, column: Tensor, temperature: float | Tensor) -> Tensor:
        num_tokens, tile = chunk.shape[0], self._tile
        self._chunk, self._column = chunk, column.contiguous()
        if isinstance(temperature, Tensor):
            self._inv = temperature.reciprocal()
        else:
            self._inv = torch.full((num_tokens,), 1 / temperature, dtype=torch.float32, device=chunk.device)
        if self._num_rows == 0:
            return empty_part(num_tokens, dtype=torch.float32, device=chunk.device)
        space = self._workspace[:num_tokens]
        self._parts = torch.empty((self._num_tiles, 4, num_tokens), dtype=torch.float32, device=chunk.device)
        kernels.exp_of_logits[(triton.cdiv(num_tokens, tile.m) * self._num_tiles,)](
            descriptor(chunk, tile.m, tile.k),
            descriptor(self._weight, tile.n, tile.k),
            self._column,
            self._inv,
            descriptor(space, tile.m, tile.n),
            self._parts,
            num_tokens,
            self._num_rows,
            chunk.shape[1],
            BM=tile.m,
            BN=tile.n,
            BK=tile.k,
            GROUP=tile.group,
            KEEP=self._keeps,
            UPCAST=INTERPRETED,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
        stats = torch.empty((5, num_tokens), dtype=torch.float32, device=chunk.device)
        kernels.merge_tiles[(triton.cdiv(num_tokens, _MERGE_ROWS),)](
            self._parts,
            self._column,
            stats,
            self._num_tiles,
            num_tokens,
            self._num_rows,
            BN=tile.n,
            TILES=_MERGE_TILES,
            ROWS=_MERGE_ROWS,
            num_warps=4,
        )
        return stats

    def gradients(
        self,
        grad: Tensor,
        grad_entropy: Tensor | None,
        values: TokenValues,
        *,
        grad_chunk: Tensor | None,
        grad_weight: Tensor | None,
        is_first: bool,
    ) -> None:
        num_tokens = self._chunk.shape[0]
        if self._num_rows == 0:
            if grad_chunk is not None:
                grad_chunk.zero_()
            return
        space = self._workspace[:num_tokens]
        pull = self._inv if grad_entropy is None else grad_entropy * self._inv
        kernels.exp_to_gradient[(self._num_tiles, triton.cdiv(num_tokens, _GRADIENT_ROWS))](
            space,
            space.stride(0),
            self._parts,
            self._column,
            values.top,
            values.log_sum,
            values.logprob,
            grad * self._inv,
            pull,
            values.entropy,
            num_tokens,
            self._num_rows,
            BN=self._tile.n,
            ROWS=_GRADIENT_ROWS,
            ENTROPY=grad_entropy is not None,
            num_warps=4,
        )
        grad_logits = space[:, : self._num_rows]
        if grad_chunk is not None:
            self._engine.add_product(grad_chunk, grad_logits, self._weight, keep=False)
        if grad_weight is not None:
            part = grad_weight[: self._num_rows]
            self._engine.add_product(part, grad_logits.T, self._chunk, keep=not is_first)


def check_layout(hidden: Tensor, weight: Tensor) -> None:
    """Raise TypeError or ValueError for a head [V_local, H] that these kernels cannot take."""
    if weight.dtype not in (torch.bfloat16, torch.float32):
        # what is left of a probability in float16 ends at 2^-24
        raise TypeError(
            f"{OP}: weight of {weight.dtype}, impl = 'triton' takes torch.bfloat16 and torch.float32; "
            "use impl = 'portable' or 'reference'"
        )
    check_last_stride(OP, hidden=hidden, weight=weight)
    if weight.shape[1] % 8:
        raise ValueError(
            f"{OP}: weight {tuple(weight.shape)}, impl = 'triton' needs H to be a multiple of 8; use impl = 'portable' "
            "or pad H with zeros"
        )
    stride = weight.stride(0) if weight.shape[0] > 1 else weight.shape[1]
    if stride < weight.shape[1] or stride * weight.element_size() % _ALIGNMENT_BYTES:
        raise ValueError(
            f"{OP}: weight {tuple(weight.shape)} has a row stride of {stride} elements, impl = 'triton' needs one that "
            f"is at least H and a multiple of {_ALIGNMENT_BYTES} bytes; pass weight.contiguous()"
        )
    if weight.numel() and weight.data_ptr() % _ALIGNMENT_BYTES:
        raise ValueError(
            f"{OP}: weight {tuple(weight.shape)} starts at an address that is not a multiple of {_ALIGNMENT_BYTES} "
            "bytes, which impl = 'triton' needs; pass weight.clone()"
        )

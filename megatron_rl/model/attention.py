"""Causal attention over packed sequences of different lengths: the core attention of the model.

On CPU, and wherever flash-attn is missing, sequences of similar length are padded on the right into one
batch: a causal mask alone then hides the padding, so no mask is built and no sequence is visited in Python.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron_rl.data.types import PackedBatch
from megatron_rl_kernels.rope import RopeAngles, rotate


@dataclass(frozen=True, slots=True)
class LengthClasses:
    """How T packed tokens become right-padded batches and back. Built once per micro-batch."""

    shapes: tuple[tuple[int, int], ...]  # per class: sequences S_c, longest L_c
    index: Tensor  # [N] int64, N = sum of S_c * L_c: position in the pack, batch after batch; padding repeats the last
    inverse: Tensor  # [T] int64, position of each token among those N


@dataclass
class PackedParams(PackedSeqParams):
    """megatron-core's description of a packed micro-batch, with the batches that CPU attention works on.

    With `angles`, set by the model, attention rotates queries and keys itself.
    """

    classes: LengthClasses | None = field(default=None, repr=False)
    angles: RopeAngles | None = field(default=None, repr=False)


def packed_seq_params(batch: PackedBatch, *, dtype: torch.dtype) -> PackedParams:
    """What a model of `dtype` needs to know about the sequences of `batch`; on its device."""
    # flash-attn computes in half precision only
    can_flash = (
        batch.cu_seqlens.is_cuda and dtype in (torch.bfloat16, torch.float16) and _has_flash_attention()
    )
    needs_classes = not can_flash
    return PackedParams(
        qkv_format="thd",
        cu_seqlens_q=batch.cu_seqlens,
        cu_seqlens_kv=batch.cu_seqlens,
        # the true longest one: rotary embedding reads another meaning into a length that equals T
        max_seqlen_q=batch.max_seqlen,
        max_seqlen_kv=batch.max_seqlen,
        classes=length_classes(batch.cu_seqlens) if needs_classes else None,
    )


def length_classes(cu_seqlens: Tensor) -> LengthClasses:
    """Group the sequences of a pack by length: within a class the longest is less than twice the shortest."""
    bounds = cu_seqlens.to(torch.int64).cpu()
    starts, lengths = bounds[:-1], bounds.diff()
    inverse = torch.empty(int(bounds[-1]), dtype=torch.int64)
    shapes: list[tuple[int, int]] = []
    parts: list[Tensor] = []
    offset = 0
    # frexp: lengths in [2^(k-1), 2^k) share exponent k; empty sequences have exponent 0 and no token to place
    exponents = torch.frexp(lengths.to(torch.float64)).exponent
    for exponent in exponents[lengths > 0].unique().tolist():
        chosen = (exponents == exponent) & (lengths > 0)
        first, length = starts[chosen, None], lengths[chosen, None]
        column = torch.arange(int(length.max()))[None]
        index = first + torch.minimum(column, length - 1)  # [S_c, L_c]
        is_real = column < length
        inverse[index[is_real]] = offset + is_real.flatten().nonzero()[:, 0]
        offset += index.numel()
        shapes.append((index.size(0), index.size(1)))
        parts.append(index.flatten())
    device = cu_seqlens.device
    return LengthClasses(tuple(shapes), torch.cat(parts).to(device), inverse.to(device))


def _has_flash_attention() -> bool:
    return importlib.util.find_spec("flash_attn") is not None


class PackedCausalAttention(nn.Module):
    """Drop-in for megatron-core's core attention; it has no parameters and no dropout."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,
        **_unused: Any,
    ) -> None:
        super().__init__()
        assert attention_type == "self" and attn_mask_type is AttnMaskType.causal
        assert config.attention_dropout == 0.0
        assert config.kv_channels is not None
        self.scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedParams,
        **_unused: Any,
    ) -> Tensor:
        """query [T, Hq, D], key and value [T, Hkv, D], Hkv divides Hq; returns [T, Hq * D]."""
        assert attention_mask is None, "the packing is the mask"
        if packed_seq_params.angles is not None:
            query, key = (rotate(x, packed_seq_params.angles) for x in (query, key))
        if packed_seq_params.classes is None:
            out = _flash_attention(query, key, value, packed_seq_params, scale=self.scale)
        else:
            out = padded_attention(query, key, value, packed_seq_params.classes, scale=self.scale)
        return out.reshape(out.size(0), -1)


def padded_attention(
    query: Tensor, key: Tensor, value: Tensor, classes: LengthClasses, *, scale: float
) -> Tensor:
    """Causal attention inside each sequence through one batched call per length class; returns [T, Hq, D]."""
    padded = [
        _ToClasses.apply(x, classes.index, classes.inverse).split([s * n for s, n in classes.shapes])
        for x in (query, key, value)
    ]
    outputs = []
    for shape, *parts in zip(classes.shapes, *padded, strict=True):
        # real queries never see the padding behind them, and what padded queries see is dropped below
        q, k, v = (part.unflatten(0, shape).transpose(1, 2) for part in parts)  # [S_c, H, L_c, D]
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=query.size(1) != key.size(1)
        )
        outputs.append(out.transpose(1, 2).flatten(0, 1))  # [S_c * L_c, Hq, D]
    result: Tensor = _FromClasses.apply(
        outputs[0] if len(outputs) == 1 else torch.cat(outputs), classes.inverse
    )
    return result


class _ToClasses(torch.autograd.Function):
    """(x [T, ...], index [N], inverse [T]) -> [N, ...].

    Padding has no gradient: no real query sees it, and what padded queries give is dropped. So backward is a gather
    again, where that of indexing adds up rows one by one.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None


class _FromClasses(torch.autograd.Function):
    """(padded [N, ...], inverse [T]) -> [T, ...]; every row of padding has a gradient of zero."""

    @staticmethod
    def forward(ctx: Any, padded: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.num_rows = padded.size(0)
        return padded.index_select(0, inverse)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (inverse,) = ctx.saved_tensors
        zeros = grad.new_zeros(ctx.num_rows, *grad.shape[1:])
        return zeros.index_copy_(0, inverse, grad), None


def _flash_attention(
    query: Tensor, key: Tensor, value: Tensor, packed: PackedParams, *, scale: float
) -> Tensor:
    from flash_attn import flash_attn_varlen_func

    out: Tensor = flash_attn_varlen_func(
        query,
        key,
        value,
        packed.cu_seqlens_q,
        packed.cu_seqlens_kv,
        packed.max_seqlen_q,
        packed.max_seqlen_kv,
        softmax_scale=scale,
        causal=True,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return out

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

from megatron_rl.data.types import PackedBatch


@dataclass(frozen=True, slots=True)
class LengthClasses:
    """How T packed tokens become right-padded batches and back. Built once per micro-batch."""

    tokens: tuple[Tensor, ...]  # per class [S_c, L_c] int64, position in the pack; padding repeats the last
    inverse: Tensor  # [T] int64, position of each token in the concatenated, flattened batches


@dataclass
class PackedParams(PackedSeqParams):
    """megatron-core's description of a packed micro-batch, with the batches that CPU attention works on."""

    classes: LengthClasses | None = field(default=None, repr=False)


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
    tokens: list[Tensor] = []
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
        tokens.append(index.to(cu_seqlens.device))
    return LengthClasses(tuple(tokens), inverse.to(cu_seqlens.device))


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
        if packed_seq_params.classes is None:
            out = _flash_attention(query, key, value, packed_seq_params, scale=self.scale)
        else:
            out = padded_attention(query, key, value, packed_seq_params.classes, scale=self.scale)
        return out.reshape(out.size(0), -1)


def padded_attention(
    query: Tensor, key: Tensor, value: Tensor, classes: LengthClasses, *, scale: float
) -> Tensor:
    """Causal attention inside each sequence through one batched call per length class; returns [T, Hq, D]."""
    outputs = []
    for tokens in classes.tokens:
        # real queries never see the padding behind them, and what padded queries see is dropped below
        q, k, v = (x[tokens].transpose(1, 2) for x in (query, key, value))  # [S_c, H, L_c, D]
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=query.size(1) != key.size(1)
        )
        outputs.append(out.transpose(1, 2).flatten(0, 1))  # [S_c * L_c, Hq, D]
    padded = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return padded[classes.inverse]


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

"""The model as it would be with one thing changed, for a moment: what a diagnosis compares an engine with.

A change lasts as long as its `with` block and is undone bit for bit. It is applied to the live parameters, so that
both a forward pass and a weight transfer inside the block see it. All ranks apply the same one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import Tensor

from megatron_rl.model.build import PolicyGPTModel
from megatron_rl.model.spec import ModelSpec

_ROW_VALUE = 0.02  # any number whose square is no rounding error


@dataclass(frozen=True, kw_only=True, slots=True)
class OnlyLayers:
    """Every tensor of the other layers is zero, so that they add nothing to what passes through them."""

    layers: frozenset[int]  # numbers as Hugging Face counts


@dataclass(frozen=True, kw_only=True, slots=True)
class EqualHead:
    """All rows of the head (of the embedding too, if tied) are the same: every token is equally likely."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherRope:
    """Rotary embedding of another base, with the model's own scaling or without."""

    theta: float
    scaled: bool


Change = OnlyLayers | EqualHead | OtherRope


@contextmanager
def changed(change: Change | None, chunks: Sequence[PolicyGPTModel], spec: ModelSpec) -> Iterator[None]:
    """`chunks` under `change` (None: as they are)."""
    with ExitStack() as undo:
        match change:
            case OnlyLayers(layers=layers):
                for param in _outside(layers, chunks):
                    undo.enter_context(_filled(param, 0.0))
            case EqualHead():
                for param in _heads(chunks, spec):
                    undo.enter_context(_filled(param, _ROW_VALUE))
            case OtherRope():
                for chunk in chunks:
                    undo.enter_context(_rotated(chunk, change, spec))
        yield


def _outside(layers: frozenset[int], chunks: Sequence[PolicyGPTModel]) -> Iterator[Tensor]:
    for chunk in chunks:
        for layer in chunk.decoder.layers:
            # megatron-core counts from 1, over all stages
            if layer.layer_number - 1 not in layers:
                yield from (param.data for param in layer.parameters())


def _heads(chunks: Sequence[PolicyGPTModel], spec: ModelSpec) -> Iterator[Tensor]:
    for chunk in chunks:
        for name, param in chunk.named_parameters():
            if name == "output_layer.weight" or (spec.tied and name == "embedding.word_embeddings.weight"):
                yield param.data


@contextmanager
def _filled(data: Tensor, value: float) -> Iterator[None]:
    # kept on the host: an accelerator may have no room for a second copy
    saved = data.to("cpu", copy=True)
    data.fill_(value)
    try:
        yield
    finally:
        data.copy_(saved)


@contextmanager
def _rotated(chunk: PolicyGPTModel, change: OtherRope, spec: ModelSpec) -> Iterator[None]:
    saved = chunk.rotary_pos_emb
    chunk.rotary_pos_emb = RotaryEmbedding(
        spec.head_dim,
        rotary_percent=1.0,
        # megatron-core annotates an integer and takes any number
        rotary_base=change.theta,
        rope_scaling=change.scaled and spec.rope_scaling is not None,
        rope_scaling_factor=spec.rope_scaling.factor if spec.rope_scaling else 1.0,
    )
    try:
        yield
    finally:
        chunk.rotary_pos_emb = saved

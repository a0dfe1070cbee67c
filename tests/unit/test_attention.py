"""Packed attention against the plain formula, one sequence at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_rl.model.attention import length_classes, padded_attention

LENGTHS = ([5], [1], [1, 1, 1], [3, 17, 4, 16, 1, 9], [8, 0, 7], [2] * 40 + [100])


def bounds(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def plain_attention(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, *, scale: float) -> Tensor:
    """softmax(q k^T * scale) v under a causal mask, inside each sequence; kv heads serve their group."""
    group = query.size(1) // key.size(1)
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    outputs = []
    for start, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        q, k, v = (x[start:end].transpose(0, 1) for x in (query, key, value))
        future = torch.ones(end - start, end - start, dtype=torch.bool).triu(1)
        scores = (q @ k.transpose(1, 2) * scale).masked_fill(future, float("-inf"))
        outputs.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: f"{len(lengths)}x{max(lengths)}")
def test_values_and_gradients_are_those_of_each_sequence_alone(lengths: list[int], kv_heads: int) -> None:
    cu_seqlens, total = bounds(lengths), sum(lengths)
    generator = torch.Generator().manual_seed(0)
    shapes = ((total, 4, 8), (total, kv_heads, 8), (total, kv_heads, 8))
    inputs = [torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes]
    weight = torch.randn(total, 4, 8, generator=generator, dtype=torch.float64)
    ours = padded_attention(*inputs, length_classes(cu_seqlens), scale=0.3)
    results = []
    for out in (ours, plain_attention(*inputs, cu_seqlens, scale=0.3)):
        results.append([out.detach(), *torch.autograd.grad((out * weight).sum(), inputs)])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: f"{len(lengths)}x{max(lengths)}")
def test_every_token_has_its_own_place_in_the_padded_batches(lengths: list[int]) -> None:
    classes = length_classes(bounds(lengths))
    flat = classes.index
    assert torch.equal(flat[classes.inverse], torch.arange(sum(lengths)))
    assert classes.inverse.unique().numel() == sum(lengths)


def test_similar_lengths_share_a_class_and_padding_stays_below_half() -> None:
    lengths = list(range(1, 200))
    classes = length_classes(bounds(lengths))
    assert len(classes.shapes) == 8
    assert classes.index.numel() < 2 * sum(lengths)

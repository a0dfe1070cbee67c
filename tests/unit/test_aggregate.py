"""Token weights and their global normalisers."""

import pytest
import torch

from megatron_rl.algo.aggregate import (
    micro_batch_mean_weights,
    normaliser,
    positive_normaliser,
    token_weights,
)
from megatron_rl.data.types import TrainSample

# sequences of 3, 2 and 4 positions; the second is fully masked
MASK = torch.tensor([False, True, True, False, False, True, True, True, True])
CU_SEQLENS = torch.tensor([0, 3, 5, 9], dtype=torch.int32)


def _sample(mask, *, is_positive=False):
    return TrainSample(token_ids=[1] * len(mask), loss_mask=mask, is_positive=is_positive)


SAMPLES = [
    _sample([False, False, True, True], is_positive=True),
    _sample([False, False, False]),
    # the first token has no label, so it is not trained on
    _sample([True, True, True, True, True]),
]


def test_token_mean_weighs_every_trained_token_alike():
    weights = token_weights("token_mean", loss_mask=MASK, cu_seqlens=CU_SEQLENS)
    assert weights.tolist() == [0, 1, 1, 0, 0, 1, 1, 1, 1]


def test_sequence_mean_weighs_every_sequence_alike():
    weights = token_weights("sequence_mean", loss_mask=MASK, cu_seqlens=CU_SEQLENS)
    assert weights.tolist() == [0, 0.5, 0.5, 0, 0, 0.25, 0.25, 0.25, 0.25]


@pytest.mark.parametrize("aggregate", ["token_mean", "sequence_mean"])
def test_weights_over_their_normaliser_add_up_to_one(aggregate):
    total = token_weights(aggregate, loss_mask=MASK, cu_seqlens=CU_SEQLENS).sum()
    assert float(total) == normaliser(SAMPLES, aggregate)


def test_normalisers_count_trained_tokens_or_sequences_that_have_any():
    assert normaliser(SAMPLES, "token_mean") == 6.0
    assert normaliser(SAMPLES, "sequence_mean") == 2.0
    assert positive_normaliser(SAMPLES) == 2.0


@pytest.mark.parametrize("aggregate", ["token_mean", "sequence_mean"])
def test_fully_masked_batch_has_zero_weights_and_not_nan(aggregate):
    weights = token_weights(aggregate, loss_mask=torch.zeros(9, dtype=torch.bool), cu_seqlens=CU_SEQLENS)
    assert weights.tolist() == [0.0] * 9


def test_sequence_sum_and_a_constant_length_weigh_tokens_alike_and_count_sequences():
    for aggregate in ("sequence_sum", "token_sum_norm"):
        weights = token_weights(aggregate, loss_mask=MASK, cu_seqlens=CU_SEQLENS)
        assert weights.tolist() == [0, 1, 1, 0, 0, 1, 1, 1, 1]
    assert normaliser(SAMPLES, "sequence_sum") == 2.0
    assert normaliser(SAMPLES, "token_sum_norm", loss_length=50) == 100.0


def test_a_micro_batch_s_own_mean_weighs_by_its_trained_sequences():
    weights = micro_batch_mean_weights(MASK, loss_mask=MASK, cu_seqlens=CU_SEQLENS)
    # two trained sequences, six trained tokens
    assert weights.tolist() == pytest.approx([0, 1 / 3, 1 / 3, 0, 0, 1 / 3, 1 / 3, 1 / 3, 1 / 3])
    positives = torch.tensor([False, True, True] + [False] * 6)
    of_positives = micro_batch_mean_weights(positives, loss_mask=MASK, cu_seqlens=CU_SEQLENS)
    assert of_positives.tolist() == [0, 1, 1, 0, 0, 0, 0, 0, 0]
    assert micro_batch_mean_weights(~MASK & MASK, loss_mask=MASK, cu_seqlens=CU_SEQLENS).tolist() == [0.0] * 9

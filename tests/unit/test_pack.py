"""The shift, the padding and the RL fields of a micro-batch, on examples small enough to read."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.data.pack import empty_batch, pack, pack_microbatch, unpack_per_token, with_old_logprobs
from megatron_rl.data.types import TrainSample
from megatron_rl.errors import DataError

FOUR = TrainSample(token_ids=[10, 11, 12, 13], loss_mask=[False, False, True, True], sample_id="four")
THREE = TrainSample(token_ids=[20, 21, 22], loss_mask=[True, True, False], sample_id="three")
ROLLOUTS = [
    TrainSample(
        token_ids=[10, 11, 12, 13],
        loss_mask=[False, False, True, True],
        rollout_logprobs=[0.0, 0.0, -1.0, -2.0],
        advantage=0.5,
        is_positive=True,
    ),
    TrainSample(
        token_ids=[20, 21, 22],
        loss_mask=[False, True, True],
        rollout_logprobs=[0.0, -3.0, -4.0],
        advantage=-0.25,
    ),
]


def test_two_samples_make_the_batch_of_the_docstring():
    batch = pack_microbatch([FOUR, THREE], [0, 1])
    assert batch.input_ids.tolist() == [10, 11, 12, 20, 21]
    assert batch.labels.tolist() == [11, 12, 13, 21, 22]
    assert batch.position_ids.tolist() == [0, 1, 2, 0, 1]
    assert batch.cu_seqlens.tolist() == [0, 3, 5]
    assert batch.loss_mask.tolist() == [False, True, True, True, False]
    assert batch.sample_index == (0, 1)
    assert batch.rl is None
    assert batch.max_seqlen == 3


def test_dtypes_are_those_of_the_contract():
    batch = pack_microbatch(ROLLOUTS, [0, 1], pad_multiple=4)
    assert [t.dtype for t in (batch.input_ids, batch.labels, batch.position_ids)] == [torch.int64] * 3
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.loss_mask.dtype == torch.bool
    fields = (batch.rl.advantages, batch.rl.rollout_logprobs, batch.rl.old_logprobs, batch.rl.positives)
    assert [t.dtype for t in fields] == [torch.float32] * 4


def test_padding_is_one_extra_sequence_that_is_never_trained_on():
    batch = pack_microbatch([FOUR, THREE], [0, 1], pad_multiple=4)
    assert batch.num_tokens == 8
    assert batch.cu_seqlens.tolist() == [0, 3, 5, 8]
    assert batch.position_ids.tolist() == [0, 1, 2, 0, 1, 0, 1, 2]
    assert batch.loss_mask.tolist()[5:] == [False] * 3
    assert batch.sample_index == (0, 1)


def test_rl_fields_are_aligned_to_labels_and_zero_where_not_trained_on():
    batch = pack_microbatch(ROLLOUTS, [1, 0], pad_multiple=3)
    assert batch.labels.tolist() == [21, 22, 11, 12, 13, 0]
    assert batch.rl.rollout_logprobs.tolist() == [-3.0, -4.0, 0.0, -1.0, -2.0, 0.0]
    assert batch.rl.advantages.tolist() == [-0.25, -0.25, 0.0, 0.5, 0.5, 0.0]
    assert batch.rl.positives.tolist() == [0.0, 0.0, 0.0, 1.0, 1.0, 0.0]
    assert batch.rl.old_logprobs.tolist() == [0.0] * 6


def test_old_logprobs_are_taken_where_trained_on_and_zero_elsewhere():
    batch = pack_microbatch(ROLLOUTS, [0, 1])
    updated = with_old_logprobs(
        batch, torch.tensor([-9.0, -1.0, -2.0, float("-inf"), -4.0], dtype=torch.float64)
    )
    assert updated.rl.old_logprobs.tolist() == [0.0, -1.0, -2.0, float("-inf"), -4.0]
    assert updated.rl.old_logprobs.dtype == torch.float32
    assert batch.rl.old_logprobs.tolist() == [0.0] * 5


def test_old_logprobs_of_a_supervised_batch_are_refused():
    with pytest.raises(DataError, match="supervised"):
        with_old_logprobs(pack_microbatch([FOUR], [0]), torch.zeros(3))


def test_old_logprobs_of_another_length_are_refused():
    with pytest.raises(DataError, match=r"shape \(4,\), need \(5,\)"):
        with_old_logprobs(pack_microbatch(ROLLOUTS, [0, 1]), torch.zeros(4))


def test_unpacking_gives_one_tensor_per_sample_without_padding():
    batch = pack_microbatch([FOUR, THREE], [1, 0], pad_multiple=8)
    parts = unpack_per_token(batch, batch.labels)
    assert [part.tolist() for part in parts] == [[21, 22], [11, 12, 13]]


@pytest.mark.parametrize("rl", [False, True], ids=["sft", "rl"])
@pytest.mark.parametrize("pad_multiple", [1, 2, 8])
def test_empty_batch_weighs_nothing_and_stands_for_no_sample(pad_multiple, rl):
    batch = empty_batch(pad_multiple=pad_multiple, rl=rl)
    assert batch.num_tokens % pad_multiple == 0
    assert batch.cu_seqlens.tolist() == [0, batch.num_tokens]
    assert not batch.loss_mask.any()
    assert unpack_per_token(batch, batch.labels) == []
    assert (batch.rl is not None) == rl


def test_no_index_packs_to_an_empty_batch_of_the_same_kind():
    assert pack_microbatch([FOUR], []).rl is None
    empty = pack_microbatch(ROLLOUTS, [], pad_multiple=4)
    assert empty.num_tokens == 4
    assert empty.rl.advantages.tolist() == [0.0] * 4


def test_sample_above_the_budget_is_an_error_that_names_it_and_the_key():
    with pytest.raises(
        DataError, match=r"sample four: 4 tokens take 3 positions, but tokens_per_microbatch is 2"
    ):
        pack([THREE, FOUR], tokens_per_microbatch=2)


def test_error_names_a_budget_that_works():
    with pytest.raises(DataError, match="raise tokens_per_microbatch to at least 4"):
        pack([FOUR], tokens_per_microbatch=3, pad_multiple=2)
    assert pack([FOUR], tokens_per_microbatch=4, pad_multiple=2)[0].num_tokens == 4


def test_sample_of_one_token_is_an_error_that_names_it():
    with pytest.raises(DataError, match="sample one: got 1 tokens, need at least 2"):
        pack([TrainSample(token_ids=[1], loss_mask=[True], sample_id="one")], tokens_per_microbatch=8)


def test_rollouts_and_supervised_samples_do_not_mix():
    with pytest.raises(DataError, match="1 of 2 samples carry rollout log-probs"):
        pack([ROLLOUTS[0], THREE], tokens_per_microbatch=8)

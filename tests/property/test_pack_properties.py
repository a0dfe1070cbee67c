"""Packing loses nothing, invents nothing and shifts once, whatever the samples."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.data.pack import pack, unpack_per_token
from megatron_rl.data.types import TrainSample

_tokens = st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=2, max_size=12)


@st.composite
def _cases(draw):
    with_rl = draw(st.booleans())
    samples = [
        TrainSample(
            token_ids=[token for token, _ in tokens],
            loss_mask=[trained for _, trained in tokens],
            rollout_logprobs=[-float(number) - 1 for number in range(len(tokens))] if with_rl else None,
            advantage=float(index + 1),
            sample_id=str(index),
        )
        for index, tokens in enumerate(draw(st.lists(_tokens, max_size=12)))
    ]
    pad_multiple = draw(st.sampled_from([1, 2, 3, 8]))
    budget = draw(st.integers(11 + pad_multiple, 60))
    return samples, budget, pad_multiple


def _pack(case):
    samples, budget, pad_multiple = case
    return pack(samples, tokens_per_microbatch=budget, pad_multiple=pad_multiple)


@given(_cases())
def test_every_sample_stands_in_exactly_one_batch(case):
    packed = sorted(index for batch in _pack(case) for index in batch.sample_index)
    assert packed == list(range(len(case[0])))


@given(_cases())
def test_every_trained_token_appears_exactly_once(case):
    trained = sum(int(batch.loss_mask.sum()) for batch in _pack(case))
    assert trained == sum(sample.num_trained_tokens for sample in case[0])


@given(_cases())
def test_sequences_partition_the_batch_within_budget_and_multiple(case):
    _, budget, pad_multiple = case
    for batch in _pack(case):
        bounds = batch.cu_seqlens
        assert bounds[0] == 0
        assert bounds[-1] == batch.num_tokens <= budget
        assert bool((bounds[1:] > bounds[:-1]).all())
        assert batch.num_tokens % pad_multiple == 0
        assert len(bounds) - 1 - len(batch.sample_index) in (0, 1)


@given(_cases())
def test_inputs_and_labels_of_each_sequence_are_its_sample_shifted_once(case):
    for batch in _pack(case):
        parts = [
            unpack_per_token(batch, t)
            for t in (batch.input_ids, batch.labels, batch.loss_mask, batch.position_ids)
        ]
        for index, inputs, labels, mask, positions in zip(batch.sample_index, *parts, strict=True):
            sample = case[0][index]
            assert inputs.tolist() == list(sample.token_ids[:-1])
            assert labels.tolist() == list(sample.token_ids[1:])
            assert mask.tolist() == list(sample.loss_mask[1:])
            assert positions.tolist() == list(range(len(inputs)))


@given(_cases())
def test_rl_fields_hold_the_samples_values_on_trained_tokens_and_zero_elsewhere(case):
    for batch in _pack(case):
        if batch.rl is None:
            assert case[0][0].rollout_logprobs is None
            continue
        assert torch.equal(batch.rl.rollout_logprobs != 0, batch.loss_mask)
        assert torch.equal(batch.rl.advantages != 0, batch.loss_mask)
        for index, values in zip(
            batch.sample_index, unpack_per_token(batch, batch.rl.rollout_logprobs), strict=True
        ):
            sample = case[0][index]
            aligned = zip(sample.loss_mask[1:], sample.rollout_logprobs[1:], strict=True)
            assert values.tolist() == [logprob if trained else 0.0 for trained, logprob in aligned]


@given(_cases())
def test_packing_twice_gives_the_same_batches(case):
    for first, second in zip(_pack(case), _pack(case), strict=True):
        assert first.sample_index == second.sample_index
        assert torch.equal(first.input_ids, second.input_ids)

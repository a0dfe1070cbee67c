"""Balance is an exact partition, agreed counts, and never far from even."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.data.balance import assign, microbatch_plan
from megatron_rl.data.types import TrainSample

_lengths = st.lists(st.integers(1, 20), max_size=40)


@given(st.lists(st.integers(0, 20), max_size=40), st.integers(1, 8))
def test_every_index_goes_to_exactly_one_rank(lengths, num_ranks):
    ranks = assign(lengths, num_ranks)
    assert len(ranks) == num_ranks
    assert sorted(index for rank in ranks for index in rank) == list(range(len(lengths)))


@given(_lengths, st.integers(1, 8))
def test_ranks_differ_by_at_most_the_longest_sample(lengths, num_ranks):
    totals = [sum(lengths[index] for index in rank) for rank in assign(lengths, num_ranks)]
    assert max(totals) - min(totals) <= max(lengths, default=0)


@given(
    _lengths,
    st.integers(1, 4),
    st.integers(20, 60),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([0.0, 0.1]),
)
def test_plan_is_an_exact_partition_with_agreed_counts_within_budget(
    lengths, dp, budget, pad_multiple, multiple_of, attention_weight
):
    samples = [TrainSample(token_ids=[1] * (n + 1), loss_mask=[True] * (n + 1)) for n in lengths]
    plan = microbatch_plan(
        samples,
        dp=dp,
        tokens_per_microbatch=budget,
        pad_multiple=pad_multiple,
        multiple_of=multiple_of,
        attention_weight=attention_weight,
    )
    assert len(plan) == dp
    assert sorted(i for rank in plan for one in rank for i in one) == list(range(len(lengths)))
    counts = {len(rank) for rank in plan}
    assert len(counts) == 1
    assert min(counts) >= 1
    assert min(counts) % multiple_of == 0
    usable = budget // pad_multiple * pad_multiple
    assert all(sum(lengths[i] for i in one) <= usable for rank in plan for one in rank)
    # any two bins of best fit hold more than one budget: never twice as many as the fullest rank needs
    fullest = max(sum(lengths[i] for one in rank for i in one) for rank in plan)
    assert min(counts) < 2 * -(-fullest // usable) + multiple_of or not lengths

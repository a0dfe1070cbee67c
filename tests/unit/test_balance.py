"""Work is spread evenly over ranks and micro-batches."""

from __future__ import annotations

import pytest

from megatron_rl.data.balance import assign, microbatch_plan
from megatron_rl.data.types import TrainSample
from megatron_rl.errors import DataError


def _samples(lengths):
    return [
        TrainSample(token_ids=[1] * (n + 1), loss_mask=[True] * (n + 1), sample_id=f"s{n}") for n in lengths
    ]


def test_long_and_short_samples_share_ranks():
    assert assign([9, 8, 1, 2], 2) == [[0, 2], [1, 3]]


def test_equal_samples_go_round_in_equal_numbers():
    assert assign([5] * 6, 3) == [[0, 3], [1, 4], [2, 5]]


def test_samples_of_no_length_go_round_in_equal_numbers():
    assert [len(indices) for indices in assign([0] * 6, 3)] == [2, 2, 2]


def test_more_ranks_than_samples_leaves_ranks_empty():
    assert assign([3], 3) == [[0], [], []]


def test_rank_with_less_work_gets_empty_microbatches():
    assert microbatch_plan(_samples([4, 4, 4]), dp=2, tokens_per_microbatch=4) == [[[0], [2]], [[1], []]]


def test_microbatches_are_rounded_up_and_filled_evenly():
    plan = microbatch_plan(_samples([2] * 8), dp=1, tokens_per_microbatch=16, multiple_of=4)
    assert plan == [[[0, 4], [1, 5], [2, 6], [3, 7]]]


def test_exactly_filled_microbatches_stay_within_the_budget():
    # Greedy spreading alone would make 3 + 2 + 2 = 7 here.
    plan = microbatch_plan(_samples([3, 3, 2, 2, 2]), dp=1, tokens_per_microbatch=6)
    assert sorted(map(sorted, plan[0])) == [[0, 1], [2, 3, 4]]


def test_no_samples_still_give_every_rank_the_same_number_of_microbatches():
    assert microbatch_plan([], dp=2, tokens_per_microbatch=4, multiple_of=2) == [[[], []], [[], []]]


def test_sample_above_the_budget_is_an_error_that_names_it():
    with pytest.raises(
        DataError, match=r"sample s9: 10 tokens take 9 positions, but tokens_per_microbatch is 8"
    ):
        microbatch_plan(_samples([1, 9]), dp=2, tokens_per_microbatch=8)

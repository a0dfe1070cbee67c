"""Which replica answers which request: blocks that depend on nothing, or whoever has the least to do."""

import pytest

from megatron_rl.rollout.engine import GenerateRequest
from megatron_rl.rollout.routing import Load, even_blocks, groups_of, imbalance, least_loaded, tokens_of


def request(prompt, max_tokens=10):
    return GenerateRequest(prompt_token_ids=prompt, seed=0, max_tokens=max_tokens, temperature=1.0)


@pytest.mark.parametrize("replicas", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 64])
def test_even_blocks_hold_every_request_once_in_order_and_differ_by_no_more_than_the_last(count, replicas):
    blocks = even_blocks(count, replicas)
    assert [i for block in blocks for i in block] == list(range(count))
    assert len(blocks) <= replicas and all(blocks)
    assert len(set(map(len, blocks[:-1]))) <= 1


def test_requests_of_one_prompt_that_follow_each_other_are_a_group():
    requests = [request(prompt) for prompt in ([1, 2], (1, 2), [3], [1, 2])]
    assert groups_of(requests) == [range(2), range(2, 3), range(3, 4)]
    assert groups_of([]) == []


def load(requests, tokens):
    return Load(requests=requests, tokens=tokens)


def test_the_replica_with_the_fewest_outstanding_tokens_is_next():
    assert least_loaded([load(1, 300), load(2, 100), load(1, 200)], max_concurrent=8) == 1
    # few but long ones count more than many short ones
    assert least_loaded([load(1, 5000), load(7, 700)], max_concurrent=8) == 1


def test_ties_go_to_fewer_requests_then_to_the_first():
    assert least_loaded([load(2, 100), load(1, 100), load(1, 100)], max_concurrent=8) == 1
    assert least_loaded([load(0, 0), load(0, 0)], max_concurrent=8) == 0


def test_a_full_or_lost_replica_takes_nothing_and_with_all_full_requests_wait():
    assert least_loaded([load(8, 80), load(7, 7000)], max_concurrent=8) == 1
    assert least_loaded([None, load(7, 7000)], max_concurrent=8) == 1
    assert least_loaded([load(8, 80), load(9, 90)], max_concurrent=8) is None
    assert least_loaded([None, None], max_concurrent=8) is None


def test_a_request_costs_its_prompt_and_the_longest_answer():
    assert tokens_of(request([1, 2, 3], max_tokens=100)) == 103


def test_imbalance_is_the_busiest_over_the_mean():
    assert imbalance([3.0, 1.0]) == 1.5
    assert imbalance([2.0, 2.0, 2.0]) == 1.0
    assert imbalance([3.0]) is None and imbalance([0.0, 0.0]) is None

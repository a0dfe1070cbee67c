"""Group advantages and the groups that carry no signal."""

import math

import pytest
import torch

from megatron_rl.algo.advantages import (
    ADVANTAGES,
    advantages,
    group_mean_advantages,
    group_std_advantages,
    is_zero_advantage,
    leave_one_out_advantages,
    reinforce_pp_advantages,
)
from megatron_rl.data.types import Verdict
from megatron_rl.errors import DataError
from megatron_rl_kernels.group_advantage import group_advantage


def test_group_std_uses_the_population_deviation_and_keeps_the_order():
    # mean 2, squares 4 0 4 0: population deviation sqrt(2), the unbiased one would be sqrt(8/3)
    want = [2 / math.sqrt(2), 0.0, -2 / math.sqrt(2), 0.0]
    assert group_std_advantages([4.0, 2.0, 0.0, 2.0], eps=0.0) == pytest.approx(want, abs=1e-15)


def test_eps_is_added_to_the_deviation():
    assert group_std_advantages([1.0, 0.0], eps=0.5) == [0.5, -0.5]


def test_group_mean_only_centres():
    assert group_mean_advantages([1.0, 0.0, 0.0, 0.0]) == [0.75, -0.25, -0.25, -0.25]


@pytest.mark.parametrize("name", ["group_std", "group_mean"])
def test_equal_rewards_give_exact_zeros(name):
    # 0.1 * 3 / 3 is not 0.1 in floating point
    assert ADVANTAGES[name]([0.1] * 3) == [0.0] * 3


@pytest.mark.parametrize("name", ["group_std", "group_mean"])
def test_advantages_of_a_group_add_up_to_zero(name):
    assert sum(ADVANTAGES[name]([1.1, 0.1, 0.1, 1.0, 0.0])) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("name", ["group_std", "group_mean"])
@pytest.mark.parametrize(
    ("rewards", "words"),
    [([], "group of 0"), ([1.0], "group of 1"), ([1.0, math.nan], "reward 1"), ([math.inf, 0.0], "reward 0")],
)
def test_groups_without_a_baseline_are_refused(name, rewards, words):
    with pytest.raises(DataError, match=words):
        ADVANTAGES[name](rewards)


@pytest.mark.parametrize(
    ("outcomes", "want"),
    [
        ([Verdict.CORRECT, Verdict.CORRECT], True),
        ([Verdict.WRONG, Verdict.NO_ANSWER, Verdict.TIMEOUT], True),
        ([Verdict.WRONG, Verdict.CORRECT], False),
        ([0.25, 0.25], True),
        ([0.25, 0.5], False),
        ([0.0, 1e-12], False),
    ],
)
def test_signal_is_decided_by_what_the_task_said(outcomes, want):
    assert is_zero_advantage(outcomes) is want


def test_group_without_graded_rollouts_is_refused():
    with pytest.raises(DataError, match="without graded rollouts"):
        is_zero_advantage([])


GROUPS = [[1.0, 0.0, 0.5], [0.25, 0.25], [2.0, -1.0, 0.0, 0.5]]
TOKENS = [[3, 1, 2], [5, 5], [1, 1, 4, 2]]


@pytest.mark.parametrize(
    ("name", "mode", "options"),
    [
        ("group_std", "std", {}),
        ("group_std", "std", {"unbiased": True}),
        ("group_mean", "mean", {}),
        ("leave_one_out", "leave_one_out", {}),
        ("batch_std", "batch_std", {}),
        ("reinforce_pp_baseline", "centred_batch_std", {}),
    ],
)
def test_recipe_s_advantages_are_those_of_the_kernel(name, mode, options):
    reward = torch.tensor([value for group in GROUPS for value in group], dtype=torch.float64)
    ids = torch.tensor([number for number, group in enumerate(GROUPS) for _ in group])
    want = group_advantage(reward, mode=mode, group_ids=ids, **options)
    got = advantages(name, GROUPS, tokens=TOKENS, **options)
    assert [len(group) for group in got] == [3, 2, 4]
    assert [value for group in got for value in group] == pytest.approx(want.tolist(), abs=1e-12)
    # equal rewards of a group, exact zeros
    assert got[1] == [0.0, 0.0]


def test_unbiased_deviation_of_eight_is_smaller_in_advantage_by_the_root_of_seven_eighths():
    rewards = [1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0]
    plain, unbiased = (
        group_std_advantages(rewards, eps=0.0),
        group_std_advantages(rewards, eps=0.0, unbiased=True),
    )
    assert unbiased == pytest.approx([value * math.sqrt(7 / 8) for value in plain])


def test_leave_one_out_compares_with_the_mean_of_the_others():
    assert leave_one_out_advantages([1.0, 0.0, 0.5]) == pytest.approx([1 - 0.25, -0.75, 0.0])


def test_reinforce_pp_whitens_over_all_tokens_of_the_batch():
    got = reinforce_pp_advantages(GROUPS, TOKENS, eps=0.0)
    pairs = [
        (a, n) for group, tokens in zip(got, TOKENS, strict=True) for a, n in zip(group, tokens, strict=True)
    ]
    total = sum(n for _, n in pairs)
    assert sum(a * n for a, n in pairs) / total == pytest.approx(0.0, abs=1e-12)
    assert sum(a * a * n for a, n in pairs) / total == pytest.approx(1.0)
    # by hand: rewards 1, 1, 0 of 1, 1 and 2 tokens have a mean of 1/2 and a deviation of 1/2
    assert reinforce_pp_advantages([[1.0, 1.0], [0.0]], [[1, 1], [2]], eps=0.0) == [[1.0, 1.0], [-1.0]]


def test_a_batch_without_differences_or_tokens_has_no_advantage():
    assert reinforce_pp_advantages([[0.1] * 3], [[1, 2, 3]]) == [[0.0] * 3]
    assert reinforce_pp_advantages([[0.0, 1.0]], [[0, 0]]) == [[0.0] * 2]
    for name in ("batch_std", "reinforce_pp_baseline", "reinforce_pp", "leave_one_out"):
        assert advantages(name, [], tokens=[]) == []
        with pytest.raises(DataError, match="reward 1"):
            advantages(name, [[0.0, math.nan]], tokens=[[1, 1]])


def test_batch_forms_look_at_every_group():
    one = advantages("batch_std", GROUPS[:1], tokens=TOKENS[:1])
    assert advantages("batch_std", GROUPS, tokens=TOKENS)[0] != one[0]

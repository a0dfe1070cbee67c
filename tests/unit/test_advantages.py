"""Group advantages and the groups that carry no signal."""

import math

import pytest

from megatron_rl.algo.advantages import (
    ADVANTAGES,
    group_mean_advantages,
    group_std_advantages,
    is_zero_advantage,
)
from megatron_rl.data.types import Verdict
from megatron_rl.errors import DataError


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

"""group_advantage, each implementation: formulas, exact zeros, groups in any order, errors."""

import math
from typing import get_args

import pytest
import torch

from megatron_rl.algo.advantages import group_mean_advantages, group_std_advantages
from megatron_rl_kernels.group_advantage import Mode, group_advantage

MODES = get_args(Mode)
each_impl = pytest.mark.parametrize("impl", ["reference", "portable", "triton"])
each_mode = pytest.mark.parametrize("mode", MODES)


def _close(got, want, *, rtol=2e-6):
    # float32 sums of a few dozen rewards of size 1
    torch.testing.assert_close(got.double(), torch.as_tensor(want, dtype=torch.float64), rtol=rtol, atol=1e-6)


@each_impl
@pytest.mark.parametrize("mode, unbiased, want", [
    ("mean", False, [0.75, -0.25, -0.25, -0.25, 0.5, 0.5, -1.5, 0.5]),
    ("std", False, [value / (3**0.5 / 4 + 0.5) for value in (0.75, -0.25, -0.25, -0.25)]
        + [value / (0.75**0.5 + 0.5) for value in (0.5, 0.5, -1.5, 0.5)]),
    ("std", True, [value / (0.5 + 0.5) for value in (0.75, -0.25, -0.25, -0.25)]
        + [value / (1.0 + 0.5) for value in (0.5, 0.5, -1.5, 0.5)]),
    ("leave_one_out", False, [1.0, -1 / 3, -1 / 3, -1 / 3, 2 / 3, 2 / 3, -2.0, 2 / 3]),
    # rewards 1 0 0 0 1 1 -1 1: mean 3/8, sum of squares 5 - 9/8
    ("batch_std", False, [value / ((3.875 / 8) ** 0.5 + 0.5)
        for value in (0.75, -0.25, -0.25, -0.25, 0.5, 0.5, -1.5, 0.5)]),
    # advantages before scaling: mean 0, sum of squares 0.75 + 3
    ("centred_batch_std", True, [value / ((3.75 / 7) ** 0.5 + 0.5)
        for value in (0.75, -0.25, -0.25, -0.25, 0.5, 0.5, -1.5, 0.5)]),
])  # fmt: skip
def test_formula_of_each_mode_by_hand(impl, mode, unbiased, want):
    reward = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, -1.0, 1.0])
    _close(group_advantage(reward, mode=mode, group_size=4, unbiased=unbiased, eps=0.5, impl=impl), want)


@each_impl
@pytest.mark.parametrize("mode, python", [("std", group_std_advantages), ("mean", group_mean_advantages)])
def test_same_numbers_as_the_advantages_of_the_trainer(impl, mode, python):
    rewards = torch.rand(6, 8, generator=torch.Generator().manual_seed(1)).round(decimals=1)
    want = [value for group in rewards.double().tolist() for value in python(group)]
    _close(group_advantage(rewards.flatten(), mode=mode, group_size=8, impl=impl), want)


@pytest.mark.parametrize("impl", ["portable", "triton"])
@each_mode
@pytest.mark.parametrize("unbiased", [False, True])
def test_shuffled_groups_of_uneven_sizes_equal_the_reference_in_float64(impl, mode, unbiased):
    draw = torch.Generator().manual_seed(2)
    # one group longer than a block of the kernel, ids far apart and negative
    sizes = torch.tensor([2, 3, 150, 16, 2, 7])
    ids = torch.tensor([5, -9, 1 << 40, 0, 17, -(1 << 62)]).repeat_interleave(sizes)
    ids = ids[torch.randperm(len(ids), generator=draw)]
    reward = 10 + torch.randn(len(ids), generator=draw)
    got = group_advantage(reward, mode=mode, group_ids=ids, unbiased=unbiased, impl=impl)
    want = group_advantage(reward.double(), mode=mode, group_ids=ids, unbiased=unbiased, impl="reference")
    _close(got, want, rtol=1e-5)
    for one in ids.unique():
        assert abs(got[ids == one].sum()) < 1e-3


@each_impl
@each_mode
@pytest.mark.parametrize("eps, value", [(1e-6, 0.1), (0.0, 0.1), (0.0, 1e6 + 0.7), (0.0, -0.0)])
def test_equal_rewards_give_exact_zeros_whatever_their_mean_rounds_to(impl, mode, eps, value):
    # sums of 0.1 do not round to multiples of 0.1; the third group varies, so that nothing hides behind a zero std
    reward = torch.full((3, 7), value)
    reward[2] = torch.arange(7.0)
    got = group_advantage(reward.flatten(), mode=mode, group_size=7, eps=eps, impl=impl)
    assert got[14:].isfinite().all() and (got[14:][torch.arange(7) != 3] != 0).all()
    assert (got[:14] == 0).all()


@each_impl
@each_mode
def test_batch_of_equal_rewards_gives_zeros(impl, mode):
    reward = torch.full((6,), 0.1)
    for eps in (1e-6, 0.0):
        assert (group_advantage(reward, mode=mode, group_size=3, eps=eps, impl=impl) == 0).all()


@pytest.mark.parametrize("impl", ["portable", "triton"])
@each_mode
def test_offset_of_all_rewards_costs_no_digits(impl, mode):
    # the sum of 64 numbers near 2^21 has a last bit of 16 in float32: a plain mean would be off by 3 / 64
    reward = torch.zeros(64)
    reward[:13] = 1.0
    want = group_advantage(reward, mode=mode, group_size=64, impl=impl)
    _close(group_advantage(reward + 2.0**21, mode=mode, group_size=64, impl=impl), want.double())


@each_impl
@each_mode
def test_group_of_one_is_an_error_and_zero_where_that_is_asked_for(impl, mode):
    reward, ids = torch.tensor([3.0, 1.0, 0.0]), torch.tensor([4, 7, 7])
    with pytest.raises(ValueError, match="1 groups have one rollout"):
        group_advantage(reward, mode=mode, group_ids=ids, impl=impl)
    got = group_advantage(reward, mode=mode, group_ids=ids, validate=False, impl=impl)
    assert got[0] == 0 and got[1] > 0 and got[2] < 0


@each_impl
@each_mode
def test_no_rollouts_give_no_advantages(impl, mode):
    empty = torch.empty(0)
    assert group_advantage(empty, mode=mode, group_size=4, impl=impl).shape == (0,)
    assert group_advantage(
        empty, mode=mode, group_ids=torch.empty(0, dtype=torch.int64), impl=impl
    ).shape == (0,)


@each_impl
@each_mode
def test_same_bits_in_every_run_and_in_any_order_of_the_groups(impl, mode):
    draw = torch.Generator().manual_seed(4)
    reward, ids = torch.randn(96, generator=draw), torch.arange(12).repeat_interleave(8)
    first = group_advantage(reward, mode=mode, group_ids=ids, impl=impl)
    assert torch.equal(first, group_advantage(reward, mode=mode, group_ids=ids, impl=impl))
    assert torch.equal(first, group_advantage(reward, mode=mode, group_size=8, impl=impl))
    if not mode.endswith("batch_std"):
        assert torch.equal(first, group_advantage(reward, mode=mode, group_ids=-ids, impl=impl))
        assert torch.equal(first[40:], group_advantage(reward[40:], mode=mode, group_size=8, impl=impl))


@each_impl
def test_strided_rewards_are_read_and_not_written(impl):
    wide = torch.rand(16, 2, generator=torch.Generator().manual_seed(5))
    before = wide.clone()
    got = group_advantage(wide[:, 1], mode="std", group_size=4, impl=impl)
    assert torch.equal(got, group_advantage(wide[:, 1].clone(), mode="std", group_size=4, impl=impl))
    assert torch.equal(wide, before)


@each_impl
def test_reward_that_is_not_finite_is_an_error_or_spoils_its_group_alone(impl):
    reward = torch.tensor([1.0, math.nan, 0.0, 1.0])
    with pytest.raises(ValueError, match="1 rewards are not finite"):
        group_advantage(reward, mode="std", group_size=2, impl=impl)
    got = group_advantage(reward, mode="std", group_size=2, validate=False, impl=impl)
    assert got[:2].isnan().all() and got[2:].isfinite().all()


@pytest.mark.parametrize("error, match, arguments", [
    (ValueError, "one of the two", {}),
    (ValueError, "one of the two", {"group_size": 2, "group_ids": torch.zeros(4, dtype=torch.int64)}),
    (ValueError, "group_size = 1, at least 2", {"group_size": 1}),
    (ValueError, "no multiple of group_size = 3", {"group_size": 3}),
    (TypeError, "group_ids of torch.int32", {"group_ids": torch.zeros(4, dtype=torch.int32)}),
    (ValueError, r"group_ids \(3,\)", {"group_ids": torch.zeros(3, dtype=torch.int64)}),
    (ValueError, "mode = 'median', must be one of mean", {"group_size": 2, "mode": "median"}),
    (ValueError, "eps = -1", {"group_size": 2, "eps": -1}),
    (ValueError, "impl = 'host'; this op has reference", {"group_size": 2, "impl": "host"}),
])  # fmt: skip
def test_wrong_argument_is_named(error, match, arguments):
    with pytest.raises(error, match=match):
        group_advantage(torch.arange(4.0), **({"mode": "std"} | arguments))


def test_reward_of_another_type_or_shape_is_named():
    with pytest.raises(TypeError, match=r"reward \(4,\) of torch.int64"):
        group_advantage(torch.arange(4), mode="std", group_size=2)
    with pytest.raises(TypeError, match=r"reward \(2, 2\)"):
        group_advantage(torch.zeros(2, 2), mode="std", group_size=2)
    with pytest.raises(TypeError, match="'triton' takes float32"):
        group_advantage(torch.zeros(4).double(), mode="std", group_size=2, impl="triton")


@pytest.mark.parametrize("impl", ["reference", "portable", "triton"])
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_group_of_rewards_that_are_all_not_finite_is_spoilt(value, impl):
    reward = torch.tensor([value, value, 0.0, 1.0])
    got = group_advantage(reward, mode="mean", group_size=2, validate=False, impl=impl)
    assert got.isnan().tolist() == [True, True, False, False]


def test_reward_whose_square_leaves_float32_is_refused():
    with pytest.raises(ValueError, match="1 rewards are not finite or beyond 1e"):
        group_advantage(torch.tensor([1e30, 0.0]), mode="std", group_size=2)


@pytest.mark.parametrize("size", [2.0, True, "2"])
def test_group_size_that_is_no_int_is_named(size):
    with pytest.raises(TypeError, match=r"group_advantage: group_size = .* must be an int"):
        group_advantage(torch.ones(4), mode="std", group_size=size)

"""Surrogates at their edges: ties, masks, huge ratios, and what a recipe selects."""

import math

import pytest
import torch

from megatron_rl.algo.surrogates import clip_higher, gppo, grpo, make_surrogate
from megatron_rl.errors import RecipeError
from megatron_rl.recipe.stages import AlgorithmConfig
from tests.helpers.losses import per_token

ALL = [grpo(0.2), clip_higher(0.2, 0.28), gppo(0.2, 0.28)]
IDS = ["grpo", "clip_higher", "gppo"]


def _at(surrogate, ratios, advantages, mask=None):
    """Surrogate at given ratios, in float64."""
    logprobs = torch.tensor(ratios, dtype=torch.float64).log()
    advantages = torch.tensor(advantages, dtype=torch.float64)
    mask = torch.ones_like(logprobs, dtype=torch.bool) if mask is None else torch.tensor(mask)
    return per_token(surrogate, logprobs, torch.zeros_like(logprobs), advantages, mask)


def test_clip_higher_cuts_the_gradient_of_clipped_tokens():
    out = _at(clip_higher(0.2, 0.28), [1.5, 1.5, 0.5, 0.5], [2.0, -2.0, 2.0, -2.0])
    assert out.loss.tolist() == pytest.approx([-2.56, 3.0, -1.0, 1.6])
    assert out.grad_weight.tolist() == pytest.approx([0.0, 3.0, -1.0, 0.0])
    assert out.clipped_high.tolist() == [True, False, False, False]
    assert out.clipped_low.tolist() == [False, False, False, True]


def test_gppo_keeps_the_bound_as_gradient_weight_where_clip_higher_gives_zero():
    out = _at(gppo(0.2, 0.28), [1.5, 1.5, 0.5, 0.5], [2.0, -2.0, 2.0, -2.0])
    assert out.loss.tolist() == pytest.approx([-2.56, 3.0, -1.0, 1.6])
    assert out.grad_weight.tolist() == pytest.approx([-2.56, 3.0, -1.0, 1.6])


def test_gppo_betas_scale_the_clipped_branches_in_value_and_gradient():
    out = _at(gppo(0.2, 0.28, beta_low=0.5, beta_high=0.75), [1.5, 0.5, 1.0], [1.0, -1.0, 1.0])
    assert out.loss.tolist() == pytest.approx([-0.96, 0.4, -1.0])
    assert out.grad_weight.tolist() == pytest.approx([-0.96, 0.4, -1.0])


def test_grpo_clips_both_sides_at_the_same_distance():
    out = _at(grpo(0.2), [1.25, 0.75], [1.0, -1.0])
    assert out.loss.tolist() == pytest.approx([-1.2, 0.8])
    assert out.grad_weight.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("surrogate", ALL, ids=IDS)
def test_first_update_has_ratio_one_and_gradient_of_minus_the_advantage(surrogate):
    out = _at(surrogate, [1.0, 1.0], [1.5, -0.5])
    assert out.loss.tolist() == out.grad_weight.tolist() == [-1.5, 0.5]


def test_ratio_equal_to_its_bound_is_not_clipped():
    # bounds of 1.5 and 0.5; the ratios are those bounds exactly, as exp(log) may not be
    surrogate = clip_higher(0.5, 0.5)
    log_ratio = torch.tensor([1.5, 0.5]).log()
    assert log_ratio.exp().tolist() == [1.5, 0.5]
    out = per_token(
        surrogate, log_ratio, torch.zeros(2), torch.tensor([1.0, -1.0]), torch.ones(2, dtype=torch.bool)
    )
    assert not out.clipped_high.any() and not out.clipped_low.any()
    assert out.grad_weight.tolist() == [-1.5, 0.5]


@pytest.mark.parametrize("surrogate", ALL, ids=IDS)
def test_zero_advantage_gives_nothing_at_any_ratio(surrogate):
    out = _at(surrogate, [0.01, 1.0, 100.0], [0.0, 0.0, 0.0])
    assert out.loss.tolist() == out.grad_weight.tolist() == [0.0, 0.0, 0.0]
    assert not out.clipped_high.any() and not out.clipped_low.any()


@pytest.mark.parametrize("surrogate", ALL, ids=IDS)
def test_masked_positions_may_hold_anything(surrogate):
    bad = torch.tensor([math.nan, -math.inf, math.inf, 0.0])
    keep = torch.tensor([False, False, False, True])
    out = per_token(
        surrogate, bad, bad.flip(0) * torch.tensor([1.0, 1.0, 1.0, 0.0]).where(~keep, 0.0), bad + 1, keep
    )
    assert out.loss[:3].tolist() == out.grad_weight[:3].tolist() == [0.0, 0.0, 0.0]
    assert not out.clipped_high[:3].any() and not out.clipped_low[:3].any()


@pytest.mark.parametrize("surrogate", ALL, ids=IDS)
@pytest.mark.parametrize("log_ratio", [-1000.0, 1000.0])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_huge_log_ratios_stay_finite(surrogate, log_ratio, advantage):
    out = per_token(
        surrogate,
        torch.tensor([log_ratio]),
        torch.zeros(1),
        torch.tensor([advantage]),
        torch.ones(1, dtype=torch.bool),
    )
    assert torch.isfinite(out.loss).all() and torch.isfinite(out.grad_weight).all()


def test_gppo_gradient_survives_a_log_ratio_beyond_the_clamp():
    one = torch.ones(1)
    out = per_token(gppo(0.2, 0.28), 50 * one, 0 * one, one, one.bool())
    assert out.grad_weight.tolist() == pytest.approx([-1.28])


def test_dual_clip_bounds_negative_advantages_with_zero_gradient():
    out = _at(clip_higher(0.2, 0.28, dual_clip=3.0), [4.0, 2.0, 4.0], [-1.0, -1.0, 1.0])
    assert out.loss.tolist() == pytest.approx([3.0, 2.0, -1.28])
    assert out.grad_weight.tolist() == pytest.approx([0.0, 2.0, 0.0])
    assert out.clipped_high.tolist() == [True, False, True]


@pytest.mark.parametrize(
    ("config", "want"),
    [
        (AlgorithmConfig(surrogate="grpo", clip_low=0.1, clip_high=0.3), grpo(0.1)),
        (AlgorithmConfig(surrogate="clip_higher", dual_clip=10.0), clip_higher(0.2, 0.28, dual_clip=10.0)),
        (
            AlgorithmConfig(surrogate="gppo", beta_low=0.5, beta_high=0.75, dual_clip=5.0),
            gppo(0.2, 0.28, beta_low=0.5, beta_high=0.75, dual_clip=5.0),
        ),
    ],
    ids=["grpo", "clip_higher", "gppo"],
)
def test_recipe_selects_the_surrogate_with_its_bounds(config, want):
    assert make_surrogate(config) == want


def test_dual_clip_that_would_cut_the_clip_range_is_refused():
    with pytest.raises(RecipeError, match=r"algorithm.dual_clip: got 0.9"):
        make_surrogate(AlgorithmConfig(dual_clip=0.9))

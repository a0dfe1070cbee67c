"""Closed forms of the surrogates against autograd of their published definitions, in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.algo.surrogates import clip_higher, gppo
from tests.helpers.losses import per_token

LOW, HIGH = 0.2, 0.28
TOKENS = st.lists(
    st.tuples(st.floats(-3, 3), st.one_of(st.just(0.0), st.floats(-2, 2))), min_size=1, max_size=20
)


def _ppo_definition(logprob, advantage, dual_clip):
    """-min(r A, clip(r) A), and for A < 0 not more than -c A (arXiv 1707.06347, 1912.09729)."""
    ratio = logprob.exp()
    loss = -torch.minimum(ratio * advantage, ratio.clamp(1 - LOW, 1 + HIGH) * advantage)
    if dual_clip is not None:
        loss = torch.where(advantage < 0, torch.minimum(loss, -dual_clip * advantage), loss)
    return loss


def _gppo_definition(logprob, advantage, beta_low, beta_high):
    """arXiv 2508.07629, equations 17 and 18: the clipped branch is (bound / sg(r)) r, scaled by beta."""
    ratio = logprob.exp()
    one = ratio / ratio.detach()
    objective = ratio * advantage
    high, low = (advantage > 0) & (ratio > 1 + HIGH), (advantage < 0) & (ratio < 1 - LOW)
    objective = torch.where(high, beta_high * (1 + HIGH) * one * advantage, objective)
    return -torch.where(low, beta_low * (1 - LOW) * one * advantage, objective)


def _gppo_definition_as_a_minimum(logprob, advantage):
    """arXiv 2508.07629, equation 11: min(r A, clip(r, (1 - low) r / sg(r), (1 + high) r / sg(r)) A)."""
    ratio = logprob.exp()
    one = ratio / ratio.detach()
    clipped = torch.maximum(torch.minimum(ratio, (1 + HIGH) * one), (1 - LOW) * one)
    return -torch.minimum(ratio * advantage, clipped * advantage)


def _check(tokens, surrogate, definition):
    log_ratio, advantage = torch.tensor(tokens, dtype=torch.float64).unbind(1)
    old = torch.linspace(-5, -1, len(tokens), dtype=torch.float64)
    logprob = (log_ratio + old).requires_grad_()
    got = per_token(surrogate, logprob, old, advantage, torch.ones(len(tokens), dtype=torch.bool))
    want = definition(logprob - old, advantage)
    (grad,) = torch.autograd.grad(want.sum(), logprob)
    torch.testing.assert_close(got.loss, want.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got.grad_weight, grad, rtol=1e-12, atol=1e-12)
    return got


@settings(deadline=None)
@given(tokens=TOKENS, dual_clip=st.sampled_from([None, 3.0, 10.0]))
def test_clip_higher_equals_autograd_of_ppo(tokens, dual_clip):
    surrogate = clip_higher(LOW, HIGH, dual_clip=dual_clip)
    _check(tokens, surrogate, lambda logprob, advantage: _ppo_definition(logprob, advantage, dual_clip))


@settings(deadline=None)
@given(tokens=TOKENS, beta_low=st.sampled_from([0.0, 0.25, 1.0]), beta_high=st.sampled_from([0.5, 1.0]))
def test_gppo_equals_autograd_of_its_general_form(tokens, beta_low, beta_high):
    surrogate = gppo(LOW, HIGH, beta_low=beta_low, beta_high=beta_high)
    _check(tokens, surrogate, lambda lp, adv: _gppo_definition(lp, adv, beta_low, beta_high))


@settings(deadline=None)
@given(tokens=TOKENS)
def test_gppo_equals_autograd_of_the_printed_minimum_and_its_gradient_is_its_loss(tokens):
    got = _check(tokens, gppo(LOW, HIGH), _gppo_definition_as_a_minimum)
    assert torch.equal(got.grad_weight, got.loss)


@settings(deadline=None)
@given(tokens=TOKENS)
def test_gppo_and_clip_higher_have_one_value_and_differ_only_in_clipped_gradients(tokens):
    log_ratio, advantage = torch.tensor(tokens, dtype=torch.float64).unbind(1)
    mask = torch.ones_like(advantage, dtype=torch.bool)
    surrogates = gppo(LOW, HIGH), clip_higher(LOW, HIGH)
    ours, ppo = (
        per_token(one, log_ratio, torch.zeros_like(log_ratio), advantage, mask) for one in surrogates
    )
    clipped = ours.clipped_high | ours.clipped_low
    assert torch.equal(ours.loss, ppo.loss)
    assert torch.equal(ours.grad_weight[~clipped], ppo.grad_weight[~clipped])
    assert (ppo.grad_weight[clipped] == 0).all() and (ours.grad_weight[clipped] != 0).all()


def test_property_check_fails_for_a_wrong_surrogate():
    with pytest.raises(AssertionError):
        _check([(1.0, 1.0)], clip_higher(LOW, HIGH), _gppo_definition_as_a_minimum)

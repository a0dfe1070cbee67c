"""Each KL estimator against the exact divergence over a small vocabulary: what its gradient is the gradient of."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl_kernels.policy_loss import PolicyLossConfig, policy_loss

LOGITS = st.lists(st.floats(-3, 3), min_size=5, max_size=5)


def _estimate(kind, logits, old, ref):
    """Exact expectation, over tokens drawn from `old`, of the estimator's value and of its gradient to the logits."""
    leaf = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
    logprob = leaf.log_softmax(0)
    old_logprob, ref_logprob = (torch.tensor(one, dtype=torch.float64).log_softmax(0) for one in (old, ref))
    result = policy_loss(
        logprob,
        old_logprob,
        torch.zeros(5, dtype=torch.float64),  # no advantage: the KL term alone is left
        torch.ones(5, dtype=torch.bool),
        PolicyLossConfig(surrogate="reinforce", kl=kind, kl_coefficient=1.0),
        token_weight=old_logprob.exp(),
        ref_logprob=ref_logprob,
    )
    result.loss.backward()
    return result.loss.detach(), leaf.grad


def _divergence(of_ref, logits, ref):
    """KL(policy, reference), or with `of_ref` KL(reference, policy), and its gradient to the policy's logits."""
    leaf = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
    logprob, ref_logprob = leaf.log_softmax(0), torch.tensor(ref, dtype=torch.float64).log_softmax(0)
    first, second = (ref_logprob, logprob) if of_ref else (logprob, ref_logprob)
    exact = (first.exp() * (first - second)).sum()
    exact.backward()
    return exact.detach(), leaf.grad


@pytest.mark.parametrize(
    ("kind", "of_ref"), [("k2", False), ("k3_straight_through", False), ("k3_unbiased", False), ("k3", True)]
)
@settings(deadline=None, max_examples=30)
@given(logits=LOGITS, ref=LOGITS)
def test_its_expected_gradient_on_policy_is_that_of_the_divergence_it_stands_for(kind, of_ref, logits, ref):
    _, got = _estimate(kind, logits, logits, ref)
    _, want = _divergence(of_ref, logits, ref)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


@settings(deadline=None, max_examples=30)
@given(logits=LOGITS, old=LOGITS, ref=LOGITS)
def test_the_unbiased_one_is_right_off_policy_in_value_and_gradient(logits, old, ref):
    got, want = _estimate("k3_unbiased", logits, old, ref), _divergence(False, logits, ref)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", ["k1", "k3", "k3_straight_through", "k3_unbiased"])
@settings(deadline=None, max_examples=20)
@given(logits=LOGITS, ref=LOGITS)
def test_its_expected_value_on_policy_is_the_divergence(kind, logits, ref):
    got, _ = _estimate(kind, logits, logits, ref)
    torch.testing.assert_close(got, _divergence(False, logits, ref)[0], rtol=1e-9, atol=1e-12)


@settings(deadline=None, max_examples=20)
@given(logits=LOGITS, ref=LOGITS)
def test_k1_has_no_gradient_at_all(logits, ref):
    """Adding it to a loss does nothing: it belongs into the reward."""
    _, got = _estimate("k1", logits, logits, ref)
    torch.testing.assert_close(got, torch.zeros(5, dtype=torch.float64), rtol=0, atol=1e-12)

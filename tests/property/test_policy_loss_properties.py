"""policy_loss over random settings and tokens: implementations agree, and what holds for every surrogate."""

import math
from dataclasses import replace
from typing import get_args

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl_kernels.policy_loss import METRICS, PolicyLossConfig, TokenInputs, policy_loss
from megatron_rl_kernels.policy_loss.config import KlEstimator, Surrogate

ANYTHING = st.one_of(st.floats(-3, 3), st.sampled_from([0.0, math.nan, math.inf, -math.inf]))
TOKENS = st.lists(
    st.tuples(
        st.booleans(), st.floats(-4, 4), st.one_of(st.just(0.0), st.floats(-2, 2)), st.floats(-2, 2), ANYTHING
    ),
    max_size=40,
)


@st.composite
def configs(draw):
    surrogate = draw(st.sampled_from(get_args(Surrogate)))
    kl = draw(st.sampled_from(get_args(KlEstimator)))
    config = PolicyLossConfig(
        surrogate=surrogate,
        low=draw(st.sampled_from([0.0, 3e-4, 0.2, 1.0])),
        high=draw(st.sampled_from([0.0, 4e-4, 0.28, 4.0])),
        kl=kl,
        kl_coefficient=0.0 if kl == "none" else draw(st.sampled_from([1e-3, 0.5])),
        entropy_coefficient=draw(st.sampled_from([0.0, 0.01, -0.01])),
        cispo_mask=surrogate == "cispo" and draw(st.booleans()),
    )
    if surrogate not in ("clip", "gspo"):
        return config
    factors = ("value_low", "value_high", "grad_low", "grad_high")
    betas = {name: draw(st.sampled_from([0.0, 0.5, 1.0])) for name in factors}
    return replace(config, dual_clip=draw(st.sampled_from([None, 1.5, 10.0])), **betas)


def _inputs(tokens):
    columns = zip(*tokens, strict=True) if tokens else ([],) * 5
    mask, log_ratio, advantage, extra, poison = (torch.tensor(one) for one in columns)
    mask = mask.bool()
    logprob = -2 + 0.5 * extra.double()
    named = {
        "logprob": logprob,
        "old_logprob": logprob - log_ratio,
        "advantage": advantage,
        "token_weight": (extra.double() + 2.5) / 10,
        "entropy": extra.abs(),
        "ref_logprob": logprob + extra.flip(0),
        "correction": log_ratio.abs(),
        "nll_weight": torch.where(advantage > 1, 0.1, 0.0),
    }
    return TokenInputs(
        mask=mask, **{name: torch.where(mask, one.double(), poison.double()) for name, one in named.items()}
    )


def _run(inputs, config, **options):
    named = dict(inputs.named())
    first = [named.pop(name) for name in ("logprob", "old_logprob", "advantage", "mask")]
    num_tokens = len(first[0])
    cu_seqlens = torch.tensor([0, num_tokens // 3, num_tokens // 3, num_tokens], dtype=torch.int32)
    return policy_loss(*first, config, cu_seqlens=cu_seqlens, **named, **options)


@settings(deadline=None, max_examples=200)
@given(tokens=TOKENS, config=configs())
def test_portable_equals_the_reference_in_float64(tokens, config):
    inputs = _inputs(tokens)
    got, want = (_run(inputs, config, impl=impl) for impl in ("portable", "reference"))
    torch.testing.assert_close(got.loss, want.loss, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(got.grad, want.grad, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(got.metrics, want.metrics, rtol=1e-6, atol=1e-6)
    if want.grad_entropy is not None:
        torch.testing.assert_close(got.grad_entropy, want.grad_entropy, rtol=1e-12, atol=0)


@settings(deadline=None, max_examples=60)
@given(tokens=TOKENS, config=configs(), scale=st.sampled_from([0.25, 2.0]))
def test_loss_and_gradient_are_linear_in_the_weights(tokens, config, scale):
    inputs = _inputs(tokens)
    scaled = replace(inputs, token_weight=scale * inputs.token_weight, nll_weight=scale * inputs.nll_weight)
    once, more = _run(inputs, config), _run(scaled, config)
    torch.testing.assert_close(more.loss, scale * once.loss, rtol=1e-12, atol=1e-12)
    assert torch.equal(more.grad, scale * once.grad)
    count = METRICS.index("grad_abs")
    assert torch.equal(more.metrics[:count], once.metrics[:count])


@settings(deadline=None, max_examples=60)
@given(tokens=TOKENS, config=configs())
def test_clipping_never_makes_the_loss_smaller_than_the_plain_ratio_would(tokens, config):
    # PPO's objective is a lower bound of r A; so is every one with value factors of 1
    inputs = replace(_inputs(tokens), ref_logprob=None, nll_weight=None, entropy=None)
    bounded = PolicyLossConfig(surrogate="clip", low=config.low, high=config.high)
    free = PolicyLossConfig(surrogate="clip", low=1.0, high=1e9)
    assert _run(inputs, bounded).loss >= _run(inputs, free).loss - 1e-9

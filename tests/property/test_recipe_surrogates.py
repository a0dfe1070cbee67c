"""Every surrogate that a recipe can name, with its KL term, against its published form and autograd, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_rl.algo.surrogates import SURROGATES, make_policy_loss
from megatron_rl.recipe.algorithm import SURROGATE_OPTIONS, KlConfig, SurrogateName
from megatron_rl.recipe.stages import AlgorithmConfig
from megatron_rl_kernels.policy_loss import PolicyLossConfig, policy_loss

TOKENS = st.lists(
    st.tuples(st.floats(-3, 3), st.one_of(st.just(0.0), st.floats(-2, 2))), min_size=1, max_size=12
)
Definition = Callable[
    [Tensor, Tensor], Tensor
]  # log-ratio with gradient, advantage -> loss of each token [T]


def _clipped(low: float, high: float, *, dual: float | None = None) -> Definition:
    """arXiv 1707.06347, equation 7; 1912.09729, equation 9."""

    def loss(d: Tensor, advantage: Tensor) -> Tensor:
        ratio = d.exp()
        value = torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
        return -(
            value if dual is None else torch.where(advantage < 0, value.maximum(dual * advantage), value)
        )

    return loss


def _gentle(
    low: float, high: float, value_low: float, value_high: float, grad_low: float, grad_high: float
) -> Definition:
    """arXiv 2508.07629, equation 17: the clipped branch is (bound / sg(r)) r, times its beta."""

    def loss(d: Tensor, advantage: Tensor) -> Tensor:
        ratio, one = d.exp(), d.exp() / d.exp().detach()
        high_branch = (1 + high) * (value_high + grad_high * (one - 1))
        low_branch = (1 - low) * (value_low + grad_low * (one - 1))
        value = torch.where((advantage > 0) & (ratio > 1 + high), high_branch, ratio)
        return -advantage * torch.where((advantage < 0) & (ratio < 1 - low), low_branch, value)

    return loss


def _cispo(low: float, high: float, *, masked: bool = False) -> Definition:
    """MiniMax-M1, equations 4 to 7. A sum of log-probs: the value is that of logprob, here d + old."""

    def loss(d: Tensor, advantage: Tensor) -> Tensor:
        ratio = d.exp().detach()
        dropped = ((advantage > 0) & (ratio > 1 + high)) | ((advantage < 0) & (ratio < 1 - low))
        keep = ~dropped if masked else torch.ones_like(dropped)
        return -advantage * ratio.clamp(1 - low, 1 + high) * keep * (d + OLD[: len(d)])

    return loss


def _sapo(tau_positive: float, tau_negative: float) -> Definition:
    """arXiv 2511.20347."""

    def loss(d: Tensor, advantage: Tensor) -> Tensor:
        tau = torch.where(advantage > 0, tau_positive, torch.tensor(tau_negative, dtype=d.dtype))
        return -advantage * (4 / tau) * torch.sigmoid(tau * (d.exp() - 1))

    return loss


def _topr(d: Tensor, advantage: Tensor) -> Tensor:
    """arXiv 2503.14286 by token."""
    weight = torch.where(advantage < 0, d.exp().detach().clamp(0, 1), 1.0)
    return -advantage * weight * (d + OLD[: len(d)])


def _gspo(low: float, high: float) -> Definition:
    """arXiv 2507.18071, equations 5, 7: one ratio for the sequence, the loss a token mean."""

    def loss(d: Tensor, advantage: Tensor) -> Tensor:
        ratio = d.mean().exp()
        return -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage) / len(d)

    return loss


def _gspo_token(low: float, high: float) -> Definition:
    """Equations 13, 14: s_t = sg(s) exp(l_t - sg(l_t))."""

    def loss(d: Tensor, advantage: Tensor) -> Tensor:
        ratio = d.mean().exp().detach() * (d - d.detach()).exp()
        return -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage) / len(d)

    return loss


def _gmpo(low: float, high: float) -> Definition:
    """arXiv 2507.20673, equation 4: log-ratios are clipped, by the sign of A, before their mean."""

    def loss(d: Tensor, advantage: Tensor) -> Tensor:
        cut = torch.where(advantage > 0, d.clamp(max=high), torch.where(advantage < 0, d.clamp(min=-low), d))
        return -advantage * cut.mean().exp() / len(d)

    return loss


OLD = torch.linspace(-5, -1, 12, dtype=torch.float64)
OF_SEQUENCES = ("gspo", "gspo_token", "gmpo")

# recipe, published form with the numbers that the recipe's defaults stand for
CASES: dict[str, tuple[AlgorithmConfig, Definition]] = {
    "reinforce": (AlgorithmConfig(surrogate="reinforce"), lambda d, a: -a * (d + OLD[: len(d)])),
    "off_policy_reinforce": (
        AlgorithmConfig(surrogate="off_policy_reinforce"),
        lambda d, a: -a * d.exp().detach() * (d + OLD[: len(d)]),
    ),
    "ppo": (AlgorithmConfig(surrogate="ppo"), _clipped(0.2, 0.2)),
    "ppo, one bound": (AlgorithmConfig(surrogate="ppo", clip_low=0.1), _clipped(0.1, 0.1)),
    "ppo, two bounds": (AlgorithmConfig(surrogate="ppo", clip_low=0.1, clip_high=0.3), _clipped(0.1, 0.3)),
    "ppo, dual clip": (AlgorithmConfig(surrogate="ppo", dual_clip=3.0), _clipped(0.2, 0.2, dual=3.0)),
    "grpo": (AlgorithmConfig(surrogate="grpo"), _clipped(0.2, 0.2)),
    "clip_higher": (AlgorithmConfig(surrogate="clip_higher"), _clipped(0.2, 0.28)),
    "clip_higher, dual clip": (
        AlgorithmConfig(surrogate="clip_higher", dual_clip=10.0),
        _clipped(0.2, 0.28, dual=10.0),
    ),
    "gppo": (AlgorithmConfig(), _gentle(0.2, 0.28, 1, 1, 1, 1)),
    "gppo, betas": (AlgorithmConfig(beta_low=0.25, beta_high=0.5), _gentle(0.2, 0.28, 0.25, 0.5, 0.25, 0.5)),
    "gppo_only_high": (AlgorithmConfig(surrogate="gppo_only_high"), _gentle(0.2, 0.28, 1, 1, 0, 1)),
    "ce_gppo": (AlgorithmConfig(surrogate="ce_gppo"), _gentle(0.2, 0.2, 0.75, 1, 0.75, 1)),
    "decoupled_ppo": (AlgorithmConfig(surrogate="decoupled_ppo"), _clipped(0.2, 0.2)),
    "cispo": (AlgorithmConfig(surrogate="cispo"), _cispo(1.0, 4.0)),
    "cispo, unified mask": (
        AlgorithmConfig(surrogate="cispo", clip_low=0.2, clip_high=0.28, unified_mask=True),
        _cispo(0.2, 0.28, masked=True),
    ),
    "sapo": (AlgorithmConfig(surrogate="sapo", aggregate="sequence_mean"), _sapo(1.0, 1.05)),
    "topr": (AlgorithmConfig(surrogate="topr"), _topr),
    "dro": (
        AlgorithmConfig(surrogate="dro", tau=0.3),
        lambda d, a: -a * (d + OLD[: len(d)]) + 0.15 * d.square(),
    ),
    "gspo": (AlgorithmConfig(surrogate="gspo", aggregate="sequence_mean"), _gspo(3e-4, 4e-4)),
    "gspo_token": (
        AlgorithmConfig(surrogate="gspo_token", aggregate="sequence_mean"),
        _gspo_token(3e-4, 4e-4),
    ),
    "gmpo": (AlgorithmConfig(surrogate="gmpo", aggregate="sequence_mean"), _gmpo(0.4, 0.4)),
}


def _ours(
    config: PolicyLossConfig,
    d: Tensor,
    advantage: Tensor,
    *,
    is_anchored: bool = False,
    ref: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Loss and its gradient by each log-prob, tokens of weight 1, or of one sequence's mean."""
    old, ones = OLD[: len(d)], torch.ones_like(d)
    out = policy_loss(
        d + old, old, advantage, ones.bool(), config,
        token_weight=ones / len(d) if config.is_sequence_level else ones,
        ref_logprob=old if is_anchored else ref,
        cu_seqlens=torch.tensor([0, len(d)], dtype=torch.int32),
    )  # fmt: skip
    return out.loss, out.grad


@pytest.mark.parametrize("name", CASES)
@settings(deadline=None, max_examples=12)
@given(tokens=TOKENS)
def test_a_recipe_s_surrogate_has_value_and_gradient_of_its_published_form(
    name: str, tokens: list[tuple[float, float]]
) -> None:
    recipe, definition = CASES[name]
    values, advantage = torch.tensor(tokens, dtype=torch.float64).unbind(1)
    if recipe.surrogate in OF_SEQUENCES:
        # of one rollout
        advantage = advantage[:1].expand(len(values)).contiguous()
    # the difference that the kernel takes, so that both sides see one number at a bound
    values = (values + OLD[: len(values)]) - OLD[: len(values)]
    d = values.clone().requires_grad_()
    want = definition(d, advantage).sum()
    (grad,) = torch.autograd.grad(want, d)
    loss, got = _ours(make_policy_loss(recipe), values, advantage, is_anchored=recipe.surrogate == "dro")
    torch.testing.assert_close(loss, want.detach(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(got, grad, rtol=1e-10, atol=1e-12)


def test_every_surrogate_has_a_builder_options_and_a_case() -> None:
    names = set(get_args(SurrogateName))
    assert (
        names
        == set(SURROGATES)
        == set(SURROGATE_OPTIONS)
        == {config.surrogate for config, _ in CASES.values()}
    )


def test_the_check_above_notices_a_wrong_bound() -> None:
    d, advantage = torch.tensor([0.5], dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    _, grad = _ours(make_policy_loss(AlgorithmConfig(surrogate="ppo", clip_high=2.0)), d, advantage)
    assert (
        float(grad) != 0
        and float(_ours(make_policy_loss(AlgorithmConfig(surrogate="ppo")), d, advantage)[1]) == 0
    )


# gradient weight w of the published tables at ratio r: (A > 0, A < 0)
WEIGHTS = {
    # r:                    0.5           1.0         1.25          2.0           6.0
    "reinforce": [(1, 1), (1, 1), (1, 1), (1, 1), (1, 1)],
    "off_policy_reinforce": [(0.5, 0.5), (1, 1), (1.25, 1.25), (2, 2), (6, 6)],
    "ppo": [(0.5, 0), (1, 1), (0, 1.25), (0, 2), (0, 6)],
    "ppo, dual clip": [(0.5, 0), (1, 1), (0, 1.25), (0, 2), (0, 0)],
    "grpo": [(0.5, 0), (1, 1), (0, 1.25), (0, 2), (0, 6)],
    "clip_higher": [(0.5, 0), (1, 1), (1.25, 1.25), (0, 2), (0, 6)],
    "gppo": [(0.5, 0.8), (1, 1), (1.25, 1.25), (1.28, 2), (1.28, 6)],
    "gppo_only_high": [(0.5, 0), (1, 1), (1.25, 1.25), (1.28, 2), (1.28, 6)],
    "ce_gppo": [(0.5, 0.6), (1, 1), (1.2, 1.25), (1.2, 2), (1.2, 6)],
    "cispo": [(0.5, 0.5), (1, 1), (1.25, 1.25), (2, 2), (5, 5)],
    "cispo, unified mask": [(0.8, 0), (1, 1), (1.25, 1.25), (0, 1.28), (0, 1.28)],
    "topr": [(1, 0.5), (1, 1), (1, 1), (1, 1), (1, 1)],
    "sapo": [(0.470007, 0.46707), (1.0, 1.0), (1.23067, 1.228712), (1.572895, 1.53622), (0.159553, 0.124629)],
}  # fmt: skip


@pytest.mark.parametrize("name", WEIGHTS)
def test_gradient_weights_are_those_of_the_published_table(name: str) -> None:
    ratios = torch.tensor([0.5, 1.0, 1.25, 2.0, 6.0], dtype=torch.float64)
    for sign, column in ((1.0, 0), (-1.0, 1)):
        advantage = torch.full_like(ratios, sign)
        _, grad = _ours(make_policy_loss(CASES[name][0]), ratios.log(), advantage)
        assert (-grad / sign).tolist() == pytest.approx([row[column] for row in WEIGHTS[name]], abs=2e-6)


KL_FORMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    # q = reference - policy with gradient, d = policy - old with gradient
    "k2": lambda q, d: q.square() / 2,
    "k3": lambda q, d: q.exp() - q - 1,
    "k3_straight_through": lambda q, d: (q.exp() - q - 1).detach() + (q.square() - q.detach().square()) / 2,
    "k3_unbiased": lambda q, d: d.exp() * (q.exp() - q - 1),
}


@pytest.mark.parametrize("estimator", KL_FORMS)
@settings(deadline=None, max_examples=12)
@given(tokens=TOKENS, gap=st.floats(-2, 2))
def test_a_recipe_s_kl_term_has_value_and_gradient_of_its_estimator(
    estimator: str, tokens: list[tuple[float, float]], gap: float
) -> None:
    values, advantage = torch.tensor(tokens, dtype=torch.float64).unbind(1)
    reference = OLD[: len(values)] + gap
    d = values.clone().requires_grad_()
    want = (_gentle(0.2, 0.28, 1, 1, 1, 1)(d, advantage) + 0.05 * KL_FORMS[estimator](
        reference - (d + OLD[: len(d)]), d
    )).sum()  # fmt: skip
    (grad,) = torch.autograd.grad(want, d)
    recipe = AlgorithmConfig(kl=KlConfig(coefficient=0.05, estimator=estimator))
    loss, got = _ours(make_policy_loss(recipe), values, advantage, ref=reference)
    torch.testing.assert_close(loss, want.detach(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(got, grad, rtol=1e-10, atol=1e-12)


def test_a_kl_in_the_reward_leaves_the_loss_as_it_is() -> None:
    recipe = AlgorithmConfig(kl=KlConfig(coefficient=0.05, where="reward"))
    assert make_policy_loss(recipe) == make_policy_loss(AlgorithmConfig())

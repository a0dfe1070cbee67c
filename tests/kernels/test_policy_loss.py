"""policy_loss, each implementation: values and gradients against float64 autograd of the published definitions."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from megatron_rl_kernels.policy_loss import METRICS, PolicyLossConfig, TokenInputs, policy_loss

LOW, HIGH = 0.2, 0.28
IMPLS = ["reference", "portable", "triton"]
each_impl = pytest.mark.parametrize("impl", IMPLS)

# ratios of 0.05 to 10.5, 1 among them, and log-ratios that exp would turn into 0 or inf in float32
LOG_RATIOS = torch.cat(
    (torch.linspace(0.05, 10.5, 40).log(), torch.tensor([0.0, -1e-4, 1e-4, 3.0, -3.0, 19.9, -19.9]))
)
FAR = torch.tensor([25.0, -25.0, 90.0, -90.0, 200.0, -200.0])

CONFIGS = {
    "reinforce": PolicyLossConfig(surrogate="reinforce"),
    "weighted": PolicyLossConfig(surrogate="weighted"),
    "ppo": PolicyLossConfig(surrogate="clip", low=LOW, high=HIGH),
    "dual_clip": PolicyLossConfig(surrogate="clip", low=LOW, high=HIGH, dual_clip=3.0),
    "gppo": PolicyLossConfig(surrogate="clip", low=LOW, high=HIGH, grad_low=1.0, grad_high=1.0),
    "ce_gppo": PolicyLossConfig(
        surrogate="clip", low=LOW, high=HIGH, value_low=0.25, grad_low=0.25, value_high=0.5, grad_high=0.5
    ),
    "gppo_only_high": PolicyLossConfig(surrogate="clip", low=LOW, high=HIGH, grad_high=1.0),
    "cispo": PolicyLossConfig(surrogate="cispo", low=1.0, high=4.0),
    "cispo_mask": PolicyLossConfig(surrogate="cispo", low=LOW, high=HIGH, cispo_mask=True),
    "sapo": PolicyLossConfig(surrogate="sapo", tau_positive=1.0, tau_negative=1.05),
    "topr": PolicyLossConfig(surrogate="topr"),
    "gspo": PolicyLossConfig(surrogate="gspo", low=3e-4, high=4e-4),
    "gspo_wide": PolicyLossConfig(surrogate="gspo", low=LOW, high=HIGH, dual_clip=3.0),
    "gmpo": PolicyLossConfig(surrogate="gmpo", low=0.4, high=0.4),
}
TOKEN_KINDS = [name for name, config in CONFIGS.items() if not config.is_sequence_level]
KLS = ["k1", "k2", "k3", "k3_straight_through", "k3_unbiased"]


def _stop(tensor):
    return tensor.detach()


def _published(name, config, logprob, old, advantage):
    """Loss per token as the papers print it, for autograd; token kinds (arXiv numbers in config.py's terms)."""
    ratio = (logprob - old).exp()
    lower, upper = 1 - config.low, 1 + config.high
    ppo = torch.minimum(ratio * advantage, ratio.clamp(lower, upper) * advantage)
    # arXiv 2508.07629, equation 11
    moving_low, moving_high = (bound * ratio / _stop(ratio) for bound in (lower, upper))
    clipped_high, clipped_low = (advantage > 0) & (ratio > upper), (advantage < 0) & (ratio < lower)
    if name == "reinforce":
        return -advantage * logprob
    if name == "weighted":
        return -advantage * _stop(ratio) * logprob
    if name == "ppo":
        return -ppo
    if name == "dual_clip":
        return -torch.where(advantage < 0, torch.maximum(ppo, config.dual_clip * advantage), ppo)
    if name == "gppo":
        clipped = torch.maximum(torch.minimum(ratio, moving_high), moving_low)
        return -torch.minimum(ratio * advantage, clipped * advantage)
    if name in ("ce_gppo", "gppo_only_high"):
        low, high = (0.25 * moving_low, 0.5 * moving_high) if name == "ce_gppo" else (lower, moving_high)
        return -advantage * torch.where(clipped_high, high, torch.where(clipped_low, low, ratio))
    if name == "cispo":
        return -_stop(ratio.clamp(lower, upper)) * advantage * logprob
    if name == "cispo_mask":
        kept = 1.0 - (clipped_high | clipped_low).double()
        return -_stop(ratio.clamp(lower, upper)) * kept * advantage * logprob
    if name == "sapo":
        tau = torch.tensor([config.tau_negative, config.tau_positive], dtype=torch.float64)[
            (advantage > 0).long()
        ]
        return -advantage * 4 / tau / (1 + torch.exp(-tau * (ratio - 1)))
    assert name == "topr"
    return -advantage * logprob * torch.where(advantage >= 0, 1.0, _stop(ratio.clamp(0, 1)))


def _published_sequence(config, logprob, old, advantage, cu_seqlens):
    """Mean over sequences of the sequence's loss (arXiv 2507.18071, 2507.20673); one advantage per sequence."""
    losses = []
    for start, stop in itertools.pairwise(cu_seqlens):
        gap, score = (logprob - old)[start:stop], advantage[start]
        if config.surrogate == "gmpo":
            gap = gap.clamp(max=config.high) if score > 0 else gap.clamp(min=-config.low)
            losses.append(-score * gap.mean().exp())
            continue
        ratio = gap.mean().exp()
        loss = torch.minimum(ratio * score, ratio.clamp(1 - config.low, 1 + config.high) * score)
        if config.dual_clip is not None and score < 0:
            loss = torch.maximum(loss, config.dual_clip * score)
        losses.append(-loss)
    return torch.stack(losses).mean()


def _published_kl(kind, logprob, ref, ratio):
    gap = ref - logprob
    k2, k3 = 0.5 * gap * gap, gap.exp() - gap - 1
    return {
        "k1": -gap,
        "k2": k2,
        "k3": k3,
        "k3_straight_through": _stop(k3) + k2 - _stop(k2),
        "k3_unbiased": ratio * k3,
    }[kind]


def _grid(log_ratios=LOG_RATIOS):
    """Every log-ratio with advantages of both signs and 0; log-probs of -0.1 to -6."""
    log_ratio, advantage = torch.cartesian_prod(log_ratios, torch.tensor([1.5, -0.7, 0.0])).unbind(1)
    old = torch.linspace(-6, -0.1, len(log_ratio))
    # the sum is rounded, so old is what gives exactly this ratio back
    logprob = log_ratio + old
    return logprob, logprob - log_ratio, advantage


def _leaf(tensor):
    return tensor.double().requires_grad_()


def _dtype_of(impl):
    return torch.float32 if impl == "triton" else torch.float64


def _close(got, want, impl, *, scale=1.0):
    # float32: exp and the difference before it; float64: one rounding more than the reference's
    rtol = 4e-6 if impl == "triton" else 1e-11
    torch.testing.assert_close(got.double(), want, rtol=rtol, atol=scale * rtol)


@each_impl
@pytest.mark.parametrize("name", TOKEN_KINDS)
def test_loss_and_gradient_equal_autograd_of_the_published_form(impl, name):
    logprob, old, advantage = (one.to(_dtype_of(impl)) for one in _grid())
    mask = torch.ones_like(logprob, dtype=torch.bool)
    weight = torch.linspace(0.5, 2.0, len(mask), dtype=logprob.dtype)
    got_leaf, want_leaf = logprob.clone().requires_grad_(), _leaf(logprob)
    got = policy_loss(got_leaf, old, advantage, mask, CONFIGS[name], token_weight=weight, impl=impl)
    terms = weight.double() * _published(name, CONFIGS[name], want_leaf, old.double(), advantage.double())
    (3.0 * got.loss).backward()
    (3.0 * terms.sum()).backward()
    _close(got.loss, terms.sum(), impl, scale=terms.abs().sum().item())
    _close(got_leaf.grad, want_leaf.grad, impl)
    assert torch.equal(3.0 * got.grad, got_leaf.grad)
    assert got.grad_entropy is None


# settings of published runs: what f (the loss is -A f) and its gradient weight are at a ratio, for A > 0 and A < 0
DAPO = {"low": 0.2, "high": 0.28, "dual_clip": 10.0}
KLEAR = DAPO | {"grad_low": 1.0, "grad_high": 1.0}
LOG_HALF, LOG_TWO, LOG_TWELVE = math.log(0.5), math.log(2.0), math.log(12.0)
RUNS = [
    ("clip", DAPO, LOG_TWO, (1.28, 0.0), (2.0, 2.0)),
    ("clip", DAPO, LOG_HALF, (0.5, 0.5), (0.8, 0.0)),
    ("clip", DAPO, LOG_TWELVE, (1.28, 0.0), (10.0, 0.0)),
    ("clip", KLEAR, LOG_TWO, (1.28, 1.28), (2.0, 2.0)),
    ("clip", KLEAR, LOG_HALF, (0.5, 0.5), (0.8, 0.8)),
    ("clip", KLEAR, LOG_TWELVE, (1.28, 1.28), (10.0, 0.0)),
    ("gspo", {"low": 3e-4, "high": 4e-4}, math.log(1.0005), (1.0004, 0.0), (1.0005, 1.0005)),
    ("gspo", {"low": 3e-4, "high": 4e-4}, math.log(0.9996), (0.9996, 0.9996), (0.9997, 0.0)),
    ("gmpo", {"low": 0.4, "high": 0.4}, 0.5, (math.exp(0.4), 0.0), (math.exp(0.5),) * 2),
    ("gmpo", {"low": 0.4, "high": 0.4}, -0.5, (math.exp(-0.5),) * 2, (math.exp(-0.4), 0.0)),
    # no lower bound; 5 is the upper bound itself
    ("cispo", {"low": 1.0, "high": 4.0}, LOG_TWELVE, (5.0 * -1.5, 5.0), (5.0 * -1.5, 5.0)),
    ("cispo", {"low": 1.0, "high": 4.0}, LOG_HALF, (0.5 * -1.5, 0.5), (0.5 * -1.5, 0.5)),
    ("topr", {}, LOG_TWO, (-1.5, 1.0), (-1.5, 1.0)),
    ("topr", {}, LOG_HALF, (-1.5, 1.0), (0.5 * -1.5, 0.5)),
    # sigmoid(1) = 0.7310585786300049, sigmoid(1.05) = 0.7407748991821539
    ("sapo", {}, LOG_TWO, (2.9242343145, 1.5728954659), (2.8219996159, 1.5362195834)),
]


@each_impl
@pytest.mark.parametrize("surrogate, fields, log_ratio, positive, negative", RUNS)
def test_settings_of_published_runs_give_these_numbers(
    impl, surrogate, fields, log_ratio, positive, negative
):
    logprob = torch.full((2,), -1.5, dtype=_dtype_of(impl))
    advantage = torch.tensor([1.0, -1.0], dtype=logprob.dtype)
    for token, (value, slope) in enumerate((positive, negative)):
        got = policy_loss(
            logprob[:1],
            logprob[:1] - log_ratio,
            advantage[token : token + 1],
            torch.ones(1, dtype=torch.bool),
            PolicyLossConfig(surrogate=surrogate, **fields),
            token_weight=torch.ones(1, dtype=logprob.dtype),
            cu_seqlens=torch.tensor([0, 1], dtype=torch.int32),
            impl=impl,
        )
        assert got.loss.item() == pytest.approx(-advantage[token].item() * value, rel=2e-6)
        assert got.grad.item() == pytest.approx(-advantage[token].item() * slope, rel=2e-6)


@each_impl
@pytest.mark.parametrize("name", ["gspo", "gspo_wide", "gmpo"])
def test_sequence_loss_equals_autograd_of_the_published_form_under_a_sequence_mean(impl, name):
    dtype = _dtype_of(impl)
    draw = torch.Generator().manual_seed(3)
    # two sequences of one token, and both signs; sizes of the mean log-ratio on both sides of every bound
    lengths = torch.tensor([1, 7, 30, 1, 64, 12, 5])
    shift = torch.tensor([0.5, -0.5, 2e-4, -6e-4, 1.3, 3.2e-4, 0.0]).repeat_interleave(lengths)
    advantage = torch.tensor([1.0, -2.0, 0.5, -1.0, -0.3, 1.0, 0.0]).repeat_interleave(lengths).to(dtype)
    wobble = torch.randn(len(shift), generator=draw)
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    for start, stop in itertools.pairwise(cu_seqlens):
        wobble[start:stop] -= wobble[start:stop].mean()
    old = (-2.0 + torch.randn(len(shift), generator=draw)).to(dtype)
    logprob = old + (shift + 0.3 * wobble).to(dtype)
    weight = (1.0 / (len(lengths) * lengths.double())).repeat_interleave(lengths).to(dtype)
    got_leaf, want_leaf = logprob.clone().requires_grad_(), _leaf(logprob)
    mask = torch.ones_like(logprob, dtype=torch.bool)
    got = policy_loss(
        got_leaf, old, advantage, mask, CONFIGS[name], token_weight=weight, cu_seqlens=cu_seqlens, impl=impl
    )
    want = _published_sequence(
        CONFIGS[name], want_leaf, old.double(), advantage.double(), cu_seqlens.tolist()
    )
    got.loss.backward()
    want.backward()
    _close(got.loss, want, impl)
    _close(got_leaf.grad, want_leaf.grad, impl)


@each_impl
def test_gspo_takes_an_advantage_per_token_and_each_keeps_its_own(impl):
    # s = exp(0.1) for the first sequence: inside the bounds; GSPO-token's gradient is -A s
    dtype = _dtype_of(impl)
    old = torch.full((5,), -1.0, dtype=dtype)
    logprob = old + torch.tensor([0.2, 0.0, 0.1, 1.0, 2.0], dtype=dtype)
    advantage = torch.tensor([1.0, -2.0, 0.5, 1.0, -1.0], dtype=dtype)
    weight = torch.tensor([1 / 3, 1 / 3, 1 / 3, 1 / 2, 1 / 2], dtype=dtype)
    got = policy_loss(
        logprob,
        old,
        advantage,
        torch.ones(5, dtype=torch.bool),
        replace(CONFIGS["gspo_wide"], dual_clip=None),
        token_weight=weight,
        cu_seqlens=torch.tensor([0, 3, 5], dtype=torch.int32),
        impl=impl,
    )
    first, second = math.exp(0.1), math.exp(1.5)
    # the second sequence is clipped for the positive advantage alone
    want = (
        -torch.tensor([first, -2 * first, 0.5 * first, 0.0, -second], dtype=torch.float64) * weight.double()
    )
    _close(got.grad, want, impl)
    assert got.metrics[METRICS.index("clipped_high")] == 1 and got.metrics[METRICS.index("clipped_low")] == 0


@each_impl
@pytest.mark.parametrize("kind", KLS)
def test_kl_value_and_gradient_equal_autograd_and_ignore_the_correction(impl, kind):
    dtype = _dtype_of(impl)
    draw = torch.Generator().manual_seed(5)
    logprob, old, ref, advantage, weight, correction = (
        one.to(dtype) for one in torch.randn(6, 60, generator=draw).unbind()
    )
    config = PolicyLossConfig(surrogate="clip", low=LOW, high=HIGH, kl=kind, kl_coefficient=0.3)
    weight, correction = weight.abs(), correction.abs()
    got_leaf, want_leaf = logprob.clone().requires_grad_(), _leaf(logprob)
    got = policy_loss(
        got_leaf,
        old,
        advantage,
        torch.ones(60, dtype=torch.bool),
        config,
        token_weight=weight,
        ref_logprob=ref,
        correction=correction,
        impl=impl,
    )
    kl = _published_kl(kind, want_leaf, ref.double(), (want_leaf - old.double()).exp())
    surrogate = _published("ppo", config, want_leaf, old.double(), advantage.double())
    want = (weight.double() * (correction.double() * surrogate + 0.3 * kl)).sum()
    got.loss.backward()
    want.backward()
    _close(got.loss, want, impl, scale=30.0)
    _close(got_leaf.grad, want_leaf.grad, impl, scale=10.0)
    torch.testing.assert_close(got.metrics[METRICS.index("kl_ref")], kl.sum().float(), rtol=1e-5, atol=1e-4)


@each_impl
def test_entropy_bonus_and_nll_add_their_terms_and_gradients(impl):
    dtype = _dtype_of(impl)
    draw = torch.Generator().manual_seed(7)
    logprob, old, advantage, entropy, weight = (
        one.to(dtype) for one in torch.randn(5, 40, generator=draw).unbind()
    )
    weight, entropy = weight.abs(), entropy.abs()
    nll_weight = torch.where(torch.arange(40) % 3 == 0, 0.25, 0.0).to(dtype)
    config = PolicyLossConfig(surrogate="clip", low=LOW, high=HIGH, entropy_coefficient=0.01)
    leaves = [logprob.clone().requires_grad_(), entropy.clone().requires_grad_()]
    exact = [_leaf(logprob), _leaf(entropy)]
    got = policy_loss(
        leaves[0],
        old,
        advantage,
        torch.ones(40, dtype=torch.bool),
        config,
        token_weight=weight,
        entropy=leaves[1],
        nll_weight=nll_weight,
        impl=impl,
    )
    surrogate = _published("ppo", config, exact[0], old.double(), advantage.double())
    want = (weight.double() * (surrogate - 0.01 * exact[1]) - nll_weight.double() * exact[0]).sum()
    got.loss.backward()
    want.backward()
    _close(got.loss, want, impl, scale=30.0)
    for ours, true, known in zip(leaves, exact, (got.grad, got.grad_entropy), strict=True):
        _close(ours.grad, true.grad, impl)
        assert torch.equal(ours.grad, known)


@each_impl
@pytest.mark.parametrize("name", [*TOKEN_KINDS])
def test_ratio_of_exactly_one_is_not_clipped_by_bounds_of_exactly_one(impl, name):
    config = CONFIGS[name]
    if config.surrogate in ("clip", "cispo"):
        config = replace(config, low=0.0, high=0.0)
    logprob = torch.full((3,), -2.0, dtype=_dtype_of(impl))
    advantage = torch.tensor([1.0, -1.0, 0.0], dtype=logprob.dtype)
    ones = torch.ones_like(logprob)
    got = policy_loss(logprob, logprob, advantage, ones > 0, config, token_weight=ones, impl=impl)
    # w = 1 for every surrogate at r = 1
    torch.testing.assert_close(got.grad, -advantage, rtol=1e-6, atol=0)
    assert got.metrics[1] == 0 and got.metrics[2] == 0


@each_impl
def test_log_ratio_equal_to_the_bound_of_gmpo_is_not_clipped(impl):
    config = PolicyLossConfig(surrogate="gmpo", low=0.25, high=0.5)
    logprob = torch.tensor([0.5, -0.25], dtype=_dtype_of(impl))
    zeros, ones = torch.zeros_like(logprob), torch.ones_like(logprob)
    cu_seqlens = torch.tensor([0, 1, 2], dtype=torch.int32)
    advantage = torch.tensor([1.0, -1.0], dtype=logprob.dtype)
    got = policy_loss(
        logprob, zeros, advantage, ones > 0, config, token_weight=ones, cu_seqlens=cu_seqlens, impl=impl
    )
    _close(got.grad, -advantage.double() * logprob.double().exp(), impl)
    assert got.metrics[1] == 0 and got.metrics[2] == 0


@pytest.mark.parametrize("impl", ["reference", "portable"])
def test_ratio_equal_to_a_bound_away_from_one_is_not_clipped(impl):
    log_ratio = torch.tensor([0.25, -0.25, 1.5], dtype=torch.float64)
    upper, lower, dual = log_ratio.exp().tolist()
    # differences of doubles within a factor of two are exact
    config = PolicyLossConfig(surrogate="clip", low=1 - lower, high=upper - 1, dual_clip=dual)
    advantage = torch.tensor([1.0, -1.0, -1.0], dtype=torch.float64)
    ones = torch.ones(3, dtype=torch.float64)
    got = policy_loss(log_ratio, ones * 0, advantage, ones > 0, config, token_weight=ones, impl=impl)
    assert torch.equal(got.grad, -advantage * log_ratio.exp())
    assert got.metrics[1] == 0 and got.metrics[2] == 0


@each_impl
@pytest.mark.parametrize("name", TOKEN_KINDS)
def test_ratio_far_outside_exp_is_finite_and_only_the_value_is_clamped(impl, name):
    logprob, old, advantage = (one.to(_dtype_of(impl)) for one in _grid(FAR))
    ones = torch.ones_like(logprob)
    got = policy_loss(logprob, old, advantage, ones > 0, CONFIGS[name], token_weight=ones, impl=impl)
    assert got.loss.isfinite() and got.grad.isfinite().all() and got.metrics.isfinite().all()
    # the same tokens with the ratio at the clamp: gradients are theirs, not 0
    nearer = logprob - (logprob - old).clamp(-20, 20)
    want = policy_loss(
        logprob, nearer, advantage, ones > 0, CONFIGS[name], token_weight=ones, impl="reference"
    )
    torch.testing.assert_close(got.grad, want.grad, rtol=2e-5, atol=1e-12)
    if name == "gppo":
        assert (got.grad[advantage != 0] != 0).all()


@each_impl
@pytest.mark.parametrize("name", list(CONFIGS))
def test_zero_advantage_gives_no_loss_and_no_gradient(impl, name):
    logprob = torch.linspace(-5, 5, 21, dtype=_dtype_of(impl))
    zeros, ones = torch.zeros_like(logprob), torch.ones_like(logprob)
    cu_seqlens = torch.tensor([0, 10, 21], dtype=torch.int32)
    for zero in (zeros, -zeros):
        got = policy_loss(
            logprob, zeros, zero, ones > 0, CONFIGS[name], token_weight=ones, cu_seqlens=cu_seqlens, impl=impl
        )
        assert got.loss == 0 and (got.grad == 0).all()
        assert got.metrics[:3].tolist() == [21, 0, 0]


def random_inputs(num_tokens, *, dtype=torch.float32, seed=0, masked=0.3):
    """Plausible tokens; what is masked holds NaN, inf and huge numbers."""
    draw = torch.Generator().manual_seed(seed)
    logprob, old, advantage, weight, entropy, ref, correction = torch.randn(
        7, num_tokens, generator=draw
    ).unbind()
    mask = torch.rand(num_tokens, generator=draw) >= masked
    tensors = {
        "logprob": logprob - 2,
        "old_logprob": logprob - 2 + 0.3 * old,
        "advantage": torch.where(torch.arange(num_tokens) % 7 == 3, 0.0, advantage),
        "token_weight": weight.abs() / max(num_tokens, 1),
        "entropy": entropy.abs(),
        "ref_logprob": logprob - 2 + 0.5 * ref,
        "correction": correction.abs(),
        "nll_weight": torch.where(advantage > 0.5, 0.1 / max(num_tokens, 1), 0.0),
    }
    poison = torch.tensor([math.nan, math.inf, -math.inf, 3e38]).repeat(num_tokens // 4 + 1)[:num_tokens]
    tensors = {name: torch.where(mask, one, poison).to(dtype) for name, one in tensors.items()}
    return TokenInputs(mask=mask, **tensors)


def run(inputs, config, *, impl, cu_seqlens=None):
    """policy_loss of all that `inputs` holds."""
    named = dict(inputs.named())
    first = [named.pop(name) for name in ("logprob", "old_logprob", "advantage", "mask")]
    return policy_loss(*first, config, cu_seqlens=cu_seqlens, impl=impl, **named)


# the interpreter is slow: there each surrogate with the estimator that reads the ratio, and each estimator once
EVERY = [("portable", name, kl) for name in CONFIGS for kl in ("none", *KLS)]
EVERY += [("triton", name, "k3_unbiased") for name in CONFIGS] + [
    ("triton", "gppo", kl) for kl in ("none", *KLS)
]


@pytest.mark.parametrize("impl, name, kl", EVERY)
def test_every_combination_of_terms_in_float32_equals_the_reference_in_float64(impl, name, kl):
    config = replace(
        CONFIGS[name], kl=kl, kl_coefficient=0.0 if kl == "none" else 0.2, entropy_coefficient=0.01
    )
    cu_seqlens = torch.tensor([0, 1, 40, 40, 99, 127], dtype=torch.int32)
    inputs = random_inputs(127)
    got = run(inputs, config, impl=impl, cu_seqlens=cu_seqlens)
    exact = inputs.map(lambda one: one if one.dtype == torch.bool else one.double())
    want = run(exact, config, impl="reference", cu_seqlens=cu_seqlens)
    torch.testing.assert_close(got.loss.double(), want.loss, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(got.grad.double(), want.grad, rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(got.grad_entropy.double(), want.grad_entropy, rtol=1e-6, atol=0)
    torch.testing.assert_close(got.metrics, want.metrics, rtol=2e-5, atol=1e-5)

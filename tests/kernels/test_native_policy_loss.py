"""`policy_loss` in C++ (`host`, on a GPU `cuda`) against its float64 definition, for every surrogate and KL estimator.

The library is built once per machine, into the user's cache.
"""

import ctypes
import math
from dataclasses import fields

import pytest
import torch

from megatron_rl_kernels import native
from megatron_rl_kernels.policy_loss import METRICS, PolicyLossConfig, TokenInputs, TokenTerms, policy_loss
from megatron_rl_kernels.policy_loss.native import native_terms
from megatron_rl_kernels.policy_loss.reference import reference_terms

SURROGATES = {
    "reinforce": {"surrogate": "reinforce"},
    "weighted": {"surrogate": "weighted"},
    "topr": {"surrogate": "topr"},
    "cispo": {"surrogate": "cispo", "low": 1.0, "high": 0.28},
    "cispo_mask": {"surrogate": "cispo", "cispo_mask": True},
    "clip": {"surrogate": "clip", "low": 0.2, "high": 0.28},
    "gppo": {"surrogate": "clip", "grad_low": 1.0, "grad_high": 1.0},
    "betas": {"surrogate": "clip", "value_low": 0.5, "grad_low": 0.5, "value_high": 0.75, "grad_high": 0.75},
    "dual_clip": {"surrogate": "clip", "dual_clip": 3.0, "grad_low": 1.0},
    "sapo": {"surrogate": "sapo", "tau_positive": 1.0, "tau_negative": 1.05},
    "gspo": {"surrogate": "gspo", "low": 3e-2, "high": 4e-2},
    "gmpo": {"surrogate": "gmpo", "low": 0.4, "high": 0.4},
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
KLS = ["none", "k1", "k2", "k3", "k3_straight_through", "k3_unbiased"]


def _inputs(num_tokens, *, seed=0, spread=0.4):
    draw = torch.Generator().manual_seed(seed)

    def normal():
        return torch.randn(num_tokens, generator=draw)

    old = -torch.rand(num_tokens, generator=draw) * 3
    mask = torch.rand(num_tokens, generator=draw) > 0.3
    positive = torch.rand(num_tokens, generator=draw) > 0.5
    return TokenInputs(
        logprob=old + spread * normal(),
        old_logprob=old,
        advantage=normal(),
        mask=mask,
        token_weight=torch.rand(num_tokens, generator=draw),
        entropy=normal().abs(),
        ref_logprob=old + 0.3 * normal(),
        correction=torch.rand(num_tokens, generator=draw) + 0.5,
        nll_weight=torch.rand(num_tokens, generator=draw) * positive,
    )


def _without(inputs, *names):
    return TokenInputs(**{name: tensor for name, tensor in inputs.named() if name not in names})


def _definition(inputs, config, cu_seqlens):
    wide = inputs.map(lambda tensor: tensor if tensor.dtype == torch.bool else tensor.double())
    return reference_terms(wide, config, cu_seqlens)


def _sequence_log_ratio(inputs, config, cu_seqlens):
    """[N], in float64 and token by token: the C++ takes it as an input."""
    means = torch.zeros(inputs.logprob.numel(), dtype=torch.float64)
    for start, stop in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        gaps = []
        for at in range(start, stop):
            if inputs.mask[at]:
                gap = float(inputs.logprob[at].double() - inputs.old_logprob[at].double())
                if config.surrogate == "gmpo":
                    gap = min(gap, config.high) if inputs.advantage[at] > 0 else gap
                    gap = max(gap, -config.low) if inputs.advantage[at] < 0 else gap
                gaps.append(gap)
        means[start:stop] = sum(gaps) / max(len(gaps), 1)
    return means.float()


def _terms_on(device, inputs, config):
    """`native_terms` on a device, its results on the CPU."""
    out = native_terms(inputs.map(lambda tensor: tensor.to(device)), config)
    return TokenTerms(
        **{
            field.name: None if (value := getattr(out, field.name)) is None else value.cpu()
            for field in fields(out)
        }
    )


def _assert_is_definition(inputs, config, *, cu_seqlens=None, device="cpu"):
    own = inputs
    if config.is_sequence_level:
        own = inputs.with_sequence_log_ratio(_sequence_log_ratio(inputs, config, cu_seqlens))
    got, want = _terms_on(device, own, config), _definition(inputs, config, cu_seqlens)
    for name in ("loss", "grad", "grad_entropy", "metrics"):
        actual, expected = getattr(got, name), getattr(want, name)
        if expected is None:
            assert actual is None
            continue
        # float32 roundings: 1e-6 of a ratio; in a sum, 1e-8 of the terms, which are up to 10 and of both signs
        atol = max(5e-6, 1e-7 * inputs.logprob.numel() if name in ("loss", "metrics") else 0.0)
        torch.testing.assert_close(
            actual.double(), expected.double(), rtol=5e-6, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
        )
    return got


@pytest.mark.parametrize("kind", SURROGATES)
@pytest.mark.parametrize("num_tokens", [1, 255, 5003], ids="n{}".format)
@pytest.mark.parametrize("device", DEVICES)
def test_every_surrogate_is_its_definition(kind, num_tokens, device):
    inputs = _without(_inputs(num_tokens, seed=num_tokens), "ref_logprob", "nll_weight", "entropy")
    cu_seqlens = torch.tensor([0, num_tokens // 3, num_tokens // 2, num_tokens], dtype=torch.int32)
    if num_tokens == 1:
        inputs = TokenInputs(**{**dict(inputs.named()), "mask": torch.ones(1, dtype=torch.bool)})
    _assert_is_definition(inputs, PolicyLossConfig(**SURROGATES[kind]), cu_seqlens=cu_seqlens, device=device)


@pytest.mark.parametrize("kl", KLS)
@pytest.mark.parametrize("device", DEVICES)
def test_every_kl_estimator_with_bonus_and_nll_is_its_definition(kl, device):
    config = PolicyLossConfig(
        surrogate="clip", kl=kl, kl_coefficient=0.0 if kl == "none" else 0.3, entropy_coefficient=0.05
    )
    _assert_is_definition(_inputs(1000), config, device=device)


@pytest.mark.parametrize("kind", ["weighted", "clip", "gppo", "betas", "dual_clip", "sapo", "cispo", "topr"])
def test_ratios_around_and_far_beyond_the_bounds_are_the_definition(kind):
    # both sides of each bound, the largest and smallest log-ratio that counts, and beyond
    ratios = [1.0, 0.7999, 0.8001, 1.1999, 1.2001, 1.2799, 1.2801, 2.999, 3.001, 0.05, 10.5]
    gaps = torch.tensor([math.log(ratio) for ratio in ratios] + [-25.0, -19.0, 19.0, 25.0])
    # every ratio with an advantage of either sign, and with none
    log_ratio, advantage = gaps.repeat(3), torch.tensor([1.0, -1.0, 0.0]).repeat_interleave(len(gaps))
    one = torch.ones_like(log_ratio)
    inputs = TokenInputs(
        logprob=log_ratio, old_logprob=0 * one, advantage=advantage, mask=one.bool(), token_weight=one
    )
    config = PolicyLossConfig(**SURROGATES[kind])
    got, want = native_terms(inputs, config), _definition(inputs, config, None)
    torch.testing.assert_close(got.grad.double(), want.grad, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(got.metrics, want.metrics, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got.loss, want.loss, rtol=1e-5, atol=1e-6)


def test_a_ratio_equal_to_its_bound_is_not_clipped():
    one = torch.ones(2)
    inputs = TokenInputs(
        logprob=one, old_logprob=one, advantage=torch.tensor([1.0, -1.0]), mask=one.bool(), token_weight=one
    )
    got = native_terms(inputs, PolicyLossConfig(surrogate="clip", low=0.0, high=0.0))
    assert got.grad.tolist() == [-1.0, 1.0]
    assert dict(zip(METRICS, got.metrics.tolist(), strict=True))["clipped_high"] == 0


@pytest.mark.parametrize("kind", SURROGATES)
@pytest.mark.parametrize("device", DEVICES)
def test_masked_tokens_may_hold_anything(kind, device):
    inputs = _inputs(700)
    config = PolicyLossConfig(**SURROGATES[kind], kl="k3", kl_coefficient=0.1, entropy_coefficient=0.1)
    inputs = inputs.with_sequence_log_ratio(0.1 * inputs.ref_logprob) if config.is_sequence_level else inputs
    clean = _terms_on(device, inputs, config)
    poison = torch.tensor([math.nan, math.inf, -math.inf]).repeat(700)[:700]
    dirty = _terms_on(
        device,
        inputs.map(lambda t: t if t.dtype == torch.bool else torch.where(inputs.mask, t, poison)),
        config,
    )
    for name in ("loss", "grad", "grad_entropy", "metrics"):
        assert torch.equal(getattr(clean, name), getattr(dirty, name)), name
    assert not dirty.grad[~inputs.mask].any() and not dirty.grad_entropy[~inputs.mask].any()


def test_a_nan_at_a_trained_token_is_not_hidden():
    inputs = _inputs(700)
    inputs.logprob[int(inputs.mask.nonzero()[5])] = math.nan
    got = native_terms(inputs, PolicyLossConfig(surrogate="clip"))
    assert got.loss.isnan() and got.grad.isnan().sum() == 1
    assert got.metrics[METRICS.index("ratio_max")].isnan()


def test_no_tokens_and_no_trained_tokens_give_zeros():
    got = native_terms(_inputs(0), PolicyLossConfig(surrogate="clip"))
    assert got.loss == 0 and got.grad.shape == (0,) and not got.metrics.any()
    inputs = _inputs(300)
    inputs.mask[:] = False
    got = native_terms(inputs, PolicyLossConfig(surrogate="clip"))
    assert got.loss == 0 and not got.grad.any() and not got.metrics.any()


@pytest.mark.parametrize("device", DEVICES)
def test_a_token_has_the_same_bits_wherever_it_stands_and_in_every_run(device):
    inputs = _inputs(5003)
    config = PolicyLossConfig(surrogate="sapo", kl="k3", kl_coefficient=0.1)
    whole, again = _terms_on(device, inputs, config), _terms_on(device, inputs, config)
    assert torch.equal(whole.loss, again.loss) and torch.equal(whole.metrics, again.metrics)
    for start in (1, 37, 4900):
        part = _terms_on(device, inputs.map(lambda tensor, start=start: tensor[start:]), config)
        assert torch.equal(part.grad, whole.grad[start:])


def test_kl_of_policies_that_are_almost_equal_keeps_its_digits():
    inputs = _inputs(1000, spread=1e-4)
    inputs.ref_logprob[:] = inputs.old_logprob
    config = PolicyLossConfig(surrogate="clip", kl="k3", kl_coefficient=1.0)
    got, want = native_terms(inputs, config).metrics, _definition(inputs, config, None).metrics
    for name in ("kl_k3", "kl_ref"):
        at = METRICS.index(name)
        # about 3e-6, the sum of squares of 1e-4: exp(x) - 1 - x as it stands would be off by its whole size
        torch.testing.assert_close(got[at], want[at], rtol=1e-5, atol=0)


@pytest.mark.parametrize("kind", ["clip", "gspo"])
def test_the_op_runs_on_host_and_gives_autograd_its_gradients(kind):
    inputs = _inputs(1000)
    tensors = dict(inputs.named())
    cu_seqlens = torch.tensor([0, 300, 1000], dtype=torch.int32)
    config = PolicyLossConfig(**SURROGATES[kind], kl="k3", kl_coefficient=0.1, entropy_coefficient=0.05)
    logprob, entropy = (tensors.pop(name).clone().requires_grad_() for name in ("logprob", "entropy"))
    others = [tensors.pop(name) for name in ("old_logprob", "advantage", "mask")]
    out = policy_loss(
        logprob, *others, config, entropy=entropy, cu_seqlens=cu_seqlens, impl="host", **tensors
    )
    (2 * out.loss).backward()
    want = _definition(inputs, config, cu_seqlens)
    torch.testing.assert_close(out.loss.double(), want.loss, rtol=1e-6, atol=1e-4)
    torch.testing.assert_close(logprob.grad.double(), 2 * want.grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.grad.double(), 2 * want.grad_entropy, rtol=1e-5, atol=1e-6)


def test_other_dtypes_are_refused():
    inputs = _inputs(3).map(lambda tensor: tensor if tensor.dtype == torch.bool else tensor.double())
    with pytest.raises(
        TypeError, match=r"impl = 'host' and 'cuda' take float32, got logprob of torch\.float64"
    ):
        native_terms(inputs, PolicyLossConfig(surrogate="clip"))


def test_exp_is_right_to_a_unit_in_the_last_place():
    library = native.library_for(torch.device("cpu"))
    limits = torch.tensor([-math.inf, math.inf, math.nan, 0.0, -100.0, 89.0])
    values = torch.cat((torch.linspace(-87, 88, 200_001), limits))
    got = torch.empty_like(values)
    library.mrl_exp(native.address(values), ctypes.c_int64(values.numel()), native.address(got))
    want = values[:-6].double().exp()
    unit = torch.exp2(torch.floor(torch.log2(want)) - 23)
    assert ((got[:-6].double() - want).abs() / unit).max() < 1.5
    assert got[[-6, -5, -3, -2, -1]].tolist() == [0.0, math.inf, 1.0, 0.0, math.inf] and got[-4].isnan()

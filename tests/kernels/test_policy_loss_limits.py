"""policy_loss at its limits: masks, empty batches, cuts into parts, repeated runs, metrics, wrong arguments."""

import math
from dataclasses import replace

import pytest
import torch

from megatron_rl_kernels.policy_loss import (
    METRIC_MERGE,
    METRICS,
    PolicyLossConfig,
    merge_metrics,
    policy_loss,
    portable,
    sequence_log_ratio,
    token_terms,
)
from tests.kernels.test_policy_loss import CONFIGS, each_impl, random_inputs, run

FULL = PolicyLossConfig(
    surrogate="clip", low=0.2, high=0.28, grad_high=1.0, kl="k3", kl_coefficient=0.1, entropy_coefficient=0.01
)
# a cap that plausible ratios reach
CAPPED = replace(CONFIGS["dual_clip"], dual_clip=1.1)
fast_impls = pytest.mark.parametrize("impl", ["portable", "triton"])


def _metric(out, name):
    return out.metrics[METRICS.index(name)].item()


@each_impl
@pytest.mark.parametrize("config", [FULL, CONFIGS["gspo"], CONFIGS["cispo"]], ids=["clip", "gspo", "cispo"])
def test_masked_tokens_may_hold_anything_and_count_for_nothing(impl, config):
    inputs = random_inputs(90, masked=0.4)
    kept = inputs.map(lambda one: one[inputs.mask])
    lengths = torch.stack([part.sum() for part in inputs.mask.split([40, 30, 20])])
    cu_kept = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    got = run(inputs, config, impl=impl, cu_seqlens=torch.tensor([0, 40, 70, 90], dtype=torch.int32))
    want = run(kept, config, impl=impl, cu_seqlens=cu_kept)
    torch.testing.assert_close(got.loss, want.loss, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(got.grad[inputs.mask], want.grad, rtol=1e-6, atol=0)
    assert (got.grad[~inputs.mask] == 0).all()
    torch.testing.assert_close(got.metrics, want.metrics, rtol=1e-6, atol=1e-6)
    if config is FULL:
        assert (got.grad_entropy[~inputs.mask] == 0).all()
        assert torch.equal(got.grad_entropy[inputs.mask], want.grad_entropy)


@each_impl
@pytest.mark.parametrize("num_tokens", [0, 1, 37])
@pytest.mark.parametrize("name", ["gppo", "gspo"])
def test_nothing_trained_gives_zeros_everywhere(impl, num_tokens, name):
    config = replace(CONFIGS[name], kl="k3", kl_coefficient=0.1, entropy_coefficient=0.01)
    inputs = random_inputs(num_tokens, masked=1.1)
    leaves = replace(inputs, logprob=inputs.logprob.requires_grad_(), entropy=inputs.entropy.requires_grad_())
    got = run(leaves, config, impl=impl, cu_seqlens=torch.tensor([0, num_tokens], dtype=torch.int32))
    got.loss.backward()
    assert got.loss == 0 and (got.metrics == 0).all()
    assert got.grad.shape == leaves.logprob.grad.shape == (num_tokens,)
    assert (leaves.logprob.grad == 0).all() and (leaves.entropy.grad == 0).all()


@each_impl
@pytest.mark.parametrize("field", ["logprob", "old_logprob", "advantage", "token_weight"])
def test_nan_at_a_trained_token_is_seen_in_loss_and_gradient(impl, field):
    inputs = random_inputs(20, masked=0.0)
    broken = getattr(inputs, field).clone()
    broken[11] = math.nan
    got = run(replace(inputs, **{field: broken}), CONFIGS["ppo"], impl=impl)
    assert got.loss.isnan() and got.grad[11].isnan()
    assert got.grad[:11].isfinite().all() and got.grad[12:].isfinite().all()


@each_impl
@pytest.mark.parametrize("name", ["gppo", "sapo", "gspo", "gmpo"])
def test_trained_token_of_probability_zero_is_a_token_far_away(impl, name):
    inputs = random_inputs(30, masked=0.0)
    cu_seqlens = torch.tensor([0, 10, 30], dtype=torch.int32)
    no_nll = torch.where(torch.arange(30) == 12, 0.0, inputs.nll_weight)
    outs = []
    for logprob in (-math.inf, -1e4):
        broken = torch.where(torch.arange(30) == 12, logprob, inputs.logprob)
        outs.append(
            run(
                replace(inputs, logprob=broken, nll_weight=no_nll),
                CONFIGS[name],
                impl=impl,
                cu_seqlens=cu_seqlens,
            )
        )
    assert outs[0].loss.isfinite() and torch.equal(outs[0].loss, outs[1].loss)
    assert torch.equal(outs[0].grad, outs[1].grad) and torch.equal(outs[0].metrics, outs[1].metrics)


@fast_impls
@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("name", ["gppo", "gspo"])
def test_cut_into_micro_batches_adds_up_to_the_whole(impl, parts, name):
    config = replace(CONFIGS[name], kl="k3", kl_coefficient=0.1, entropy_coefficient=0.01)
    inputs = random_inputs(120)
    cu_seqlens = torch.arange(0, 121, 10, dtype=torch.int32)
    whole = run(inputs, config, impl=impl, cu_seqlens=cu_seqlens)
    size = 120 // parts
    cut = [
        run(block, config, impl=impl, cu_seqlens=torch.arange(0, size + 1, 10, dtype=torch.int32))
        for block in inputs.split(size)
    ]
    assert torch.equal(torch.cat([part.grad for part in cut]), whole.grad)
    torch.testing.assert_close(
        torch.stack([part.loss for part in cut]).sum(), whole.loss, rtol=1e-6, atol=1e-7
    )
    merged = merge_metrics(torch.stack([part.metrics for part in cut]))
    torch.testing.assert_close(merged, whole.metrics, rtol=1e-6, atol=1e-6)


@each_impl
@pytest.mark.parametrize("config", [FULL, CAPPED], ids=["full", "dual_clip"])
def test_metrics_equal_plain_torch(impl, config):
    inputs = random_inputs(100)
    got = run(inputs, config, impl=impl)
    kept = inputs.map(lambda one: one[inputs.mask].double() if one is not inputs.mask else one)
    log_ratio = kept.logprob - kept.old_logprob
    ratio, advantage = log_ratio.exp(), kept.advantage
    gap = kept.ref_logprob - kept.logprob
    high = (advantage > 0) & (ratio > 1.28)
    if config.dual_clip is not None:
        high |= (advantage < 0) & (ratio > config.dual_clip)
    want = {
        "tokens": inputs.mask.sum(),
        "clipped_high": high.sum(),
        "clipped_low": ((advantage < 0) & (ratio < 0.8)).sum(),
        "kl_k1": -log_ratio.sum(),
        "kl_k3": (ratio - 1 - log_ratio).sum(),
        "ratio": ratio.sum(),
        "ratio_max": ratio.max(),
        "grad_abs": got.grad.double().abs().sum(),
        "kl_ref": (gap.exp() - 1 - gap).sum(),
        "entropy": kept.entropy.sum(),
        "nll": -kept.logprob[kept.nll_weight != 0].sum(),
        "nll_tokens": (kept.nll_weight != 0).sum(),
    }
    assert tuple(want) == METRICS == tuple(METRIC_MERGE)
    assert got.metrics.dtype == torch.float32 and got.metrics.shape == (len(METRICS),)
    assert _metric(got, "clipped_high") > 0 and _metric(got, "clipped_low") > 0
    expected = torch.stack([value.double() for value in want.values()])
    torch.testing.assert_close(got.metrics.double(), expected, rtol=1e-5, atol=1e-6)


@fast_impls
def test_kl_of_the_first_update_keeps_its_digits(impl):
    # log-ratios of 1e-3: exp(x) - 1 - x from float32 numbers would be off by a fifth
    log_ratio = torch.linspace(-1e-3, 1e-3, 1001)
    ones = torch.ones_like(log_ratio)
    got = policy_loss(log_ratio, ones * 0, ones, ones > 0, CONFIGS["ppo"], token_weight=ones, impl=impl)
    exact = log_ratio.double()
    assert _metric(got, "kl_k3") == pytest.approx((exact.expm1() - exact).sum().item(), rel=1e-4)


@fast_impls
def test_same_bits_in_every_run_and_wherever_a_token_lies(impl):
    inputs = random_inputs(101)
    first, again = run(inputs, FULL, impl=impl), run(inputs, FULL, impl=impl)
    for name in ("loss", "grad", "grad_entropy", "metrics"):
        assert torch.equal(getattr(first, name), getattr(again, name))
    for start in (1, 3, 8, 50):
        shifted = run(inputs.map(lambda one, at=start: one[at:]), FULL, impl=impl)
        assert torch.equal(shifted.grad, first.grad[start:])
        assert torch.equal(shifted.grad_entropy, first.grad_entropy[start:])


@fast_impls
@pytest.mark.parametrize("num_tokens", [1, 63, 1023, 1024, 1025, 3000])
def test_sizes_around_a_block_read_nothing_beyond_their_tokens(impl, num_tokens):
    inputs = random_inputs(num_tokens, masked=0.2)
    # every tensor in the middle of NaN, every mask in the middle of True
    guarded = inputs.map(lambda one: torch.full((num_tokens + 64,), math.nan).to(one.dtype))
    middle = guarded.map(lambda one: one[32 : 32 + num_tokens])
    for name, one in inputs.named():
        getattr(middle, name).copy_(one)
    got = run(middle, FULL, impl=impl)
    want = run(inputs.map(lambda one: one if one is inputs.mask else one.double()), FULL, impl="reference")
    torch.testing.assert_close(got.loss.double(), want.loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got.grad.double(), want.grad, rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(got.metrics, want.metrics, rtol=1e-5, atol=1e-5)


def test_batch_of_several_blocks_equals_its_blocks_and_the_reference():
    size = portable.BLOCK_TOKENS
    inputs = random_inputs(2 * size + 77)
    got = token_terms(inputs, FULL)
    parts = [token_terms(block, FULL) for block in inputs.split(size // 2 + 5)]
    assert torch.equal(got.grad, torch.cat([part.grad for part in parts]))
    assert torch.equal(got.grad_entropy, torch.cat([part.grad_entropy for part in parts]))
    want = run(inputs.map(lambda one: one if one is inputs.mask else one.double()), FULL, impl="reference")
    # float32 sums of a block, float64 over blocks
    torch.testing.assert_close(got.loss, want.loss, rtol=1e-5, atol=0)
    torch.testing.assert_close(got.metrics, want.metrics.double(), rtol=1e-5, atol=0)
    torch.testing.assert_close(torch.stack([one.loss for one in parts]).sum(), got.loss, rtol=1e-6, atol=0)


@each_impl
def test_inputs_keep_their_bits_and_may_be_strided_or_expanded(impl):
    inputs = random_inputs(64)
    wide = inputs.map(lambda one: torch.stack((one, one), dim=1))
    strided = replace(
        wide.map(lambda one: one[:, 1]),
        token_weight=torch.tensor(0.25).expand(64),
        correction=torch.tensor(2.0).expand(64),
    )
    got = run(strided, FULL, impl=impl)
    want = run(strided.map(torch.clone).map(torch.Tensor.contiguous), FULL, impl=impl)
    assert torch.equal(got.grad, want.grad) and torch.equal(got.metrics, want.metrics)
    for name, one in wide.named():
        both = torch.stack((getattr(inputs, name),) * 2, dim=1)
        assert torch.equal(one.view(torch.uint8), both.view(torch.uint8)), name


@each_impl
def test_backward_twice_scales_by_the_upstream_gradient_each_time(impl):
    inputs = random_inputs(32)
    leaves = replace(inputs, logprob=inputs.logprob.requires_grad_(), entropy=inputs.entropy.requires_grad_())
    out = run(leaves, FULL, impl=impl)
    for upstream in (1.0, 0.0, -3.0):
        leaves.logprob.grad = leaves.entropy.grad = None
        (upstream * out.loss).backward(retain_graph=True)
        assert torch.equal(leaves.logprob.grad, upstream * out.grad)
        assert torch.equal(leaves.entropy.grad, upstream * out.grad_entropy)


@each_impl
def test_entropy_without_a_coefficient_is_a_metric_alone(impl):
    inputs = random_inputs(32)
    leaves = replace(inputs, logprob=inputs.logprob.requires_grad_(), entropy=inputs.entropy.requires_grad_())
    out = run(leaves, CONFIGS["ppo"], impl=impl)
    out.loss.backward()
    assert out.grad_entropy is None and leaves.entropy.grad is None
    assert _metric(out, "entropy") == pytest.approx(inputs.entropy[inputs.mask].sum().item(), rel=1e-6)


@fast_impls
def test_long_sequence_has_the_mean_of_its_trained_tokens_alone(impl):
    # 3 blocks of the kernel; gspo's bounds are 3e-4, so the mean must be right to far below that
    lengths = [0, 3000, 1, 40, 0]
    inputs = random_inputs(sum(lengths))
    mask = inputs.mask.clone()
    mask[-20:] = False
    inputs = replace(inputs, mask=mask)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    if impl == "triton":
        from megatron_rl_kernels.policy_loss.triton_op import triton_sequence_log_ratio as mean_log_ratio
    else:
        mean_log_ratio = sequence_log_ratio
    got = mean_log_ratio(inputs, cu_seqlens, CONFIGS["gspo"])
    log_ratio = torch.where(mask, inputs.logprob.double() - inputs.old_logprob, 0.0)
    for start, length in zip(cu_seqlens.tolist(), lengths, strict=False):
        one = slice(start, start + length)
        want = log_ratio[one].sum() / max(int(mask[one].sum()), 1)
        torch.testing.assert_close(got[one].double(), want.expand(length), rtol=0, atol=3e-8)


def test_sequence_without_trained_tokens_adds_nothing():
    inputs = replace(random_inputs(10), mask=torch.arange(10) < 6)
    inputs = inputs.map(lambda one: one if one is inputs.mask else torch.rand(10))
    cu_seqlens = torch.tensor([0, 6, 10], dtype=torch.int32)
    for impl in ("reference", "portable", "triton"):
        got = run(inputs, CONFIGS["gmpo"], impl=impl, cu_seqlens=cu_seqlens)
        assert got.loss.isfinite() and (got.grad[6:] == 0).all() and _metric(got, "tokens") == 6


@pytest.mark.parametrize("error, match, changes", [
    (TypeError, r"logprob \(4,\) of torch.bfloat16, must be \[N\] of float32", {"logprob": torch.zeros(4).bfloat16()}),
    (TypeError, r"logprob \(2, 2\)", {"logprob": torch.zeros(2, 2)}),
    (TypeError, "old_logprob of torch.float64, must be torch.float32", {"old_logprob": torch.zeros(4).double()}),
    (TypeError, "mask of torch.float32, must be torch.bool", {"mask": torch.ones(4)}),
    (ValueError, r"advantage \(3,\) on cpu, must be like logprob", {"advantage": torch.zeros(3)}),
    (ValueError, "token_weight requires a gradient", {"token_weight": torch.ones(4, requires_grad=True)}),
    (ValueError, "kl = 'k3' needs ref_logprob", {"config": replace(CONFIGS["ppo"], kl="k3", kl_coefficient=1.0)}),
    (ValueError, "entropy_coefficient = 0.1 needs", {"config": replace(CONFIGS["ppo"], entropy_coefficient=0.1)}),
    (ValueError, "'gspo' is per sequence; pass cu_seqlens", {"config": CONFIGS["gspo"]}),
    (TypeError, r"cu_seqlens \(2,\) of torch.int64", {"config": CONFIGS["gspo"], "cu_seqlens": torch.tensor([0, 4])}),
    (ValueError, "runs from 0 to 3, must rise from 0 to N = 4",
        {"config": CONFIGS["gspo"], "cu_seqlens": torch.tensor([0, 3], dtype=torch.int32)}),
    (ValueError, "must rise", {"config": CONFIGS["gspo"], "cu_seqlens": torch.tensor([0, 3, 2, 4], dtype=torch.int32)}),
    (ValueError, "impl = 'numpy', which does not exist", {"impl": "numpy"}),
])  # fmt: skip
def test_argument_that_does_not_fit_is_named(error, match, changes):
    arguments = {
        "logprob": torch.zeros(4),
        "old_logprob": torch.zeros(4),
        "advantage": torch.ones(4),
        "mask": torch.ones(4, dtype=torch.bool),
        "config": CONFIGS["ppo"],
        "token_weight": torch.ones(4),
    }
    with pytest.raises(error, match=match):
        policy_loss(**(arguments | changes))


def test_triton_refuses_float64():
    zeros = torch.zeros(4, dtype=torch.float64)
    with pytest.raises(TypeError, match="impl 'triton' takes float32"):
        policy_loss(zeros, zeros, zeros, zeros == 0, CONFIGS["ppo"], token_weight=zeros, impl="triton")


@pytest.mark.parametrize("match, fields", [
    ("low = -0.1, high = 0.2, neither may be negative", {"surrogate": "clip", "low": -0.1}),
    ("dual_clip = 1.0, must be above 1", {"surrogate": "clip", "dual_clip": 1.0}),
    ("dual_clip = 3.0 means nothing for 'cispo'", {"surrogate": "cispo", "dual_clip": 3.0}),
    ("cispo_mask means nothing for 'clip'", {"surrogate": "clip", "cispo_mask": True}),
    ("grad_high = 1.0 means nothing for 'sapo'", {"surrogate": "sapo", "grad_high": 1.0}),
    ("tau_positive = 0.0", {"surrogate": "sapo", "tau_positive": 0.0}),
    ("high = nan, must be finite", {"surrogate": "clip", "high": math.nan}),
    ("kl = 'k3' with kl_coefficient = 0.0", {"surrogate": "clip", "kl": "k3"}),
    ("surrogate = 'ppo', must be one of", {"surrogate": "ppo"}),
    ("kl = 'k4', must be one of", {"surrogate": "clip", "kl": "k4", "kl_coefficient": 1.0}),
])  # fmt: skip
def test_config_without_meaning_is_refused(match, fields):
    with pytest.raises(ValueError, match=match):
        PolicyLossConfig(**fields)


@each_impl
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_nan_of_a_trained_ratio_reaches_the_loss_of_topr_and_the_largest_ratio(impl, advantage):
    inputs = random_inputs(9, masked=0.0)
    inputs.advantage[:], inputs.old_logprob[4] = advantage, math.nan
    out = run(inputs, CONFIGS["topr"], impl=impl)
    assert math.isnan(_metric(out, "ratio_max"))
    if advantage < 0:
        assert math.isnan(out.loss.item())


@each_impl
def test_nan_advantage_is_counted_as_no_clipped_token(impl):
    inputs = random_inputs(9, masked=0.0)
    inputs.advantage[:] = math.nan
    for name in ("reinforce", "sapo", "topr"):
        out = run(inputs, PolicyLossConfig(surrogate=name), impl=impl)
        assert _metric(out, "clipped_high") == _metric(out, "clipped_low") == 0, name


@each_impl
def test_entropy_and_reference_that_the_loss_does_not_read_may_be_nan(impl):
    inputs = random_inputs(9, masked=0.0)
    want = run(inputs, PolicyLossConfig(surrogate="clip"), impl=impl)
    inputs.entropy[:] = inputs.ref_logprob[:] = math.nan
    got = run(inputs, PolicyLossConfig(surrogate="clip"), impl=impl)
    assert torch.equal(got.loss, want.loss) and math.isfinite(got.loss.item())


@pytest.mark.parametrize("value", ["0.2", None, torch.tensor(0.2), True])
def test_bound_that_is_no_number_is_named(value):
    with pytest.raises(TypeError, match=r"policy_loss: low = .* must be a number"):
        PolicyLossConfig(surrogate="clip", low=value)

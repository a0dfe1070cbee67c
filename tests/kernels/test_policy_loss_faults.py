"""Planted faults: each is one edit of an implementation of policy_loss, and the test named beside it must fail."""

import importlib.util

import pytest

import megatron_rl_kernels.policy_loss as op
from megatron_rl_kernels.policy_loss import portable, reference, triton_kernels, triton_op
from tests.kernels import test_policy_loss as values
from tests.kernels import test_policy_loss_limits as limits

PUBLISHED = values.test_loss_and_gradient_equal_autograd_of_the_published_form
SEQUENCE = values.test_sequence_loss_equals_autograd_of_the_published_form_under_a_sequence_mean
TIE = values.test_ratio_of_exactly_one_is_not_clipped_by_bounds_of_exactly_one
GMPO_TIE = values.test_log_ratio_equal_to_the_bound_of_gmpo_is_not_clipped
KL = values.test_kl_value_and_gradient_equal_autograd_and_ignore_the_correction
ENTROPY_NLL = values.test_entropy_bonus_and_nll_add_their_terms_and_gradients
FAR = values.test_ratio_far_outside_exp_is_finite_and_only_the_value_is_clamped
ZERO = values.test_zero_advantage_gives_no_loss_and_no_gradient
MASKED = limits.test_masked_tokens_may_hold_anything_and_count_for_nothing
METRIC = limits.test_metrics_equal_plain_torch
SMALL_KL = limits.test_kl_of_the_first_update_keeps_its_digits
BLOCKS = limits.test_batch_of_several_blocks_equals_its_blocks_and_the_reference
SIZES = limits.test_sizes_around_a_block_read_nothing_beyond_their_tokens
LONG = limits.test_long_sequence_has_the_mean_of_its_trained_tokens_alone

PORTABLE = [
    ("torch.gt(values, bound,", "torch.ge(values, bound,", ZERO, ("cispo_mask",)),
    ("torch.gt(token.ratio, upper, out=high).mul_(", "torch.ge(token.ratio, upper, out=high).mul_(", TIE, ("ppo",)),
    ("torch.lt(token.ratio, lower, out=low).mul_(", "torch.le(token.ratio, lower, out=low).mul_(", TIE, ("ppo",)),
    ("torch.gt(token.log_ratio, ", "torch.ge(token.log_ratio, ", GMPO_TIE, ()),
    ("torch.lt(token.log_ratio, ", "torch.le(token.log_ratio, ", GMPO_TIE, ()),
    ("values.view(self._integer), bits,", "values.view(self._integer), -1,", MASKED, (limits.FULL,)),
    ("advantage = scratch.select(bits, inputs.advantage)", "advantage = inputs.advantage", MASKED, (limits.FULL,)),
    ("weight = scratch.select(bits, inputs.token_weight)", "weight = inputs.token_weight", MASKED, (limits.FULL,)),
    ("if reads_logprob else inputs.logprob", "if False else inputs.logprob", MASKED, (values.CONFIGS["cispo"],)),
    (".clamp_(-MAX_LOG_RATIO, MAX_LOG_RATIO)\n\n    def above", "\n\n    def above", FAR, ("ppo",)),
    ("mul_(negative)\n        value.addcmul_(", "mul_(1.0)\n        value.addcmul_(", PUBLISHED, ("dual_clip",)),
    ("value.add_(capped, alpha=config.dual_clip)", "value.add_(capped)", PUBLISHED, ("dual_clip",)),
    ("alpha=bound * of_slope", "alpha=of_slope", PUBLISHED, ("gppo",)),
    ("alpha=bound * of_value", "alpha=bound", PUBLISHED, ("ce_gppo",)),
    ("torch.add(high, low,", "torch.add(high, high,", PUBLISHED, ("ppo",)),
    ("config.tau_negative)", "config.tau_positive)", PUBLISHED, ("sapo",)),
    ("torch.clamp(token.ratio, max=1.0", "torch.clamp(token.ratio, max=2.0", PUBLISHED, ("topr",)),
    ("torch.clamp(token.ratio, lower, upper", "torch.clamp(token.ratio, lower, 9.0", PUBLISHED, ("cispo",)),
    ("pull *= scratch.select(bits, inputs.correction)", "pass", KL, ("k2",)),
    ("torch.mul(weight, advantage, out=scratch.row()).neg_()", "torch.mul(weight, advantage)", PUBLISHED, ("ppo",)),
    ("return gap.add_(value).neg_()", "return gap.add_(value)", KL, ("k3",)),
    ("mul_(0.5)\n    return gap.neg_()", "mul_(0.5)\n    return gap", KL, ("k2",)),
    ("gap.mul_(ratio).neg_()", "gap.neg_()", KL, ("k3_unbiased",)),
    ("grad -= nll_weight", "grad += nll_weight", ENTROPY_NLL, ()),
    ("value=-config.entropy_coefficient)", "value=config.entropy_coefficient)", ENTROPY_NLL, ()),
    ("weight, -config.entropy_coefficient", "weight, config.entropy_coefficient", ENTROPY_NLL, ()),
    ("parts[:, _NEGATED] *= -1.0", "pass", METRIC, (limits.FULL,)),
    ("_select(bits, ratio, out=rows.ratio)", "rows.ratio.copy_(ratio)", METRIC, (limits.FULL,)),
    ("torch.amax(scratch.rows.ratio,", "torch.mean(scratch.rows.ratio,", METRIC, (limits.FULL,)),
    ("high.add_(capped)", "pass", METRIC, (limits.CAPPED,)),
    ("half.addcmul_(half, exp_gap).sub_(gap)", "torch.sub(exp_gap, 1.0, out=half).sub_(gap)", SMALL_KL, ()),
    ("start = index * BLOCK_TOKENS", "start = 0", BLOCKS, None),
    ("counts.clamp(min=1)", "offsets.diff().clamp(min=1)", LONG, ()),
    ("log_ratio.clamp(max=config.high)", "log_ratio", SEQUENCE, ("gmpo",)),
    ("ratio = shared.clamp_", "shared.clamp_", SEQUENCE, ("gspo",)),
]  # fmt: skip

REFERENCE = [
    ("ratio > upper), negative", "ratio >= upper), negative", TIE, ("ppo",)),
    ("value = torch.where(low, lower *", "value = torch.where(low, upper *", PUBLISHED, ("gppo",)),
    ("negative & (ratio > config.dual_clip)", "ratio > config.dual_clip", PUBLISHED, ("dual_clip",)),
    ("ratio * one - 1.0", "ratio - 1.0", PUBLISHED, ("sapo",)),
    ("_clamped(gap) - shift", "_clamped(gap)", KL, ("k3",)),
    ("return ratio * one * k3", "return ratio * k3", KL, ("k3_unbiased",)),
    ("terms - config.entropy_coefficient", "terms + config.entropy_coefficient", ENTROPY_NLL, ()),
    ("high | low, ratio, ratio * one", "high & low, ratio, ratio * one", SEQUENCE, ("gmpo",)),
    ("inputs.mask.nonzero()", "(inputs.mask | True).nonzero()", MASKED, (limits.FULL,)),
]  # fmt: skip

TRITON = [
    ("(ratio > upper)\n    is_low = (advantage < 0) & (ratio < lower)\n    value",
     "(ratio >= upper)\n    is_low = (advantage < 0) & (ratio < lower)\n    value", TIE, ("ppo",)),
    ("(advantage < 0) & (ratio > dual_clip)", "(ratio > dual_clip)", PUBLISHED, ("dual_clip",)),
    ("return tl.where(kept, tl.load(ptr", "return tl.where(inside, tl.load(ptr", MASKED, (limits.FULL,)),
    ("tl.where(log_ratio > MAX_LOG_RATIO, MAX_LOG_RATIO, log_ratio)", "log_ratio", FAR, ("ppo",)),
    ("slope = -(gap + value)", "slope = gap + value", KL, ("k3",)),
    ("grad -= nll_weight", "grad += nll_weight", ENTROPY_NLL, ()),
    ("tl.abs(gap) < 0.25", "tl.abs(gap) < 0.0", SMALL_KL, ()),
    ("token_ratio, tl.where(kept, ratio, 0.0)", "token_ratio, ratio", METRIC, (limits.FULL,)),
    ("tl.load(mask_ptr + token, mask=inside, other=0)", "tl.load(mask_ptr + token)", SIZES, (1023,)),
    ("column < num_blocks, other=0.0", "column < num_blocks - 1, other=0.0", SIZES, (3000,)),
    ("count += kept.to(tl.float32)", "count += inside.to(tl.float32)", LONG, ()),
    ("_k3(log_ratio, token_ratio)", "_k3(-log_ratio, token_ratio)", METRIC, (limits.FULL,)),
]  # fmt: skip


def _edited(module, old, new, directory):
    """The module with one edit, as another module."""
    with open(module.__file__) as file:
        source = file.read()
    assert source.count(old) >= 1, f"{module.__name__} has no {old!r}: the fault is out of date"
    path = directory / "edited.py"
    path.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location("edited", path)
    edited = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(edited)
    return edited


def _must_fail(check, impl, arguments):
    with pytest.raises(AssertionError):
        check(*(() if arguments is None else (impl, *arguments)))


@pytest.mark.parametrize("old, new, check, arguments", PORTABLE)
def test_fault_in_the_portable_implementation_is_caught(old, new, check, arguments, tmp_path, monkeypatch):
    edited = _edited(portable, old, new, tmp_path)
    for module in (op, limits):
        for name in ("token_terms", "sequence_log_ratio"):
            monkeypatch.setattr(module, name, getattr(edited, name))
    _must_fail(check, "portable", arguments)


@pytest.mark.parametrize("old, new, check, arguments", REFERENCE)
def test_fault_in_the_reference_is_caught(old, new, check, arguments, tmp_path, monkeypatch):
    monkeypatch.setattr(op, "reference_terms", _edited(reference, old, new, tmp_path).reference_terms)
    _must_fail(check, "reference", arguments)


@pytest.mark.parametrize("old, new, check, arguments", TRITON)
def test_fault_in_a_triton_kernel_is_caught(old, new, check, arguments, tmp_path, monkeypatch):
    edited = _edited(triton_kernels, old, new, tmp_path)
    for name in ("policy_loss_kernel", "sequence_log_ratio_kernel", "merge_parts_kernel"):
        monkeypatch.setattr(triton_op, name, getattr(edited, name))
    _must_fail(check, "triton", arguments)

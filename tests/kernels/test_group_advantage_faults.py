"""Planted faults: each is one edit of an implementation of group_advantage, and the test named beside it must fail."""

import importlib.util

import pytest

import megatron_rl_kernels.group_advantage as op
from megatron_rl_kernels.group_advantage import portable, reference, triton_kernels, triton_op
from tests.kernels import test_group_advantage as tests

HAND = tests.test_formula_of_each_mode_by_hand
TRAINER = tests.test_same_numbers_as_the_advantages_of_the_trainer
SHUFFLED = tests.test_shuffled_groups_of_uneven_sizes_equal_the_reference_in_float64
EQUAL = tests.test_equal_rewards_give_exact_zeros_whatever_their_mean_rounds_to
OFFSET = tests.test_offset_of_all_rewards_costs_no_digits
SINGLE = tests.test_group_of_one_is_an_error_and_zero_where_that_is_asked_for
STD = ("std", tests.group_std_advantages)
# of rewards 1 0 0 0 1 1 -1 1 with an eps of 0.5
UNBIASED = ("std", True, [0.75, -0.25, -0.25, -0.25, 0.5 / 1.5, 0.5 / 1.5, -1.0, 0.5 / 1.5])
OTHERS = ("leave_one_out", False, [1.0, -1 / 3, -1 / 3, -1 / 3, 2 / 3, 2 / 3, -2.0, 2 / 3])

# who imports what of an implementation
USES = {
    portable: (op, "portable", ["group_advantage_portable"]),
    reference: (op, "reference", ["group_advantage_reference"]),
    triton_kernels: (triton_op, "triton", ["group_kernel", "batch_std_kernel"]),
}
FAULTS = [
    (portable, "(counts - int(unbiased))", "(counts - 1)", TRAINER, STD),
    (portable, "(counts - int(unbiased))", "counts", HAND, UNBIASED),
    (portable, "deviation[groups.index] + eps", "deviation[groups.index]", HAND, UNBIASED),
    (portable, "counts.double() / (counts - 1)", "(counts - 1).double() / (counts - 1)", HAND, OTHERS),
    (portable, "_batch_std(rewards, unbiased)", "_batch_std(advantage, unbiased)", SHUFFLED, ("batch_std", False)),
    (portable, "torch.where(varied, advantage, 0.0)", "advantage", EQUAL, ("std", 0.0, 0.1)),
    (portable, ".index_copy_(0, groups.order, advantage)", ".copy_(advantage)", SHUFFLED, ("mean", False)),
    (portable, "reward.double()", "reward.clone()", OFFSET, ("mean",)),
    (reference, "len(values) - int(unbiased)", "len(values)", HAND, UNBIASED),
    (reference, "(rewards.sum() - rewards)", "rewards.sum()", HAND, OTHERS),
    (reference, "if not is_equal:", "if True:", EQUAL, ("std", 1e-6, 0.1)),
    (triton_kernels, "total += tl.where(inside, reward - first, 0.0)", "total += reward - first", HAND, UNBIASED),
    (triton_kernels, "reward - first", "reward", OFFSET, ("mean",)),
    (triton_kernels, "position = tl.load(order_ptr", "position = 0 * tl.load(order_ptr", SHUFFLED, ("mean", False)),
    (triton_kernels, "if UNBIASED:", "if not UNBIASED:", TRAINER, STD),
    (triton_kernels, "count / tl.where(count > 1, count - 1, 1.0)", "count / (count - 1)", SINGLE, ("leave_one_out",)),
]  # fmt: skip


@pytest.mark.parametrize("module, old, new, check, arguments", FAULTS)
def test_fault_is_caught(module, old, new, check, arguments, tmp_path, monkeypatch):
    with open(module.__file__) as file:
        source = file.read()
    assert old in source, f"{module.__name__} has no {old!r}: the fault is out of date"
    path = tmp_path / "edited.py"
    path.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location("edited", path)
    edited = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(edited)
    user, impl, names = USES[module]
    for name in names:
        monkeypatch.setattr(user, name, getattr(edited, name))
    with pytest.raises(AssertionError):
        check(impl, *arguments)

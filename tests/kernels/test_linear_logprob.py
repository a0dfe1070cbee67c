"""linear_logprob against its float64 definition: values, gradients, limits, and the memory it promises."""

import math

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_rl_kernels.linear_logprob import LinearLogprob, linear_logprob, linear_logprob_reference


def _inputs(num_tokens, vocab, *, hidden_size=16, scale=1.0, dtype=torch.float32, seed=0):
    draw = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_tokens, hidden_size, generator=draw).mul(scale).to(dtype)
    weight = torch.randn(vocab, hidden_size, generator=draw).to(dtype)
    target = torch.randint(vocab, (num_tokens,), generator=draw)
    return hidden, weight, target


def _upstream(num_tokens, *, seed=1):
    """Gradients of both signs for log-prob and entropy; the first is 0, as on a masked token."""
    upstream = torch.randn(2, num_tokens, generator=torch.Generator().manual_seed(seed))
    upstream[:, 0] = 0
    return upstream


def _reference(hidden, weight, target, upstream, **options):
    hidden, weight = (tensor.double().detach().requires_grad_() for tensor in (hidden, weight))
    out = linear_logprob_reference(hidden, weight, target, **options)
    (upstream[0] * out.logprob + upstream[1] * out.entropy).sum().backward()
    return out.logprob.detach(), out.entropy.detach(), hidden.grad, weight.grad


def _portable(hidden, weight, target, upstream, **options):
    hidden, weight = (tensor.detach().clone().requires_grad_() for tensor in (hidden, weight))
    out = linear_logprob(hidden, weight, target, **options)
    (upstream[0] * out.logprob + upstream[1] * out.entropy).sum().backward()
    return out.logprob.detach(), out.entropy.detach(), hidden.grad, weight.grad


def _assert_matches(got, want, *, value_atol, grad_rtol):
    for name, actual, expected in zip(("logprob", "entropy"), got[:2], want[:2], strict=True):
        torch.testing.assert_close(
            actual.double(), expected, rtol=0, atol=value_atol, msg=lambda m, n=name: f"{n}: {m}"
        )
    for name, actual, expected in zip(("grad hidden", "grad weight"), got[2:], want[2:], strict=True):
        error = (actual.double() - expected).norm() / expected.norm().clamp(min=1e-9)
        assert error < grad_rtol, f"{name}: relative error {error:.2e}"


@pytest.mark.parametrize("num_tokens", [1, 63, 1000], ids="n{}".format)
@pytest.mark.parametrize("vocab", [5, 63, 251], ids="v{}".format)
def test_values_and_gradients_match_the_float64_definition(num_tokens, vocab):
    hidden, weight, target = _inputs(num_tokens, vocab)
    # the first upstream row is 0, so that a batch of one token needs its own
    upstream = _upstream(num_tokens + 1)[:, 1:]
    # neither chunk divides its size
    got = _portable(hidden, weight, target, upstream, chunk_tokens=17, chunk_vocab=10)
    want = _reference(hidden, weight, target, upstream)
    # float32 sums of 16 products of size 1
    _assert_matches(got, want, value_atol=2e-5, grad_rtol=2e-6)


@pytest.mark.parametrize("temperature", [0.3, 2.0], ids="t{}".format)
def test_temperature_scales_values_and_gradients_in_one_place(temperature):
    hidden, weight, target = _inputs(63, 40)
    upstream = _upstream(63)
    got = _portable(hidden, weight, target, upstream, temperature=temperature, chunk_tokens=20)
    want = _reference(hidden, weight, target, upstream, temperature=temperature)
    _assert_matches(got, want, value_atol=5e-5, grad_rtol=2e-6)


def test_padded_rows_take_no_part_and_get_no_gradient():
    hidden, weight, target = _inputs(63, 48)
    target = target % 41
    weight[41:] = 100.0  # would win every softmax
    upstream = _upstream(63)
    got = _portable(hidden, weight, target, upstream, valid_vocab=41, chunk_vocab=16)
    want = _reference(hidden, weight[:41], target, upstream)
    assert got[3][41:].abs().max() == 0
    _assert_matches((*got[:3], got[3][:41]), want, value_atol=2e-5, grad_rtol=2e-6)


@pytest.mark.parametrize("part", [0, 1], ids=["logprob", "entropy"])
def test_gradient_of_each_output_alone_is_right(part):
    hidden, weight, target = _inputs(20, 63)
    leaves = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]
    out = linear_logprob(*leaves, target, chunk_tokens=7, chunk_vocab=16)
    (out.logprob, out.entropy)[part].sum().backward()
    exact = [tensor.double().requires_grad_() for tensor in (hidden, weight)]
    want = linear_logprob_reference(*exact, target)
    (want.logprob, want.entropy)[part].sum().backward()
    for got, expected in zip(leaves, exact, strict=True):
        torch.testing.assert_close(got.grad.double(), expected.grad, rtol=1e-5, atol=1e-5)


def test_gradients_pass_gradcheck_in_float64():
    hidden, weight, target = _inputs(6, 11, hidden_size=3, dtype=torch.float64)

    def op(hidden, weight):
        out = linear_logprob(hidden, weight, target, temperature=0.7, chunk_tokens=4, chunk_vocab=3)
        return out.logprob, out.entropy

    assert torch.autograd.gradcheck(op, (hidden.requires_grad_(), weight.requires_grad_()))


def test_extreme_logits_stay_finite_and_right():
    # logits of -1e4, 0 and 1e4 for every token
    weight = torch.tensor([[-1.0], [0.0], [1.0]])
    hidden = torch.full((3, 1), 1e4)
    target = torch.tensor([0, 1, 2])
    got = _portable(hidden, weight, target, torch.ones(2, 3), chunk_vocab=2)
    assert got[0].tolist() == [-2e4, -1e4, 0.0]
    assert got[1].tolist() == [0.0, 0.0, 0.0]
    assert all(torch.isfinite(tensor).all() for tensor in got)


@pytest.mark.parametrize("offset", [-1e4, -200.0, 200.0, 1e4], ids="offset{:g}".format)
def test_offset_shared_by_all_logits_changes_nothing(offset):
    # every number here is exact in float32, so the offset alone could do harm
    weight = torch.tensor([[0.0, 1.0], [1.0, 1.0], [3.0, 1.0], [-2.0, 1.0], [0.5, 1.0]])
    target = torch.tensor([1, 4, 0])
    hidden = torch.tensor([[1.0, 0.0], [2.0, 0.0], [-1.0, 0.0]])
    moved = hidden + torch.tensor([0.0, offset])
    here, there = (linear_logprob(states, weight, target, chunk_vocab=2) for states in (hidden, moved))
    torch.testing.assert_close(there.logprob, here.logprob, rtol=0, atol=1e-6)
    torch.testing.assert_close(there.entropy, here.entropy, rtol=0, atol=1e-6)


def test_bf16_inputs_are_multiplied_and_summed_in_float32():
    hidden, weight, target = _inputs(1000, 251, dtype=torch.bfloat16)
    upstream = _upstream(1000)
    got = _portable(hidden, weight, target, upstream, chunk_tokens=17)
    want = _reference(hidden, weight, target, upstream)
    assert got[0].dtype == got[1].dtype == torch.float32
    assert got[2].dtype == got[3].dtype == torch.bfloat16
    # one rounding to bf16 (2^-9) of each gradient, however many chunks added up to it
    _assert_matches(got, want, value_atol=2e-5, grad_rtol=2e-3)


def test_no_tokens_give_no_values_and_zero_gradients():
    hidden, weight, target = _inputs(0, 7)
    got = _portable(hidden, weight, target, torch.ones(2, 0))
    assert [tuple(tensor.shape) for tensor in got] == [(0,), (0,), (0, 16), (7, 16)]
    assert got[3].abs().max() == 0


def test_entropy_that_was_not_asked_for_leaves_logprobs_and_gradients_as_they_are():
    hidden, weight, target = _inputs(63, 40)
    hidden.requires_grad_()
    with_it = linear_logprob(hidden, weight, target)
    without = linear_logprob(hidden, weight, target, with_entropy=False)
    assert without.entropy is None
    assert torch.equal(with_it.logprob, without.logprob)
    grads = [torch.autograd.grad(out.logprob.sum(), hidden)[0] for out in (with_it, without)]
    assert torch.equal(*grads)


def test_backward_twice_gives_the_same_bits_and_inputs_are_not_written():
    hidden, weight, target = _inputs(63, 40)
    leaves = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]
    out = linear_logprob(*leaves, target)
    total = (out.logprob + out.entropy).sum()
    first = torch.autograd.grad(total, leaves, retain_graph=True)
    second = torch.autograd.grad(total, leaves)
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))
    assert torch.equal(leaves[0], hidden) and torch.equal(leaves[1], weight)


def test_strided_inputs_and_expanded_gradients_are_read_correctly():
    wide, weight, labels = _inputs(64, 40, hidden_size=32)
    hidden, weight, target = wide[1:, ::2], weight[:, ::2], labels[1:]
    got = _portable(hidden, weight, target, torch.ones(2, 1).expand(2, 63))
    want = _reference(hidden, weight, target, torch.ones(2, 63))
    _assert_matches(got, want, value_atol=2e-5, grad_rtol=2e-6)


def test_target_that_no_shard_owns_is_nan_and_not_a_number_that_looks_right():
    hidden, weight, _ = _inputs(3, 8)
    logprob = linear_logprob(hidden, weight, torch.tensor([2, 8, -100]), valid_vocab=7).logprob
    assert torch.isnan(logprob).tolist() == [False, True, True]


def test_probabilities_add_up_to_one_and_entropy_has_its_bounds():
    hidden, weight, _ = _inputs(4, 63)
    every = torch.arange(63).repeat(4)
    out = linear_logprob(hidden.repeat_interleave(63, 0), weight, every, chunk_vocab=16)
    torch.testing.assert_close(out.logprob.exp().view(4, 63).sum(1), torch.ones(4), rtol=0, atol=1e-5)
    assert (out.logprob <= 0).all() and (out.entropy >= 0).all() and (out.entropy <= math.log(63)).all()


class _LargestTensor(TorchDispatchMode):
    """Remembers the largest storage that any operator returned while active, in elements."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.elements = max(self.elements, leaf.untyped_storage().nbytes() // leaf.element_size())
        return out


def _largest_tensor(op, **options) -> int:
    hidden, weight, target = _inputs(2048, 1000, hidden_size=8)
    hidden.requires_grad_(), weight.requires_grad_()
    with _LargestTensor() as largest:
        out: LinearLogprob = op(hidden, weight, target, **options)
        (out.logprob + out.entropy).sum().backward()
    return largest.elements


def test_no_tensor_is_larger_than_one_chunk_of_logits():
    assert _largest_tensor(linear_logprob, chunk_tokens=64) <= 64 * 1000
    assert _largest_tensor(linear_logprob, chunk_tokens=256, chunk_vocab=250) <= 256 * 250
    # the instrument does see what the definition materialises
    assert _largest_tensor(linear_logprob_reference) == 2048 * 1000


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"hidden": torch.zeros(3, 5)}, ValueError, "H of hidden and weight"),
        ({"target": torch.zeros(4, dtype=torch.int64)}, ValueError, "N of hidden and target"),
        ({"target": torch.zeros(3)}, TypeError, "must be torch.int64"),
        ({"weight": torch.zeros(7, 16, dtype=torch.bfloat16)}, TypeError, "same one of"),
        ({"hidden": torch.zeros(3, 1, 16)}, ValueError, "expected hidden"),
        ({"temperature": 0.0}, ValueError, "temperature = 0.0"),
        ({"chunk_tokens": 0}, ValueError, "chunk_tokens = 0"),
        ({"valid_vocab": 5, "vocab_start": 5}, ValueError, "no real row"),
    ],
    ids=["hidden size", "tokens", "target dtype", "dtypes", "ndim", "temperature", "chunk", "all padding"],
)
def test_arguments_that_do_not_fit_are_named(change, error, words):
    hidden, weight, target = _inputs(3, 7)
    arguments = {"hidden": hidden, "weight": weight, "target": target} | change
    with pytest.raises(error, match=words):
        linear_logprob(**arguments)

"""linear_logprob at its limits: extreme logits, -inf, foreign targets, poisoned surroundings, far strides, memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_rl_kernels.linear_logprob import LinearLogprob, linear_logprob
from tests.helpers.linear_logprob import assert_matches, exact, inputs, run, upstream_of

IMPLS = pytest.mark.parametrize("impl", ["portable", "triton"])
_ROOT = Path(__file__).parents[2]
NAN, INF = float("nan"), float("inf")


@pytest.fixture
def poisoned():
    """Memory that nobody has written holds NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def _overflowing(blocked, vocab=520, num_tokens=5):
    """Inputs whose logits overflow to -inf in the columns `blocked`, for every token."""
    hidden, weight, target = inputs(num_tokens, vocab)
    hidden[:, 0], weight[:, 0] = 1e20, 0.0
    weight[blocked, 0] = -1e20
    return hidden, weight, target


@IMPLS
def test_extreme_logits_stay_finite_and_right(impl):
    # logits of -1e4, 0 and 1e4 for every token
    weight = torch.zeros(3, 8)
    weight[:, 0] = torch.tensor([-1.0, 0.0, 1.0])
    hidden = torch.zeros(3, 8)
    hidden[:, 0] = 1e4
    got = run(hidden, weight, torch.tensor([0, 1, 2]), torch.ones(2, 3), impl=impl, chunk_vocab=2)
    assert got[0].tolist() == [-2e4, -1e4, 0.0]
    assert got[1].tolist() == [0.0, 0.0, 0.0]
    assert all(torch.isfinite(tensor).all() for tensor in got)


@IMPLS
@pytest.mark.parametrize("offset", [-1e4, -300.0, 300.0, 1e4], ids="offset{:g}".format)
def test_offset_shared_by_all_logits_changes_nothing(offset, impl):
    # every number here is exact in float32, so the offset alone could do harm
    weight = torch.zeros(300, 8)
    weight[:, 0] = torch.arange(300) % 64 / 8.0
    weight[:, 1] = 1.0
    hidden = torch.zeros(3, 8)
    hidden[:, 0] = torch.tensor([1.0, 0.5, -1.0])
    moved = hidden.clone()
    moved[:, 1] = offset
    target = torch.tensor([1, 290, 0])
    here, there = (
        run(states, weight, target, upstream_of(3), impl=impl, chunk_vocab=128) for states in (hidden, moved)
    )
    torch.testing.assert_close(there[0], here[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(there[1], here[1], rtol=0, atol=1e-6)
    torch.testing.assert_close(there[2], here[2], rtol=0, atol=1e-6)
    torch.testing.assert_close(there[3][:, 0], here[3][:, 0], rtol=0, atol=1e-6)


@IMPLS
@pytest.mark.parametrize(
    "blocked", [slice(0, 300), slice(300, None), slice(0, 519)], ids=["first", "last", "all but one"]
)
@pytest.mark.parametrize("chunk_vocab", [100, None], ids=["blocks", "one block"])
def test_blocks_of_minus_infinity_count_nothing(blocked, chunk_vocab, impl):
    hidden, weight, target = _overflowing(blocked)
    allowed = torch.ones(520, dtype=torch.bool)
    allowed[blocked] = False
    choices = allowed.nonzero().squeeze(1)
    target = choices[target % len(choices)]
    upstream = upstream_of(5)
    got = run(hidden, weight, target, upstream, impl=impl, chunk_vocab=chunk_vocab)
    # float64 holds these logits, and they weigh exactly 0 there
    want = exact(hidden, weight, target, upstream)
    torch.testing.assert_close(got[0].double(), want[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(got[1].double(), want[1], rtol=0, atol=1e-5)
    # the first column is many orders of magnitude larger than the others: that of hidden only if a blocked row weighs
    # something, that of weight always, since it is a rounded probability times 1e20
    for gradient, expected, first in zip(got[2:], want[2:], (1e14, 1e20), strict=True):
        errors = (gradient.double() - expected).norm(dim=0)
        scale = expected.norm(dim=0) + torch.tensor([first] + [1.0] * 15)
        assert (errors / scale).max() < 3e-6


@IMPLS
def test_target_of_minus_infinity_has_that_logprob_and_leaves_the_rest_finite(impl):
    hidden, weight, target = _overflowing([7])
    target[2] = 7
    logprob, entropy, *grads = run(hidden, weight, target, torch.ones(2, 5), impl=impl, chunk_vocab=100)
    assert torch.isneginf(logprob).tolist() == [False, False, True, False, False]
    assert torch.isfinite(entropy).all() and all(torch.isfinite(grad).all() for grad in grads)


@IMPLS
def test_token_without_any_finite_logit_is_nan_and_alone(impl):
    hidden, weight, target = _overflowing(slice(0, 520))
    hidden[1:, 0] = 0.0
    got = linear_logprob(hidden, weight, target, impl=impl)
    for values in (got.logprob, got.entropy):
        assert torch.isnan(values).tolist() == [True, False, False, False, False]


@IMPLS
@pytest.mark.parametrize("junk", [NAN, INF], ids=str)
def test_token_with_a_logit_that_is_no_number_is_nan_and_alone(junk, impl):
    hidden, weight, target = inputs(5, 520)
    # a product of these overflows in row 7 alone, while NaN reaches every row
    hidden[1, 0] = 3e38 if junk == INF else junk
    weight[:, 0] = 0.0
    weight[7, 0] = 100.0
    got = linear_logprob(hidden, weight, target, impl=impl, chunk_vocab=100)
    for values in (got.logprob, got.entropy):
        assert torch.isnan(values).tolist() == [False, True, False, False, False]


@IMPLS
def test_target_outside_the_vocabulary_is_nan_without_gradient_of_its_logprob(impl):
    hidden, weight, _ = inputs(6, 8)
    # ids 10 to 16 are real; the first and the last are; 2^32 + 12 is 12 in 32 bits
    target = torch.tensor([10, 16, 17, 9, -100, 2**32 + 12])
    leaf = hidden.clone().requires_grad_()
    out = linear_logprob(leaf, weight, target, vocab_start=10, valid_vocab=17, impl=impl, chunk_vocab=4)
    is_nan = [False, False, True, True, True, True]
    assert torch.isnan(out.logprob).tolist() == is_nan
    assert torch.isfinite(out.entropy).all()
    out.logprob.sum().backward()
    assert [bool((row == 0).all()) for row in leaf.grad] == is_nan
    want = exact(hidden[:2], weight, target[:2] - 10, torch.tensor([[1.0, 1.0], [0.0, 0.0]]), valid_vocab=7)
    torch.testing.assert_close(out.logprob[:2].detach().double(), want[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(leaf.grad[:2].double(), want[2], rtol=1e-5, atol=1e-5)


@IMPLS
@pytest.mark.parametrize("junk", [INF, NAN, 1e38], ids=str)
def test_token_without_gradient_may_hold_anything(junk, impl, poisoned):
    hidden, weight, target = inputs(63, 300)
    upstream = upstream_of(63)
    upstream[:, 5:20] = 0
    keep = torch.ones(63, dtype=torch.bool)
    keep[5:20] = False
    want = exact(hidden[keep], weight, target[keep], upstream[:, keep])
    hidden[5:20] = junk
    temperature = torch.ones(63)
    temperature[5] = 0.0
    got = run(hidden, weight, target, upstream, temperature=temperature, impl=impl, chunk_tokens=32)
    assert (got[2][~keep] == 0).all()
    assert_matches((got[0][keep], got[1][keep], got[2][keep], got[3]), want, value_atol=2e-5, grad_rtol=3e-6)


@IMPLS
def test_surroundings_of_the_inputs_are_not_read_and_inputs_not_written(impl, poisoned):
    states, rows, ids = inputs(64, 48, hidden_size=24)
    hidden = torch.full((70, 64), NAN)[3:67, 16:40]
    weight = torch.full((60, 48), NAN)[5:53, 8:32]
    target = torch.full((130,), -100)[1:129:2]
    hidden.copy_(states), weight.copy_(rows), target.copy_(ids % 41)
    weight[41:] = 1e4
    before = [tensor.clone() for tensor in (hidden, weight, target)]
    upstream = upstream_of(64)
    got = run(hidden, weight, target, upstream, valid_vocab=41, impl=impl, chunk_tokens=20, chunk_vocab=16)
    want = exact(states, rows[:41], ids % 41, upstream)
    assert_matches((*got[:3], got[3][:41]), want, value_atol=2e-5, grad_rtol=3e-6)
    assert (got[3][41:] == 0).all()
    assert all(torch.equal(*pair) for pair in zip((hidden, weight, target), before, strict=True))


@IMPLS
def test_shifted_labels_and_expanded_gradients_are_read_correctly(impl):
    wide, weight, labels = inputs(64, 40, hidden_size=32)
    hidden, target = wide[1:, 8:24], labels[1:]
    weight = weight[:, 16:]
    got = run(hidden, weight, target, torch.ones(2, 1).expand(2, 63), impl=impl)
    want = exact(hidden, weight, target, torch.ones(2, 63))
    assert_matches(got, want, value_atol=2e-5, grad_rtol=3e-6)


def test_portable_takes_any_stride():
    wide, weight, labels = inputs(64, 40, hidden_size=32)
    hidden, weight = wide[:, ::2], weight[:, ::2].T.contiguous().T
    got = run(hidden, weight, labels, upstream_of(64), impl="portable")
    assert_matches(got, exact(hidden, weight, labels, upstream_of(64)), value_atol=2e-5, grad_rtol=3e-6)


@IMPLS
def test_no_tokens_give_no_values_and_zero_gradients(impl):
    hidden, weight, target = inputs(0, 7)
    got = run(hidden, weight, target, torch.ones(2, 0), impl=impl)
    assert [tuple(tensor.shape) for tensor in got] == [(0,), (0,), (0, 16), (7, 16)]
    assert got[3].abs().max() == 0
    main_grad = torch.ones(7, 16)
    run_into = linear_logprob(
        hidden, weight.requires_grad_(), target, main_grad=main_grad, temperature=torch.ones(0), impl=impl
    )
    run_into.logprob.sum().backward()
    assert (main_grad == 1).all()


@IMPLS
def test_same_inputs_give_the_same_bits_forward_and_backward_again(impl):
    hidden, weight, target = inputs(63, 300)
    leaves = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]
    out, again = (linear_logprob(*leaves, target, impl=impl, chunk_vocab=128) for _ in range(2))
    assert all(
        torch.equal(getattr(out, name), getattr(again, name)) for name in ("logprob", "entropy", "lse")
    )
    total = (out.logprob + out.entropy).sum()
    first = torch.autograd.grad(total, leaves, retain_graph=True)
    other = torch.autograd.grad(out.logprob, leaves, upstream_of(63)[0], retain_graph=True)
    second = torch.autograd.grad(total, leaves)
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))
    assert not torch.equal(first[0], other[0])
    assert torch.equal(leaves[0], hidden) and torch.equal(leaves[1], weight)


@IMPLS
def test_chunks_change_rounding_at_most(impl):
    hidden, weight, target = inputs(63, 300)
    want = run(hidden, weight, target, upstream_of(63), impl=impl)
    for chunk_tokens, chunk_vocab in ((16, None), (None, 64), (63, 300), (1000, 1000), (25, 77)):
        chunks = {"chunk_tokens": chunk_tokens, "chunk_vocab": chunk_vocab}
        got = run(hidden, weight, target, upstream_of(63), impl=impl, **chunks)
        if impl == "triton":
            # forward is one launch
            assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
        assert (got[0] - want[0]).abs().max() < 4e-6
        for gradient, expected in zip(got[2:], want[2:], strict=True):
            assert (gradient - expected).norm() / expected.norm() < 1e-6


_FAR_STRIDES = """
import torch
from tests.helpers.linear_logprob import assert_matches, exact, inputs, run, upstream_of

def far(rows):
    # rows 0, 1 and 2 are 4 GiB apart, of which a few pages exist
    storage = torch.empty(2 * 2**30 + rows.shape[1], dtype=rows.dtype)
    return storage.as_strided(rows.shape, (2**30, 1)).copy_(rows)

hidden, weight, _ = inputs(3, 3, dtype=torch.float32)
target = torch.tensor([2, 0, 1])
for impl in ("portable", "triton"):
    got = run(far(hidden), far(weight), target, upstream_of(3), impl=impl)
    assert_matches(got, exact(hidden, weight, target, upstream_of(3)), value_atol=2e-5, grad_rtol=3e-6)
    print(impl, "matches", flush=True)
"""


def test_rows_beyond_the_reach_of_32_bit_offsets_are_found():
    # a process of its own: a wrong offset ends it
    done = subprocess.run(
        [sys.executable, "-c", _FAR_STRIDES],
        env=dict(
            os.environ, TRITON_INTERPRET="1", OMP_NUM_THREADS="1", PYTHONPATH=f"{_ROOT}:{_ROOT}/kernels"
        ),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.splitlines() == ["portable matches", "triton matches"], done.stderr


class _LargestTensor(TorchDispatchMode):
    """Remembers the largest storage that any operator returned while active, in float32 numbers."""

    def __init__(self):
        super().__init__()
        self.floats = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.floats = max(self.floats, leaf.untyped_storage().nbytes() // 4)
        return out


def _largest_tensor(num_tokens, **options) -> int:
    hidden, weight, target = inputs(num_tokens, 1000, hidden_size=8)
    hidden.requires_grad_(), weight.requires_grad_()
    with _LargestTensor() as largest:
        out: LinearLogprob = linear_logprob(hidden, weight, target, **options)
        (out.logprob + out.entropy).sum().backward()
    return largest.floats


def test_no_tensor_is_larger_than_one_chunk_of_logits():
    assert _largest_tensor(2048, chunk_tokens=64, impl="portable") <= 64 * 1000
    assert _largest_tensor(2048, chunk_tokens=256, chunk_vocab=250, impl="portable") <= 256 * 250
    # rows of a chunk are padded to 64 columns
    assert _largest_tensor(256, chunk_tokens=128, chunk_vocab=250, impl="triton") <= 128 * 256
    # the instrument does see what the definition materialises
    assert _largest_tensor(2048, impl="reference") == 2048 * 1000


@pytest.mark.parametrize("impl", ["reference", "portable", "triton"])
@pytest.mark.parametrize("bad", [0.0, -1.0, INF, NAN])
def test_unusable_temperature_gives_nan_for_its_token_alone(bad, impl):
    hidden, weight, target = inputs(3, 40)
    out = linear_logprob(hidden, weight, target, temperature=torch.tensor([1.0, bad, 0.5]), impl=impl)
    assert out.logprob.isnan().tolist() == out.entropy.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("impl", ["reference", "portable", "triton"])
def test_main_grad_without_memory_of_its_own_is_refused(impl):
    hidden, weight, target = inputs(3, 40)
    for main_grad, what in (
        (torch.zeros(1, weight.shape[1]).expand_as(weight), "expanded"),
        (weight, "memory of weight"),
    ):
        with pytest.raises(ValueError, match=f"linear_logprob: main_grad .*{what}"):
            linear_logprob(hidden, weight, target, main_grad=main_grad, impl=impl)

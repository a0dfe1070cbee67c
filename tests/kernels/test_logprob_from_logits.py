"""logprob_from_logits against its float64 definition: values, gradients, limits, and the buffer it gives back."""

import math
import subprocess
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_rl_kernels.logprob_from_logits import (
    logprob_from_logits,
    logprob_from_logits_,
    logprob_from_logits_reference,
)
from tests.helpers.source import ROOT

IMPLS = ["portable", "triton"]
INF = float("inf")
every_impl = pytest.mark.parametrize("impl", IMPLS)


def _inputs(num_tokens, vocab, *, scale=3.0, dtype=torch.float32, seed=0):
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_tokens, vocab, generator=draw).mul(scale).to(dtype)
    return logits, torch.randint(vocab, (num_tokens,), generator=draw)


def _upstream(num_tokens, *, seed=1):
    """Gradients of both signs for log-prob and entropy; those of the first token are 0, as on a masked one."""
    upstream = torch.randn(2, num_tokens, generator=torch.Generator().manual_seed(seed))
    upstream[:, :1] = 0 if num_tokens > 1 else 0.5
    return upstream


def _run(op, logits, target, upstream, **options):
    leaf = logits.detach().requires_grad_()
    out = op(leaf, target, **options)
    # a foreign or impossible target has no finite log-prob to sum
    total = torch.where(out.logprob.isfinite(), out.logprob, 0.0) * upstream[0]
    if out.entropy is not None:
        total = total + out.entropy * upstream[1]
    (grad,) = torch.autograd.grad(total.sum(), leaf)
    return out, grad


def _reference(logits, target, upstream, **options):
    if isinstance(options.get("temperature"), torch.Tensor):
        options["temperature"] = options["temperature"].double()
    return _run(logprob_from_logits_reference, logits.double(), target, upstream.double(), **options)


def _assert_matches(got, want, *, atol=1e-5, grad_rtol=2e-6):
    for name in ("logprob", "entropy", "lse"):
        actual, expected = getattr(got[0], name), getattr(want[0], name)
        torch.testing.assert_close(
            actual.double(), expected.double(), rtol=1e-6, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
        )
    error = (got[1].double() - want[1]).norm() / want[1].norm().clamp(min=1e-9)
    assert error < grad_rtol, f"gradient: relative error {error:.2e}"


@every_impl
@pytest.mark.parametrize(("num_tokens", "vocab"), [(1, 1), (1, 257), (33, 255), (20, 1000), (3, 20000)])
@pytest.mark.parametrize("per_token", [False, True], ids=["scalar", "per token"])
def test_values_and_gradients_match_the_float64_definition(num_tokens, vocab, per_token, impl):
    logits, target = _inputs(num_tokens, vocab)
    upstream = _upstream(num_tokens)
    temperature = torch.linspace(0.3, 2.0, num_tokens) if per_token else 0.7
    got = _run(logprob_from_logits, logits, target, upstream, temperature=temperature, impl=impl)
    _assert_matches(got, _reference(logits, target, upstream, temperature=temperature))
    assert got[0].logprob.dtype == got[0].entropy.dtype == got[0].lse.dtype == torch.float32


@every_impl
@pytest.mark.parametrize(
    ("dtype", "ulp"), [(torch.bfloat16, 2**-7), (torch.float16, 2**-10)], ids=["bf16", "fp16"]
)
def test_half_precision_is_read_once_and_the_gradient_rounded_once(dtype, ulp, impl):
    logits, target = _inputs(20, 3000, dtype=dtype)
    upstream = _upstream(20)
    got = _run(logprob_from_logits, logits, target, upstream, temperature=0.7, impl=impl)
    want = _reference(logits, target, upstream, temperature=0.7)
    assert got[1].dtype == dtype and got[0].logprob.dtype == torch.float32
    torch.testing.assert_close(got[0].logprob.double(), want[0].logprob, rtol=1e-6, atol=1e-5)
    # one rounding; the interpreter truncates, so a whole unit in the last place. Below: subnormals of fp16
    torch.testing.assert_close(got[1].double(), want[1], rtol=ulp, atol=6e-8)


@every_impl
@pytest.mark.parametrize("part", ["logprob", "entropy"])
def test_gradient_of_each_output_alone_is_right(part, impl):
    logits, target = _inputs(7, 300)
    grads = []
    for op, leaf, options in (
        (logprob_from_logits, logits.clone(), {"impl": impl}),
        (logprob_from_logits_reference, logits.double(), {}),
    ):
        leaf.requires_grad_()
        getattr(op(leaf, target, **options), part).sum().backward()
        grads.append(leaf.grad.double())
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-6)


def test_gradients_pass_gradcheck_in_float64():
    logits, target = _inputs(4, 9, dtype=torch.float64)

    def op(logits):
        out = logprob_from_logits(logits, target, temperature=0.7)
        return out.logprob, out.entropy

    assert torch.autograd.gradcheck(op, (logits.requires_grad_(),))


@every_impl
@pytest.mark.parametrize("rubbish", [1e4, INF, float("nan")], ids=str)
def test_padded_columns_take_no_part_and_get_no_gradient(rubbish, impl):
    logits, target = _inputs(9, 300)
    target = target % 41
    logits[:, 41:] = rubbish
    upstream = _upstream(9)
    got = _run(logprob_from_logits, logits, target, upstream, valid_vocab=41, impl=impl)
    want = _reference(logits[:, :41], target, upstream)
    assert got[1][:, 41:].abs().max() == 0
    _assert_matches((got[0], got[1][:, :41]), want)


@every_impl
def test_shard_of_a_larger_vocabulary_owns_its_columns_alone(impl):
    logits, _ = _inputs(4, 16)
    # last of the shard before, first and last of this one, a padded column of this one
    target = torch.tensor([99, 100, 109, 112])
    upstream = torch.ones(2, 4)
    options = {"vocab_start": 100, "valid_vocab": 110}
    got, grad = _run(logprob_from_logits, logits, target, upstream, impl=impl, **options)
    want, want_grad = _reference(logits, target, upstream, **options)
    assert got.logprob.isnan().tolist() == [True, False, False, True]
    torch.testing.assert_close(got.logprob.double(), want.logprob, rtol=0, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(grad.double(), want_grad, rtol=0, atol=1e-6)


@every_impl
def test_impossible_tokens_give_no_nan(impl):
    logits, target = _inputs(5, 20000)
    # a whole block, then more than one, all but one, the target, and nothing left
    logits[0, :9000] = -INF
    logits[1, 10:] = -INF
    logits[2] = torch.where(torch.arange(20000) == target[2], logits[2], -INF)
    logits[3, target[3]] = -INF
    logits[4] = -INF
    target[0], target[1] = 9500, 3
    upstream = _upstream(5) + 1.0
    got = _run(logprob_from_logits, logits, target, upstream, impl=impl)
    want = _reference(logits, target, upstream)
    _assert_matches(got, want, atol=1e-5)
    assert got[0].logprob[3:].tolist() == [-INF, -INF]
    assert got[0].entropy[4] == 0 and got[0].lse[4] == -INF and got[1][4].abs().max() == 0
    assert got[0].logprob[2] == 0 and got[0].entropy[2] == 0


@every_impl
def test_gradient_at_an_impossible_target_is_finite(impl):
    logits, target = _inputs(2, 50)
    logits[0, target[0]] = -INF
    logits[1] = -INF
    leaf = logits.requires_grad_()
    logprob_from_logits(leaf, target, impl=impl).logprob.backward(torch.ones(2))
    want = -torch.softmax(logits[0].detach(), 0)
    want[target[0]] = 1.0
    torch.testing.assert_close(leaf.grad[0], want, rtol=1e-5, atol=1e-7)
    assert leaf.grad[1].abs().max() == 0


@every_impl
@pytest.mark.parametrize("offset", [-1e4, -300.0, 300.0, 1e4], ids="offset{:g}".format)
def test_offset_shared_by_all_logits_changes_nothing(offset, impl):
    # multiples of 1/64 below 16: exact in float32 under every offset
    logits = torch.randint(-1024, 1024, (6, 700), generator=torch.Generator().manual_seed(3)) / 64
    target = torch.arange(6) * 100
    upstream = _upstream(6)
    here, there = (
        _run(logprob_from_logits, moved, target, upstream, temperature=0.7, impl=impl)
        for moved in (logits, logits + offset)
    )
    torch.testing.assert_close(there[0].logprob, here[0].logprob, rtol=0, atol=2e-6)
    torch.testing.assert_close(there[0].entropy, here[0].entropy, rtol=0, atol=2e-6)
    torch.testing.assert_close(there[1], here[1], rtol=0, atol=2e-6)


@every_impl
def test_extreme_logits_stay_finite_and_right(impl):
    logits = torch.tensor([[-1e4, 0.0, 1e4]] * 3 + [[3e38, -3e38, 0.0]])
    target = torch.tensor([0, 1, 2, 0])
    got, grad = _run(logprob_from_logits, logits, target, torch.ones(2, 4), impl=impl)
    torch.testing.assert_close(got.logprob, torch.tensor([-2e4, -1e4, 0.0, 0.0]), rtol=1e-6, atol=0)
    assert got.entropy.tolist() == [0.0] * 4
    assert grad.isfinite().all()


@every_impl
def test_row_without_upstream_gradient_has_none_whatever_it_holds(impl):
    logits, target = _inputs(4, 300)
    logits[1], logits[2, 5] = INF, float("nan")
    upstream = _upstream(4)
    upstream[:, 1:3] = 0
    leaf = logits.requires_grad_()
    out = logprob_from_logits(leaf, target, impl=impl)
    torch.autograd.backward((out.logprob, out.entropy), tuple(upstream))
    assert leaf.grad[:3].abs().max() == 0
    assert leaf.grad[3].abs().max() > 0


@every_impl
def test_rows_of_the_gradient_sum_to_zero_and_probabilities_to_one(impl):
    logits, _ = _inputs(1, 37)
    out, grad = _run(
        logprob_from_logits, logits.expand(37, 37), torch.arange(37), torch.ones(2, 37), impl=impl
    )
    assert abs(out.logprob.exp().sum() - 1) < 1e-5
    assert grad.sum(1).abs().max() < 1e-5
    assert (out.logprob <= 0).all() and (out.entropy >= 0).all() and (out.entropy <= math.log(37)).all()


@every_impl
def test_strided_rows_inside_nan_and_expanded_gradients_are_read_correctly(impl):
    wide, labels = _inputs(9, 257)
    guarded = torch.full((9, 700), float("nan"))
    guarded[:, 100:357] = wide
    # every second of some numbers, as in a slice of a table
    logits, target = guarded[1:, 100:357], torch.stack((labels, -labels), dim=1)[1:, 0]
    got = _run(logprob_from_logits, logits, target, torch.ones(2, 1).expand(2, 8), impl=impl)
    _assert_matches(got, _reference(wide[1:], target, torch.ones(2, 8)))
    assert torch.equal(logits, wide[1:]) and guarded[:, :100].isnan().all() and guarded[:, 357:].isnan().all()


@every_impl
def test_runs_agree_in_every_bit_whatever_memory_held_before(impl):
    logits, target = _inputs(20, 1000)
    leaf = logits.clone().requires_grad_()
    grads = []
    torch.use_deterministic_algorithms(True)  # new tensors are then filled with NaN
    try:
        for _ in range(2):
            out = logprob_from_logits(leaf, target, impl=impl)
            total = (out.logprob * 0.3 + out.entropy).sum()
            grads.append(torch.autograd.grad(total, leaf, retain_graph=True)[0])
            grads.append(torch.autograd.grad(total, leaf)[0])
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(grads[0], grad) for grad in grads[1:])
    assert grads[0].isfinite().all() and torch.equal(leaf, logits)


@every_impl
def test_entropy_that_was_not_asked_for_leaves_logprobs_and_gradients_as_they_are(impl):
    logits, target = _inputs(5, 300)
    results = []
    for with_entropy in (True, False):
        leaf = logits.clone().requires_grad_()
        out = logprob_from_logits(leaf, target, with_entropy=with_entropy, impl=impl)
        out.logprob.sum().backward()
        results.append((out.logprob, leaf.grad))
        assert (out.entropy is not None) == with_entropy and not out.lse.requires_grad
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@every_impl
def test_no_tokens_give_no_values_and_no_gradient(impl):
    logits, target = _inputs(0, 7)
    out, grad = _run(logprob_from_logits, logits, target, torch.ones(2, 0), impl=impl)
    assert out.logprob.shape == out.entropy.shape == out.lse.shape == (0,) and grad.shape == (0, 7)


@every_impl
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_in_place_form_puts_the_same_gradient_into_the_memory_of_the_logits(dtype, impl):
    logits, target = _inputs(9, 300, dtype=dtype)
    upstream = _upstream(9)
    want, want_grad = _run(logprob_from_logits, logits, target, upstream, valid_vocab=290, impl=impl)
    leaf = logits.clone().requires_grad_()
    buffer = leaf * 1.0
    out = logprob_from_logits_(buffer, target, valid_vocab=290, impl=impl)
    assert torch.equal(out.logprob.isnan(), target >= 290) and torch.equal(buffer, leaf)
    total = torch.where(out.logprob.isfinite(), out.logprob, 0.0) * upstream[0] + out.entropy * upstream[1]
    total.sum().backward()
    assert torch.equal(buffer.detach(), want_grad) and torch.equal(leaf.grad, want_grad)
    assert torch.equal(out.entropy, want.entropy)


@every_impl
def test_in_place_form_refuses_a_second_backward_and_tells_others_that_logits_changed(impl):
    logits, target = _inputs(3, 40)
    buffer = logits.requires_grad_() * 1.0
    other = buffer.square().sum()
    out = logprob_from_logits_(buffer, target, impl=impl)
    out.logprob.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="overwrote the logits"):
        out.logprob.sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()


class _LargestNewTensor(TorchDispatchMode):
    """Remembers the largest storage that any operator returned while active and did not get, in bytes."""

    def __init__(self, known):
        super().__init__()
        self.known, self.num_bytes = known.untyped_storage().data_ptr(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage().data_ptr() != self.known:
                self.num_bytes = max(self.num_bytes, leaf.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("op", [logprob_from_logits_, logprob_from_logits], ids=["in place", "control"])
def test_in_place_form_takes_no_second_buffer_of_the_size_of_the_logits(op):
    logits, target = _inputs(512, 4096)
    buffer = logits.requires_grad_() * 1.0
    with _LargestNewTensor(buffer) as largest:
        out = op(buffer, target)
        torch.autograd.grad((out.logprob + out.entropy).sum(), buffer)
    took_a_buffer = largest.num_bytes >= buffer.numel() * 4
    assert took_a_buffer == (op is logprob_from_logits)
    assert took_a_buffer or largest.num_bytes <= buffer.numel() * 4 // 8


_FAR_ROWS = """
import torch
from megatron_rl_kernels.logprob_from_logits import logprob_from_logits, logprob_from_logits_
# row 2 starts at element 2^31; only the pages in use become resident
stride, width = 2**30, 1000
logits = torch.empty(2 * stride + width, dtype=torch.bfloat16).as_strided((3, width), (stride, 1))
for row in logits:
    row.copy_(torch.randn(width))
near, target = logits.clone(), torch.tensor([3, 0, 999])
for impl in ("triton", "portable"):
    leaf = near.clone().requires_grad_()
    want = logprob_from_logits(leaf, target, impl=impl)
    (want.logprob + want.entropy).sum().backward()
    far = logits.copy_(near).detach().requires_grad_()
    buffer = torch.ops.aten.alias(far)
    got = logprob_from_logits_(buffer, target, impl=impl)
    assert torch.equal(got.logprob, want.logprob) and torch.equal(got.entropy, want.entropy)
    (got.logprob + got.entropy).sum().backward()
    assert torch.equal(logits, leaf.grad)
"""


def test_rows_beyond_two_to_the_31_elements_are_addressed_in_64_bits():
    environment = {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT / "kernels"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", _FAR_ROWS], env=environment, capture_output=True, timeout=120
    )
    assert done.returncode == 0, done.stderr.decode()[-2000:]


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"logits": torch.zeros(3, 1, 7)}, ValueError, r"expected logits \[N, V_local\]"),
        ({"target": torch.zeros(4, dtype=torch.int64)}, ValueError, "expected logits"),
        ({"target": torch.zeros(3)}, TypeError, "must be torch.int64"),
        ({"logits": torch.zeros(3, 7, dtype=torch.int32)}, TypeError, "must be one of"),
        ({"temperature": 0.0}, ValueError, "temperature = 0.0"),
        ({"temperature": INF}, ValueError, "temperature = inf"),
        ({"temperature": torch.ones(2)}, ValueError, r"got temperature \(2,\)"),
        ({"temperature": torch.ones(3, requires_grad=True)}, TypeError, "has no gradient"),
        ({"vocab_start": -1}, ValueError, "vocab_start = -1"),
        ({"valid_vocab": 5, "vocab_start": 5}, ValueError, "no real column"),
        ({"impl": "cuda"}, ValueError, "needs CUDA tensors, got cpu; here it can be reference, portable, "),
        ({"logits": torch.zeros(3, 7, dtype=torch.float64), "impl": "triton"}, ValueError, "this op has"),
        ({"logits": torch.zeros(7, 3).T, "impl": "triton"}, ValueError, "must be contiguous"),
    ],
)
def test_arguments_that_do_not_fit_are_named(change, error, words):
    logits, target = _inputs(3, 7)
    with pytest.raises(error, match=words):
        logprob_from_logits(**({"logits": logits, "target": target} | change))


def test_in_place_form_refuses_logits_that_it_must_not_overwrite():
    logits, target = _inputs(3, 7)
    with pytest.raises(ValueError, match="leaf of the graph"):
        logprob_from_logits_(logits.clone().requires_grad_(), target)
    with pytest.raises(ValueError, match="rows that share memory"):
        logprob_from_logits_(logits[:1].expand(3, 7), target)
    with pytest.raises(ValueError, match="this op has portable, triton"):
        logprob_from_logits_(logits, target, impl="reference")


@pytest.mark.parametrize("impl", ["reference", *IMPLS, "host"])
def test_foreign_target_gets_no_gradient_whatever_the_upstream_one_is(impl):
    logits, _ = _inputs(3, 7)
    leaf = logits.requires_grad_()
    out = logprob_from_logits(leaf, torch.tensor([2, -100, 7]), impl=impl)
    assert out.logprob.isnan().tolist() == [False, True, True]
    out.logprob.sum().backward()
    assert leaf.grad[0].abs().sum() > 0
    assert torch.equal(leaf.grad[1:], torch.zeros(2, 7))


@pytest.mark.parametrize("impl", ["reference", *IMPLS, "host"])
@pytest.mark.parametrize("bad", [0.0, -1.0, INF, float("nan")])
def test_token_with_an_unusable_temperature_gives_nan_and_no_other_does(bad, impl):
    logits, target = _inputs(3, 7)
    out = logprob_from_logits(logits, target, temperature=torch.tensor([1.0, bad, 0.5]), impl=impl)
    for values in (out.logprob, out.entropy):
        assert values.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("impl", ["reference", *IMPLS, "host"])
def test_logits_or_temperatures_at_the_ends_of_float32_give_finite_gradients(impl):
    logits, target = _inputs(2, 7)
    huge = logits.clone()
    huge[0, :2] = torch.tensor([3e38, -3e38])
    for values, temperature in ((huge, 1.0), (logits, 1e-30)):
        leaf = values.clone().requires_grad_()
        out = logprob_from_logits(leaf, target, temperature=temperature, impl=impl)
        (out.logprob[1] + out.entropy.sum()).backward()
        assert bool(out.entropy.isfinite().all()) and bool(leaf.grad.isfinite().all())

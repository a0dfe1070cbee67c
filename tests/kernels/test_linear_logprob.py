"""linear_logprob against plain float64 torch: values, gradients, identities of softmax, and what it refuses."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl_kernels.linear_logprob import linear_logprob
from tests.helpers.linear_logprob import assert_matches, exact, inputs, run, upstream_of

IMPLS = pytest.mark.parametrize("impl", ["portable", "triton"])
ALL_IMPLS = pytest.mark.parametrize("impl", ["reference", "portable", "triton"])


def _cases(vocabularies):
    return given(
        num_tokens=st.integers(1, 130),
        hidden_size=st.sampled_from([8, 24, 64, 104]),
        vocab=st.sampled_from(vocabularies),
        temperature=st.sampled_from([0.3, 1.0, 2.0, None]),
        dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
        chunks=st.sampled_from([(None, None), (17, 100), (64, 256)]),
        seed=st.integers(0, 9),
    )


@_cases([2, 255, 256, 257, 1000, 4099])
@settings(max_examples=20, deadline=None, derandomize=True)
def test_portable_values_and_gradients_match_float64(**case):
    # gradients are rounded to the inputs' 8 or 11 bits once
    _check_case("portable", {torch.bfloat16: 2e-3, torch.float16: 3e-4}, **case)


@_cases([2, 256, 257, 600])
@settings(max_examples=6, deadline=None, derandomize=True)
def test_triton_values_and_gradients_match_float64(**case):
    # so are the gradients of logits, and the interpreter cuts off instead of rounding
    _check_case("triton", {torch.bfloat16: 6e-3, torch.float16: 8e-4}, **case)


def _check_case(impl, bounds, *, num_tokens, hidden_size, vocab, temperature, dtype, chunks, seed):
    scale = 2.0 / hidden_size**0.5
    hidden, weight, target = inputs(
        num_tokens, vocab, hidden_size=hidden_size, scale=scale, dtype=dtype, seed=seed
    )
    upstream = upstream_of(num_tokens, seed=seed + 1)
    if temperature is None:
        temperature = torch.rand(num_tokens, generator=torch.Generator().manual_seed(seed)) + 0.3
    options = {"temperature": temperature, "chunk_tokens": chunks[0], "chunk_vocab": chunks[1]}
    got = run(hidden, weight, target, upstream, impl=impl, **options)
    want = exact(hidden, weight, target, upstream, temperature=temperature)
    assert got[0].dtype == got[1].dtype == torch.float32
    assert got[2].dtype == got[3].dtype == dtype
    # float32 sums of products; logits reach +-30
    assert_matches(got, want, value_atol=2e-5, grad_rtol=bounds.get(dtype, 3e-6))


@ALL_IMPLS
def test_vocabulary_of_one_token_leaves_nothing_open(impl):
    hidden, weight, _ = inputs(5, 1)
    target = torch.zeros(5, dtype=torch.int64)
    logprob, entropy, *grads = run(hidden, weight, target, upstream_of(5), temperature=0.3, impl=impl)
    assert logprob.abs().max() == 0 and entropy.abs().max() == 0
    assert all(grad.abs().max() < 1e-5 for grad in grads)


@pytest.mark.parametrize("temperature", [0.7, "per token"])
def test_reference_is_the_definition_in_float64(temperature):
    hidden, weight, target = inputs(40, 63, dtype=torch.float64)
    upstream = upstream_of(40).double()
    if temperature == "per token":
        temperature = torch.rand(40, generator=torch.Generator().manual_seed(0)) + 0.3
    got = run(hidden, weight, target, upstream, temperature=temperature, impl="reference", valid_vocab=63)
    want = exact(hidden, weight, target, upstream, temperature=temperature)
    assert_matches(got, want, value_atol=1e-12, grad_rtol=1e-12)


def test_gradients_pass_gradcheck_in_float64():
    hidden, weight, target = inputs(6, 11, hidden_size=3, dtype=torch.float64)

    def op(hidden, weight):
        out = linear_logprob(
            hidden, weight, target, temperature=0.7, impl="portable", chunk_tokens=4, chunk_vocab=3
        )
        return out.logprob, out.entropy

    assert torch.autograd.gradcheck(op, (hidden.requires_grad_(), weight.requires_grad_()))


@IMPLS
def test_temperature_is_hidden_states_divided_by_it(impl):
    hidden, weight, target = inputs(63, 40)
    upstream = upstream_of(63)
    temperature = torch.rand(63, generator=torch.Generator().manual_seed(3)) + 0.3
    warm = run(hidden, weight, target, upstream, temperature=temperature, impl=impl)
    divided = run(hidden / temperature[:, None], weight, target, upstream, impl=impl)
    torch.testing.assert_close(warm[0], divided[0], rtol=0, atol=3e-5)
    torch.testing.assert_close(warm[1], divided[1], rtol=0, atol=3e-5)
    torch.testing.assert_close(warm[2], divided[2] / temperature[:, None], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(warm[3], divided[3], rtol=1e-4, atol=1e-5)


@ALL_IMPLS
def test_token_without_a_usable_temperature_is_nan_and_alone(impl):
    hidden, weight, target = inputs(4, 40)
    temperature = torch.tensor([1.0, 0.0, -1.0, 1.0])
    got = linear_logprob(hidden, weight, target, temperature=temperature, impl=impl)
    assert torch.isnan(got.logprob).tolist() == [False, True, True, False]
    assert torch.isnan(got.entropy).tolist() == [False, True, True, False]


@ALL_IMPLS
def test_padded_rows_take_no_part_and_get_no_gradient(impl):
    hidden, weight, target = inputs(63, 48)
    target = target % 41
    weight[41:] = 1e4  # would win every softmax
    upstream = upstream_of(63)
    got = run(hidden, weight, target, upstream, valid_vocab=41, impl=impl, chunk_vocab=16)
    want = exact(hidden, weight[:41], target, upstream)
    assert got[3][41:].abs().max() == 0
    assert_matches((*got[:3], got[3][:41]), want, value_atol=2e-5, grad_rtol=3e-6)


@IMPLS
@pytest.mark.parametrize("part", [0, 1], ids=["logprob", "entropy"])
def test_gradient_of_each_output_alone_is_right(part, impl):
    hidden, weight, target = inputs(20, 63)
    leaves = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]
    out = linear_logprob(*leaves, target, impl=impl, chunk_tokens=7, chunk_vocab=16)
    (out.logprob, out.entropy)[part].sum().backward()
    upstream = torch.zeros(2, 20)
    upstream[part] = 1
    want = exact(hidden, weight, target, upstream)
    for got, expected in zip(leaves, want[2:], strict=True):
        torch.testing.assert_close(got.grad.double(), expected, rtol=1e-5, atol=1e-5)


@IMPLS
def test_only_what_requires_a_gradient_gets_one(impl):
    hidden, weight, target = inputs(20, 63)
    want = run(hidden, weight, target, upstream_of(20), impl=impl)
    for chosen in (0, 1):
        leaves = [hidden.clone(), weight.clone()]
        leaves[chosen].requires_grad_()
        out = linear_logprob(*leaves, target, impl=impl)
        torch.autograd.backward((out.logprob, out.entropy), tuple(upstream_of(20)))
        assert torch.equal(leaves[chosen].grad, want[2 + chosen])
        assert leaves[1 - chosen].grad is None


@ALL_IMPLS
def test_lse_is_the_log_sum_of_exponentials_and_has_no_gradient(impl):
    hidden, weight, target = inputs(20, 63)
    out = linear_logprob(hidden.requires_grad_(), weight, target, temperature=0.5, impl=impl)
    want = torch.logsumexp(hidden.detach().double() @ weight.double().T / 0.5, 1)
    torch.testing.assert_close(out.lse.double(), want, rtol=0, atol=2e-5)
    assert not out.lse.requires_grad and out.logprob.requires_grad and out.entropy.requires_grad


@IMPLS
def test_entropy_that_was_not_asked_for_leaves_logprobs_and_gradients_as_they_are(impl):
    hidden, weight, target = inputs(63, 40)
    hidden.requires_grad_()
    with_it = linear_logprob(hidden, weight, target, impl=impl)
    without = linear_logprob(hidden, weight, target, with_entropy=False, impl=impl)
    assert without.entropy is None
    assert torch.equal(with_it.logprob, without.logprob)
    grads = [torch.autograd.grad(out.logprob.sum(), hidden)[0] for out in (with_it, without)]
    assert torch.equal(*grads)


@IMPLS
def test_probabilities_add_up_to_one_without_gradient_and_entropy_has_its_bounds(impl):
    states, weight, _ = inputs(4, 63)
    every = torch.arange(63).repeat(4)
    hidden = states.repeat_interleave(63, 0).requires_grad_()
    out = linear_logprob(hidden, weight, every, impl=impl, chunk_vocab=16)
    total = out.logprob.exp().view(4, 63).sum(1)
    torch.testing.assert_close(total, torch.ones(4), rtol=0, atol=1e-5)
    assert (out.logprob <= 0).all() and (out.entropy >= 0).all() and (out.entropy <= math.log(63)).all()
    total.sum().backward()
    assert hidden.grad.view(4, 63, -1).sum(1).abs().max() < 1e-5


@IMPLS
def test_gradients_of_all_logits_of_a_token_add_up_to_nothing(impl):
    hidden, weight, target = inputs(63, 300)
    # the gradient of a state that all rows weigh with 1 is that sum
    hidden[:, 0], weight[:, 0] = 0.0, 1.0
    got = run(hidden, weight, target, upstream_of(63), impl=impl, chunk_vocab=100)
    assert got[2].abs().max() > 0.1 and got[2][:, 0].abs().max() < 2e-6


@IMPLS
def test_permuted_vocabulary_permutes_the_gradient_of_the_head(impl):
    hidden, weight, target = inputs(63, 300)
    order = torch.randperm(300, generator=torch.Generator().manual_seed(2))
    place = torch.empty_like(order)
    place[order] = torch.arange(300)
    got = run(hidden, weight[order], place[target], upstream_of(63), impl=impl)
    want = run(hidden, weight, target, upstream_of(63), impl=impl)
    torch.testing.assert_close(got[0], want[0], rtol=0, atol=4e-6)
    torch.testing.assert_close(got[3], want[3][order], rtol=1e-5, atol=1e-5)


@ALL_IMPLS
@pytest.mark.parametrize("chunk_tokens", [None, 20], ids=["one chunk", "chunks"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_main_grad_takes_the_unrounded_weight_gradient_of_every_backward(impl, dtype, chunk_tokens):
    hidden, weight, target = inputs(63, 48, dtype=dtype)
    weight[41:] = 100.0
    target, upstream = target % 41, upstream_of(63)
    main_grad = torch.full(weight.shape, 3.0)
    leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    options = {"valid_vocab": 41, "impl": impl, "chunk_tokens": chunk_tokens, "chunk_vocab": 16}
    out = linear_logprob(*leaves, target, main_grad=main_grad, **options)
    assert (main_grad == 3.0).all()
    for _ in range(2):
        torch.autograd.backward((out.logprob, out.entropy), tuple(upstream), retain_graph=True)
    want = exact(hidden, weight[:41], target, upstream)[3]
    assert leaves[1].grad is None and leaves[0].grad is not None
    assert (main_grad[41:] == 3.0).all()
    error = (main_grad[:41].double() - 3.0 - 2 * want).norm() / (2 * want).norm()
    # the reference rounds to the weight's dtype, Triton the gradients of bfloat16 logits
    bounds = {"reference": 3e-3, "portable": 1e-6, "triton": 6e-3}
    assert error < (2e-6 if dtype == torch.float32 else bounds[impl])


@IMPLS
def test_main_grad_is_left_alone_where_the_weight_is_frozen(impl):
    hidden, weight, target = inputs(5, 7)
    main_grad = torch.zeros_like(weight)
    linear_logprob(
        hidden.requires_grad_(), weight, target, main_grad=main_grad, impl=impl
    ).logprob.sum().backward()
    assert main_grad.abs().max() == 0
    with torch.no_grad():
        linear_logprob(hidden, weight.requires_grad_(), target, main_grad=main_grad, impl=impl)
    assert main_grad.abs().max() == 0


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"hidden": torch.zeros(3, 5)}, ValueError, "H of hidden and weight"),
        ({"target": torch.zeros(4, dtype=torch.int64)}, ValueError, "N of hidden and target"),
        ({"target": torch.zeros(3)}, TypeError, "must be torch.int64"),
        ({"weight": torch.zeros(7, 16, dtype=torch.bfloat16)}, TypeError, "same one of"),
        ({"hidden": torch.zeros(3, 1, 16)}, ValueError, "expected hidden"),
        ({"temperature": 0.0}, ValueError, "temperature = 0.0"),
        ({"temperature": torch.ones(4)}, ValueError, "one per token"),
        ({"temperature": torch.ones(3).double()}, TypeError, "temperature of torch.float64"),
        ({"chunk_tokens": 0}, ValueError, "chunk_tokens = 0"),
        ({"chunk_vocab": -1}, ValueError, "chunk_vocab = -1"),
        ({"valid_vocab": 5, "vocab_start": 5}, ValueError, "no real row"),
        ({"main_grad": torch.zeros(7, 15)}, ValueError, "must be like weight"),
        ({"main_grad": torch.zeros(7, 16).bfloat16()}, TypeError, "main_grad of torch.bfloat16"),
        ({"impl": "cuda"}, ValueError, "reference, portable, triton"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_arguments_that_do_not_fit_are_named(change, error, words):
    hidden, weight, target = inputs(3, 7)
    arguments = {"hidden": hidden, "weight": weight, "target": target} | change
    with pytest.raises(error, match=words):
        linear_logprob(**arguments)

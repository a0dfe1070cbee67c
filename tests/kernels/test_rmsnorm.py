"""rmsnorm against its float64 definition and against what the model computed before: values, gradients, limits."""

import pytest
import torch
import torch.nn.functional as F

from megatron_rl_kernels.rmsnorm import (
    rmsnorm,
    rmsnorm_reference,
    rmsnorm_residual,
    rmsnorm_residual_reference,
    triton_op,
)
from megatron_rl_kernels.triton_tools import INTERPRETED

every_impl = pytest.mark.parametrize("impl", ["portable", "triton"])
EPS = 1e-6


def _inputs(*shape, dtype=torch.float32, seed=0):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=draw).mul(3).to(dtype)
    weight = (torch.rand(shape[-1], generator=draw) + 0.5).to(dtype)
    return x, weight, torch.randn(*shape, generator=draw).to(dtype)


def _run(op, x, weight, upstream, **options):
    x, weight = x.detach().requires_grad_(), weight.detach().clone().requires_grad_()
    out = op(x, weight, eps=EPS, **options)
    return out.detach(), *torch.autograd.grad(out, (x, weight), upstream)


def _assert_matches(got, want, *, rtol, grad_rtol):
    torch.testing.assert_close(got[0].double(), want[0].double(), rtol=rtol, atol=1e-6)
    for name, actual, expected in zip(("x", "weight"), got[1:], want[1:], strict=True):
        error = (actual.double() - expected).norm() / expected.norm().clamp(min=1e-9)
        assert error < grad_rtol, f"gradient of {name}: relative error {error:.2e}"


# short rows share a tile, 257 does not fill one, 5000 has one to itself
@every_impl
@pytest.mark.parametrize("shape", [(1, 3), (130, 16), (3, 7, 64), (20, 257), (5, 5000)], ids=str)
def test_values_and_gradients_match_the_float64_definition(shape, impl):
    x, weight, upstream = _inputs(*shape)
    got = _run(rmsnorm, x, weight, upstream, impl=impl)
    want = _run(rmsnorm_reference, x.double(), weight.double(), upstream.double())
    _assert_matches(got, want, rtol=2e-6, grad_rtol=1e-6)


@pytest.mark.parametrize("num_programs", [1, 3, 40], ids="p{}".format)
def test_weight_gradient_is_whole_however_many_programs_sum_it(num_programs, monkeypatch):
    # 12 tiles of 4 rows, the last one with 1: all for one program, 4 for each of 3, one for each of 12
    monkeypatch.setattr(triton_op, "_PROGRAMS", num_programs)
    monkeypatch.setattr(triton_op, "_TILE", 64)
    x, weight, upstream = _inputs(45, 16)
    got = _run(rmsnorm, x, weight, upstream, impl="triton")
    want = _run(rmsnorm_reference, x.double(), weight.double(), upstream.double())
    _assert_matches(got, want, rtol=2e-6, grad_rtol=1e-6)


def test_gradients_pass_gradcheck_in_float64():
    x, weight, _ = _inputs(3, 5, dtype=torch.float64)
    leaves = x.requires_grad_(), weight.requires_grad_()
    assert torch.autograd.gradcheck(lambda x, weight: rmsnorm(x, weight, eps=EPS), leaves)


@every_impl
@pytest.mark.parametrize(
    ("dtype", "ulp"), [(torch.bfloat16, 2**-7), (torch.float16, 2**-10)], ids=["bf16", "fp16"]
)
def test_half_precision_is_rounded_before_the_weight_as_in_hugging_face(dtype, ulp, impl):
    x, weight, upstream = _inputs(40, 200, dtype=dtype)
    got = _run(rmsnorm, x, weight, upstream, impl=impl)
    wide = x.float()
    hugging_face = weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(dtype)
    if impl == "portable":
        assert torch.equal(got[0], hugging_face)
    # the interpreter truncates, twice here
    torch.testing.assert_close(got[0], hugging_face, rtol=2.1 * ulp, atol=1e-6)
    assert [tensor.dtype for tensor in got] == [dtype] * 3
    want = _run(rmsnorm_reference, x.double(), weight.double(), upstream.double())
    # a rounding each of the result (truncated), and of the normalised value in the weight's
    _assert_matches(got, want, rtol=2.1 * ulp, grad_rtol=ulp)


def _bf16(wide, impl):
    """float32 numbers as `impl` rounds them to bfloat16, in float32: Triton's interpreter truncates."""
    if impl == "triton" and INTERPRETED:
        return (wide.view(torch.int32) & -65536).view(torch.float32)
    return wide.bfloat16().float()


@every_impl
def test_values_and_weight_gradient_have_both_roundings(impl):
    x, _, upstream = _inputs(1, 4000, dtype=torch.bfloat16)
    weight = torch.full((4000,), 3.0, dtype=torch.bfloat16)
    out, _, grad_weight = _run(rmsnorm, x, weight, upstream, impl=impl)
    wide = x.float()
    unit = _bf16(wide * torch.rsqrt(wide.square().mean() + EPS), impl)
    # the last bit of the float32 factor may differ, which moves a few across a boundary; one rounding left out moves
    # every fifth
    for got, want in ((out, unit * 3), (grad_weight, (unit * upstream.float())[0])):
        assert (got.float() != _bf16(want, impl)).float().mean() < 0.01


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64], ids=["fp32", "bf16", "fp64"]
)
def test_portable_has_the_bits_of_torch_with_and_without_a_gradient_to_prepare(dtype):
    x, weight, _ = _inputs(50, 96, dtype=dtype)
    wide = x if dtype is torch.float64 else x.float()
    want = F.rms_norm(wide, (96,), eps=EPS).to(dtype) * weight
    assert torch.equal(rmsnorm(x, weight, eps=EPS), want)
    assert torch.equal(rmsnorm(x, weight.requires_grad_(), eps=EPS), want)


@every_impl
@pytest.mark.parametrize("uses", [(1, 1), (1, 0), (0, 1)], ids=["both", "normed", "summed"])
def test_residual_sum_and_its_norm_share_one_gradient(uses, impl):
    x, weight, upstream = _inputs(9, 200)
    residual = _inputs(9, 200, seed=5)[0]
    grads = []
    for op, dtype, options in (
        (rmsnorm_residual, torch.float32, {"impl": impl}),
        (rmsnorm_residual_reference, torch.float64, {}),
    ):
        leaves = [tensor.to(dtype).clone().requires_grad_() for tensor in (x, residual, weight)]
        normed, summed = op(*leaves, eps=EPS, **options)
        total = uses[0] * (normed * upstream).sum() if uses[0] else 0.0
        total = total + ((summed * upstream.flip(0)).sum() if uses[1] else 0.0)
        grads.append((normed, summed, *torch.autograd.grad(total, leaves, allow_unused=True)))
    got, want = grads
    assert torch.equal(got[1], x + residual)
    for actual, expected in zip(got, want, strict=True):
        if expected is None:
            assert actual is None
        else:
            torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


@every_impl
def test_residual_sum_is_rounded_before_it_is_normalised(impl):
    # 256 + 1 is 256 in bfloat16 (even, and truncated): the norm must not see the 1
    x = torch.full((1, 2), 256.0, dtype=torch.bfloat16)
    residual = torch.tensor([[1.0, 0.0]], dtype=torch.bfloat16)
    weight = torch.ones(2, dtype=torch.bfloat16)
    normed, summed = rmsnorm_residual(x, residual, weight, eps=EPS, impl=impl)
    assert torch.equal(summed, x) and torch.equal(normed, rmsnorm(x, weight, eps=EPS, impl=impl))


@every_impl
@pytest.mark.parametrize("scale", [0.0, 1e-20, 1e15], ids=str)
def test_rows_of_zeros_and_of_extreme_values_stay_finite(scale, impl):
    x, weight, upstream = _inputs(3, 64)
    got = _run(rmsnorm, x * scale, weight, upstream, impl=impl)
    want = _run(rmsnorm_reference, (x * scale).double(), weight.double(), upstream.double())
    assert all(tensor.isfinite().all() for tensor in got)
    torch.testing.assert_close(got[0].double(), want[0], rtol=1e-5, atol=1e-30)
    torch.testing.assert_close(got[2].double(), want[2], rtol=1e-4, atol=1e-16)


@every_impl
def test_heads_of_a_projection_are_normalised_where_they_lie(impl):
    projected, weight, _ = _inputs(6, 1, 4 * 32)
    guarded = torch.full((6, 1, 300), float("nan"))
    guarded[..., 50:178] = projected
    heads = guarded[..., 50:178].unflatten(-1, (4, 32))
    upstream = torch.linspace(-1, 1, 32).expand(6, 1, 4, 32)
    got = _run(rmsnorm, heads, weight[:32], upstream, impl=impl)
    dense = projected.unflatten(-1, (4, 32)).double()
    want = _run(rmsnorm_reference, dense, weight[:32].double(), upstream.double())
    _assert_matches(got, want, rtol=2e-6, grad_rtol=1e-6)


@every_impl
def test_runs_agree_in_every_bit_whatever_memory_held_before(impl):
    x, weight, upstream = _inputs(70, 100)
    before = x.clone()
    torch.use_deterministic_algorithms(True)  # new tensors are then filled with NaN
    try:
        first, second = (_run(rmsnorm, x, weight, upstream, impl=impl) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))
    assert all(tensor.isfinite().all() for tensor in first) and torch.equal(x, before)


@every_impl
def test_no_rows_give_nothing_and_no_gradient(impl):
    x, weight, upstream = _inputs(0, 3, 8)
    out, grad_x, grad_weight = _run(rmsnorm, x, weight, upstream, impl=impl)
    assert out.shape == grad_x.shape == (0, 3, 8) and torch.equal(grad_weight, torch.zeros(8))


@every_impl
def test_backward_keeps_nothing_of_the_size_of_x_but_x(impl):
    x, weight, _ = _inputs(64, 64)
    saved = []
    x.requires_grad_(), weight.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor
    ):
        rmsnorm(x, weight, eps=EPS, impl=impl)
    assert {tensor.data_ptr() for tensor in saved if tensor.numel() >= x.numel()} == {x.data_ptr()}
    assert sum(tensor.numel() for tensor in saved) == 64 * 64 + 64 + 64


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"weight": torch.ones(7)}, ValueError, r"expected x \[..., H\]"),
        ({"weight": torch.ones(8, dtype=torch.bfloat16)}, TypeError, "must be the same one of"),
        ({"weight": torch.ones(16)[::2]}, ValueError, r"weight.contiguous\(\)"),
        ({"eps": 0.0}, ValueError, "eps = 0.0"),
        ({"impl": "cuda"}, ValueError, "this op has reference, portable, triton"),
        (
            {"x": torch.zeros(1, 20000), "weight": torch.ones(20000), "impl": "triton"},
            ValueError,
            "at most 16384",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_named(change, error, words):
    arguments = {"x": torch.zeros(3, 8), "weight": torch.ones(8), "eps": EPS} | change
    with pytest.raises(error, match=words):
        rmsnorm(arguments.pop("x"), arguments.pop("weight"), **arguments)


def test_residual_of_another_shape_is_named():
    with pytest.raises(ValueError, match=r"got residual \(1, 8\)"):
        rmsnorm_residual(torch.zeros(3, 8), torch.zeros(1, 8), torch.ones(8), eps=EPS)


def test_norm_of_the_model_is_this_op():
    # heavy, and only this test needs it
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_rl.model.layers import RMSNorm

    config = TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=4)
    x, weight, upstream = _inputs(9, 64)
    norm = RMSNorm(config, 64, EPS)
    norm.weight.data.copy_(weight)
    leaf = x.clone().requires_grad_()
    out = norm(leaf)
    assert out.grad_fn.name() == "PortableRmsnormBackward"
    out.backward(upstream)
    for got, want in zip((out, leaf.grad, norm.weight.grad), _run(rmsnorm, x, weight, upstream), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("impl", ["reference", "portable", "triton"])
def test_smallest_eps_gives_rows_of_zeros_finite_gradients_and_a_smaller_one_is_refused(impl):
    x, weight = torch.zeros(3, 8, requires_grad=True), torch.ones(8)
    out = rmsnorm(x, weight, eps=1e-24, impl=impl)
    out.sum().backward()
    assert torch.equal(out, torch.zeros(3, 8)) and bool(x.grad.isfinite().all())
    # 0 in float32
    with pytest.raises(ValueError, match="rmsnorm: eps = 1e-50"):
        rmsnorm(x, weight, eps=1e-50, impl=impl)


@every_impl
def test_results_may_be_written_in_place(impl):
    x, weight, upstream = _inputs(3, 8)
    want = _run(rmsnorm, x, weight, 2 * upstream, impl=impl)[1]
    leaf = x.clone().requires_grad_()
    normed, summed = rmsnorm_residual(leaf, torch.zeros_like(x), weight, eps=EPS, impl=impl)
    normed.mul_(2).backward(upstream)
    torch.testing.assert_close(leaf.grad, want)
    summed.detach().add_(1)
    again, summed = rmsnorm_residual(leaf, torch.zeros_like(x), weight, eps=EPS, impl=impl)
    summed.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        again.sum().backward()

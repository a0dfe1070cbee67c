"""swiglu against its float64 definition: values, gradients, limits."""

import pytest
import torch
import torch.nn.functional as F

from megatron_rl_kernels.swiglu import swiglu, swiglu_reference
from megatron_rl_kernels.triton_tools import INTERPRETED

every_impl = pytest.mark.parametrize("impl", ["portable", "triton"])


def _inputs(*shape, dtype=torch.float32):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(*shape, generator=draw).mul(3).to(dtype)
    return x, torch.randn(*shape[:-1], shape[-1] // 2, generator=draw).to(dtype)


def _run(op, x, upstream, **options):
    x = x.detach().requires_grad_()
    out = op(x, **options)
    return out.detach(), torch.autograd.grad(out, x, upstream)[0]


def _assert_close(got, want, *, rtol, atol):
    for actual, expected in zip(got, want, strict=True):
        torch.testing.assert_close(actual.double(), expected.double(), rtol=rtol, atol=atol)


@every_impl
@pytest.mark.parametrize("shape", [(1, 2), (63, 34), (2, 3, 256), (5, 6000)], ids=str)
def test_values_and_gradients_match_the_float64_definition(shape, impl):
    x, upstream = _inputs(*shape)
    want = _run(swiglu_reference, x.double(), upstream.double())
    _assert_close(_run(swiglu, x, upstream, impl=impl), want, rtol=3e-6, atol=3e-6)


def test_gradients_pass_gradcheck_in_float64():
    x, _ = _inputs(3, 8, dtype=torch.float64)
    assert torch.autograd.gradcheck(swiglu, (x.requires_grad_(),))


@every_impl
@pytest.mark.parametrize(
    ("dtype", "ulp"), [(torch.bfloat16, 2**-7), (torch.float16, 2**-10)], ids=["bf16", "fp16"]
)
def test_half_precision_rounds_silu_before_the_product(dtype, ulp, impl):
    x, upstream = _inputs(40, 300, dtype=dtype)
    got = _run(swiglu, x, upstream, impl=impl)
    gate, up = x.chunk(2, dim=-1)
    if impl == "portable":
        assert torch.equal(got[0], F.silu(gate) * up)
    # the interpreter truncates, twice here
    torch.testing.assert_close(got[0], F.silu(gate) * up, rtol=2.1 * ulp, atol=1e-6)
    want = _run(swiglu_reference, x.double(), upstream.double())
    # 1 + gate (1 - sigmoid) crosses 0, where absolute error remains; eager code rounds three products
    _assert_close(got[1:], want[1:], rtol=3 * ulp, atol=3 * ulp)


def _bf16(wide, impl):
    """float32 numbers as `impl` rounds them to bfloat16, in float32: Triton's interpreter truncates."""
    if impl == "triton" and INTERPRETED:
        return (wide.view(torch.int32) & -65536).view(torch.float32)
    return wide.bfloat16().float()


@every_impl
def test_values_and_the_gradient_of_up_have_both_roundings(impl):
    x, upstream = _inputs(1, 8000, dtype=torch.bfloat16)
    out, grad = _run(swiglu, x, upstream, impl=impl)
    gate, up = x.float().chunk(2, dim=-1)
    silu = _bf16(F.silu(gate), impl)
    # the last bit of the exponential may differ, which moves a few across a boundary; one rounding left out moves
    # every fifth
    for got, want in ((out, silu * up), (grad[:, 4000:], silu * upstream.float())):
        assert (got.float() != _bf16(want, impl)).float().mean() < 0.01


@every_impl
def test_extreme_gates_stay_finite_and_right(impl):
    x = torch.tensor([[-1e4, -100.0, 0.0, 100.0, 1e4] + [2.0] * 5])
    out, grad = _run(swiglu, x, torch.ones(1, 5), impl=impl)
    torch.testing.assert_close(out, torch.tensor([[0.0, 0.0, 0.0, 200.0, 2e4]]))
    torch.testing.assert_close(grad[:, :5], torch.tensor([[0.0, 0.0, 1.0, 2.0, 2.0]]))
    torch.testing.assert_close(grad[:, 5:], torch.tensor([[0.0, 0.0, 0.0, 100.0, 1e4]]))


@every_impl
def test_strided_rows_inside_nan_and_expanded_gradients_are_read_correctly(impl):
    dense, _ = _inputs(9, 256)
    guarded = torch.full((9, 700), float("nan"))
    guarded[:, 100:356] = dense
    upstream = torch.linspace(-1, 1, 128).expand(9, 128)
    want = _run(swiglu_reference, dense.double(), upstream.double())
    _assert_close(_run(swiglu, guarded[:, 100:356], upstream, impl=impl), want, rtol=3e-6, atol=3e-6)
    turned = dense.T.contiguous().T
    _assert_close(_run(swiglu, turned, upstream, impl=impl), want, rtol=3e-6, atol=3e-6)


@every_impl
def test_runs_agree_in_every_bit_whatever_memory_held_before(impl):
    x, upstream = _inputs(20, 100)
    before = x.clone()
    torch.use_deterministic_algorithms(True)  # new tensors are then filled with NaN
    try:
        first, second = (_run(swiglu, x, upstream, impl=impl) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))
    assert all(tensor.isfinite().all() for tensor in first) and torch.equal(x, before)


@every_impl
def test_no_rows_give_nothing(impl):
    out, grad = _run(swiglu, torch.zeros(0, 2, 8), torch.zeros(0, 2, 4), impl=impl)
    assert out.shape == (0, 2, 4) and grad.shape == (0, 2, 8)


def test_the_kernel_keeps_x_alone_for_backward():
    x, _ = _inputs(8, 64)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor
    ):
        swiglu(x.requires_grad_(), impl="triton")
    assert [tensor.data_ptr() for tensor in saved] == [x.data_ptr()]


@pytest.mark.parametrize(
    ("x", "options", "error", "words"),
    [
        (torch.zeros(3, 7), {}, ValueError, r"expected \[..., 2F\]"),
        (torch.zeros(3, 8, dtype=torch.int32), {}, TypeError, "must be one of"),
        (torch.zeros(3, 8), {"impl": "cuda"}, ValueError, "this op has reference, portable, triton"),
        (
            torch.zeros(3, 8, dtype=torch.float64),
            {"impl": "triton"},
            ValueError,
            "this op has reference, portable",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_named(x, options, error, words):
    with pytest.raises(error, match=words):
        swiglu(x, **options)


def test_interpreter_takes_tensors_of_the_cpu_alone():
    with pytest.raises(ValueError, match="swiglu: impl = 'triton' needs CUDA tensors"):
        swiglu(torch.ones(2, 4, device="meta"), impl="triton")

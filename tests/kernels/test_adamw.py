"""adamw_ against torch.optim.AdamW in float64, its implementations against each other, and what it refuses."""

import math

import pytest
import torch

from megatron_rl_kernels.adamw import adamw_

OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
IMPLS = ["reference", "portable", "triton", "host"]


def _state(size, *, dtype=torch.float32, grad_dtype=torch.float32, seed=0):
    draw = torch.Generator().manual_seed(seed)
    master = torch.randn(size, generator=draw, dtype=torch.float64)
    exp_avg = torch.randn(size, generator=draw, dtype=torch.float64).mul(0.1)
    exp_avg_sq = torch.rand(size, generator=draw, dtype=torch.float64).mul(0.1)
    grad = torch.randn(size, generator=draw, dtype=torch.float64)
    return [master.to(dtype), exp_avg.to(dtype), exp_avg_sq.to(dtype), grad.to(grad_dtype)]


def _run(tensors, *, impl, **options):
    own = [tensor.clone() for tensor in tensors]
    adamw_(*own, impl=impl, **{**OPTIONS, "step": 3, **options})
    return own


def _assert_close(got, want, *, rtol, atol):
    for name, actual, expected in zip(("master", "exp_avg", "exp_avg_sq"), got[:3], want[:3], strict=True):
        torch.testing.assert_close(
            actual.double(), expected.double(), rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("impl", ["reference", "portable"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_five_steps_in_float64_are_those_of_torch_adamw(impl, weight_decay):
    options = {**OPTIONS, "weight_decay": weight_decay}
    param = torch.nn.Parameter(
        torch.randn(257, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    )
    ours = [param.detach().clone(), *torch.zeros(2, 257, dtype=torch.float64).unbind()]
    theirs = torch.optim.AdamW([param], **options)
    for step in range(1, 6):
        grad = torch.randn(257, dtype=torch.float64, generator=torch.Generator().manual_seed(10 + step))
        param.grad = grad.clone()
        theirs.step()
        adamw_(*ours, grad, step=step, impl=impl, **options)
    state = theirs.state[param]
    _assert_close(ours, [param.detach(), state["exp_avg"], state["exp_avg_sq"]], rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1, 63, 1000, 70000], ids="n{}".format)
def test_float32_matches_the_float64_definition(impl, grad_dtype, size):
    tensors = _state(size, grad_dtype=grad_dtype)
    want = _run(
        [*(tensor.double() for tensor in tensors[:3]), tensors[3].double()], impl="reference", grad_scale=0.3
    )
    got = _run(tensors, impl=impl, grad_scale=0.3)
    # a few float32 roundings of numbers around 1
    _assert_close(got, want, rtol=2e-6, atol=5e-7)


@pytest.mark.parametrize("impl", IMPLS)
def test_scale_on_the_device_is_the_scale_of_the_host(impl):
    tensors = _state(1000, grad_dtype=torch.bfloat16)
    by_tensor = _run(tensors, impl=impl, grad_scale=torch.tensor(0.37))
    by_float = _run(tensors, impl=impl, grad_scale=0.37)
    for one, other in zip(by_tensor, by_float, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
    unscaled = _run(tensors, impl=impl)
    assert not torch.equal(by_tensor[0], unscaled[0])


@pytest.mark.parametrize("impl", IMPLS)
def test_weight_is_the_new_master_rounded_and_the_gradient_is_left_alone(impl):
    tensors = _state(1000)
    grad = tensors[3].clone()
    weight = torch.full((1000,), math.nan, dtype=torch.bfloat16)
    got = [tensor.clone() for tensor in tensors]
    adamw_(*got, step=1, weight=weight, impl=impl, **OPTIONS)
    # the interpreter truncates where the device rounds: one unit of the last of 8 bits
    torch.testing.assert_close(weight.float(), got[0], rtol=2**-7, atol=0)
    if impl != "triton":
        assert torch.equal(weight, got[0].bfloat16())
    assert torch.equal(got[3], grad)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_gradient_that_is_not_finite_stays_where_it_is(impl):
    tensors = _state(1000)
    clean = _run(tensors, impl=impl)
    tensors[3][17] = math.nan
    got = _run(tensors, impl=impl)
    others = torch.arange(1000) != 17
    assert got[0][17].isnan()
    for one, other in zip(got[:3], clean[:3], strict=True):
        assert torch.equal(one[others], other[others])


@pytest.mark.parametrize("impl", IMPLS)
def test_parameters_without_gradients_only_decay(impl):
    master = torch.ones(10)
    adamw_(
        master,
        torch.zeros(10),
        torch.zeros(10),
        torch.zeros(10),
        step=1,
        impl=impl,
        **{**OPTIONS, "eps": 1e-15},
    )
    torch.testing.assert_close(master, torch.full((10,), 1 - 1e-3))


@pytest.mark.parametrize("impl", IMPLS)
def test_views_into_larger_buffers_leave_their_neighbours_alone(impl):
    buffers = [torch.full((1009,), 7.0) for _ in range(4)]
    tensors = _state(1000)
    views = [buffer[5:1005].copy_(tensor) for buffer, tensor in zip(buffers, tensors, strict=True)]
    adamw_(*views, step=3, impl=impl, **OPTIONS)
    assert torch.equal(views[0], _run(tensors, impl=impl)[0])
    for buffer in buffers:
        assert (buffer[:5] == 7).all() and (buffer[1005:] == 7).all()


@pytest.mark.parametrize("impl", IMPLS)
def test_two_runs_give_the_same_bits_and_no_elements_are_allowed(impl):
    tensors = _state(70001)
    for one, other in zip(_run(tensors, impl=impl), _run(tensors, impl=impl), strict=True):
        assert torch.equal(one, other)
    _run(_state(0), impl=impl)


def test_parameters_that_require_grad_are_updated_without_a_graph():
    master = torch.nn.Parameter(torch.ones(3, 4))
    adamw_(master, torch.zeros(3, 4), torch.zeros(3, 4), torch.ones(3, 4), step=1, **OPTIONS)
    assert master.requires_grad and master.grad_fn is None
    assert (master < 1).all()


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"step": 0}, ValueError, "step = 0, must be at least 1"),
        ({"eps": 0.0}, ValueError, "eps = 0.0, must be at least 1e-30"),
        ({"betas": (0.9, 1.0)}, ValueError, r"betas\[1\] = 1.0, must be in \[0, 1\)"),
        ({"lr": math.nan}, ValueError, "lr = nan"),
        ({"grad_scale": math.inf}, ValueError, "grad_scale = inf, must be finite"),
        ({"grad_scale": torch.ones(2)}, ValueError, r"got grad_scale \(2,\)"),
        ({"weight": torch.zeros(10, dtype=torch.int32)}, TypeError, "got weight of torch.int32"),
        ({"weight": torch.zeros(9)}, ValueError, r"got weight \(9,\) on cpu, master \(10,\)"),
    ],
)
def test_numbers_that_do_not_fit_are_refused_by_name(change, error, text):
    with pytest.raises(error, match=text):
        adamw_(*_state(10), **{**OPTIONS, "step": 1, **change})


def test_tensors_that_do_not_fit_are_refused_by_name():
    master, exp_avg, exp_avg_sq, grad = _state(10)
    with pytest.raises(ValueError, match="exp_avg and exp_avg_sq share memory"):
        adamw_(master, exp_avg, exp_avg, grad, step=1, **OPTIONS)
    with pytest.raises(ValueError, match=r"grad .* has stride"):
        adamw_(master, exp_avg, exp_avg_sq, torch.zeros(20)[::2], step=1, **OPTIONS)
    with pytest.raises(TypeError, match=r"got master of torch\.bfloat16"):
        adamw_(master.bfloat16(), exp_avg, exp_avg_sq, grad, step=1, **OPTIONS)
    with pytest.raises(TypeError, match=r"impl = .triton. takes a master of torch\.float32"):
        adamw_(*_state(10, dtype=torch.float64), step=1, impl="triton", **OPTIONS)


@pytest.mark.parametrize("impl", ["reference", "portable", "triton"])
@pytest.mark.parametrize(
    "options", [{"lr": torch.tensor(0.1)}, {"lr": 0.1, "grad_scale": 1e39}], ids=["lr", "scale"]
)
def test_numbers_that_float32_or_a_kernel_cannot_take_are_refused(options, impl):
    state = [torch.ones(3) for _ in range(4)]
    with pytest.raises((TypeError, ValueError), match=r"adamw_: (lr|grad_scale) = "):
        adamw_(*state, step=1, impl=impl, **options)
    assert all(torch.equal(one, torch.ones(3)) for one in state)

"""rope against its float64 definition and megatron-core's own rotation: values, gradients, packed positions."""

import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

from megatron_rl_kernels.rope import RopeAngles, rope, rope_angles, rotate, rotate_reference

every_impl = pytest.mark.parametrize("impl", ["portable", "triton"])
both_pairings = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
# three packed sequences
POSITIONS = torch.cat([torch.arange(length) for length in (9, 1, 13)])


def _inputs(heads, head_dim, num_frequencies=None, *, dtype=torch.float32):
    draw = torch.Generator().manual_seed(0)
    x, upstream = torch.randn(2, len(POSITIONS), heads, head_dim, generator=draw).to(dtype)
    count = num_frequencies or head_dim // 2
    return x, upstream, 10000.0 ** -(torch.arange(count) / count)


def _run(x, upstream, op):
    x = x.detach().requires_grad_()
    out = op(x)
    return out.detach(), torch.autograd.grad(out, x, upstream)[0]


def _assert_close(got, want, **tolerances):
    for actual, expected in zip(got, want, strict=True):
        torch.testing.assert_close(actual.double(), expected.double(), **tolerances)


@every_impl
@both_pairings
@pytest.mark.parametrize(
    ("heads", "head_dim", "num_frequencies"),
    [(1, 2, 1), (40, 128, 64), (3, 16, 5), (2, 7, 2)],
)
def test_values_and_gradients_match_the_float64_definition(
    heads, head_dim, num_frequencies, interleaved, impl
):
    x, upstream, inv_freq = _inputs(heads, head_dim, num_frequencies)
    got = _run(x, upstream, lambda x: rope(x, POSITIONS, inv_freq, interleaved=interleaved, impl=impl))
    angles = rope_angles(POSITIONS, inv_freq.double(), dtype=torch.float64)
    want = _run(
        x.double(), upstream.double(), lambda x: rotate_reference(x, *angles, interleaved=interleaved)
    )
    # angles of up to 12 radians, in float32
    _assert_close(got, want, rtol=1e-5, atol=3e-6)


@every_impl
@both_pairings
@pytest.mark.parametrize(
    ("dtype", "ulp"), [(torch.float32, 2**-22), (torch.bfloat16, 2**-7)], ids=["fp32", "bf16"]
)
def test_rotation_is_that_of_megatron_core(dtype, ulp, interleaved, impl):
    x, upstream, inv_freq = _inputs(5, 32, dtype=dtype)

    def megatron(x):
        angle = POSITIONS[:, None].float() * inv_freq
        angle = angle.repeat_interleave(2, dim=1) if interleaved else torch.cat((angle, angle), dim=1)
        return _apply_rotary_pos_emb_bshd(x[:, None], angle[:, None, None], rotary_interleaved=interleaved)[
            :, 0
        ]

    got = _run(x, upstream, lambda x: rope(x, POSITIONS, inv_freq, interleaved=interleaved, impl=impl))
    # in bf16 it rounds two products before their sum, of which each is below 4
    _assert_close(got, _run(x, upstream, megatron), rtol=2 * ulp, atol=4 * ulp)


def test_gradients_pass_gradcheck_in_float64():
    x, _, inv_freq = _inputs(2, 6, 2, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: rope(x, POSITIONS, inv_freq.double()), (x.requires_grad_(),))


@every_impl
@both_pairings
def test_gradient_is_the_rotation_back(interleaved, impl):
    x, _, inv_freq = _inputs(3, 16)
    out, back = _run(x, x, lambda x: rope(x, POSITIONS, inv_freq, interleaved=interleaved, impl=impl))
    again = rope(back, POSITIONS, inv_freq, interleaved=interleaved, impl=impl)
    torch.testing.assert_close(again, x, rtol=1e-5, atol=1e-6)
    # lengths stay, and scores depend on differences of positions alone
    torch.testing.assert_close(out.norm(dim=-1), x.norm(dim=-1))
    moved = rope(x, POSITIONS + 100, inv_freq, interleaved=interleaved, impl=impl)
    scores = [torch.einsum("thd,shd->hts", rotated, rotated) for rotated in (out, moved)]
    torch.testing.assert_close(*scores, rtol=1e-4, atol=1e-4)


@every_impl
def test_sequences_of_a_pack_are_rotated_as_if_alone(impl):
    x, _, inv_freq = _inputs(3, 16)
    packed = rope(x, POSITIONS, inv_freq, impl=impl)
    alone = rope(x[10:], torch.arange(13), inv_freq, impl=impl)
    assert torch.equal(packed[10:], alone)
    # the first token of each sequence stays
    assert torch.equal(packed[[0, 9, 10]], x[[0, 9, 10]])


def test_angles_of_far_positions_have_the_rounding_of_hugging_face():
    positions, inv_freq = torch.tensor([131071, 1000003]), torch.tensor([1.0, 0.3])
    angles = rope_angles(positions, inv_freq, dtype=torch.float32)
    # its cos of the float32 product
    angle = (inv_freq[None, :, None] @ positions[None, None, :].float()).transpose(1, 2)[0]
    assert torch.equal(angles.cos, angle.cos()) and torch.equal(angles.sin, angle.sin())
    exact = angle.double()
    torch.testing.assert_close(angles.cos.double(), exact.cos(), rtol=0, atol=1e-7)


@every_impl
def test_heads_of_a_projection_are_rotated_where_they_lie(impl):
    dense, upstream, inv_freq = _inputs(4, 16)
    guarded = torch.full((len(dense), 100), float("nan"))
    guarded[:, 20:84] = dense.flatten(1)
    heads = guarded[:, 20:84].unflatten(1, (4, 16))
    expanded = upstream[:, :1].expand(-1, 4, -1)
    results = [
        _run(x, grad, lambda x: rope(x, POSITIONS, inv_freq, impl=impl))
        for x, grad in ((heads, expanded), (dense, expanded.contiguous()))
    ]
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    turned = dense.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    assert torch.equal(rope(turned, POSITIONS, inv_freq, impl=impl), results[0][0])
    # every element of the result was written, and x was not
    assert results[0][0].isfinite().all() and torch.equal(heads, dense)


@every_impl
def test_no_tokens_give_nothing(impl):
    x = torch.zeros(0, 2, 8, requires_grad=True)
    out = rope(x, torch.zeros(0, dtype=torch.int64), torch.ones(4), impl=impl)
    out.sum().backward()
    assert out.shape == x.grad.shape == (0, 2, 8)


@every_impl
def test_only_the_angles_are_kept_for_backward(impl):
    x, _, inv_freq = _inputs(8, 16)
    angles = rope_angles(POSITIONS, inv_freq, dtype=x.dtype)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor
    ):
        rotate(x.requires_grad_(), angles, impl=impl)
    assert [tensor.data_ptr() for tensor in saved] == [angles.cos.data_ptr(), angles.sin.data_ptr()]


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"x": torch.zeros(3, 8)}, ValueError, r"expected x \[T, heads, D\]"),
        ({"positions": torch.arange(4)}, ValueError, "expected x"),
        ({"positions": torch.zeros(3)}, TypeError, "must be torch.int64"),
        ({"inv_freq": torch.ones(5)}, ValueError, "at most 4 frequencies"),
        ({"inv_freq": torch.ones(4, dtype=torch.bfloat16)}, TypeError, "too few digits"),
        ({"impl": "cuda"}, ValueError, "this op has reference, portable, triton"),
    ],
)
def test_arguments_that_do_not_fit_are_named(change, error, words):
    arguments = {"x": torch.zeros(3, 2, 8), "positions": torch.arange(3), "inv_freq": torch.ones(4)} | change
    with pytest.raises(error, match=words):
        rope(**arguments)


def test_angles_of_another_dtype_are_named():
    angles = RopeAngles(torch.ones(3, 4), torch.ones(3, 4))
    with pytest.raises(TypeError, match=r"cos of torch\.float32"):
        rotate(torch.zeros(3, 2, 8, dtype=torch.bfloat16), angles)


@pytest.mark.parametrize("impl", ["reference", "portable", "triton"])
def test_angles_that_want_a_gradient_are_refused(impl):
    x, _, inv_freq = _inputs(2, 8)
    with pytest.raises(ValueError, match="rope: cos or sin requires a gradient"):
        rope(x, POSITIONS, inv_freq.requires_grad_(), impl=impl)


def test_positions_on_another_device_are_named():
    with pytest.raises(ValueError, match="rope: got positions on meta, inv_freq on cpu"):
        rope_angles(POSITIONS.to("meta"), torch.ones(4), dtype=torch.float32)


@pytest.mark.parametrize("heads", [1, 4])
def test_in_float32_portable_has_the_bits_of_megatron_core(heads):
    # training takes either, by machine; a fused product and sum would round once less
    x, upstream, inv_freq = _inputs(heads, 32)
    freqs = torch.outer(POSITIONS.float(), inv_freq).repeat(1, 2)[:, None, None]
    want = _run(x, upstream, lambda t: _apply_rotary_pos_emb_bshd(t.unsqueeze(1), freqs).squeeze(1))
    got = _run(x, upstream, lambda t: rope(t, POSITIONS, inv_freq, impl="portable"))
    for actual, expected in zip(got, want, strict=True):
        assert torch.equal(actual, expected)

"""`logprob_from_logits` in C++ (`host`, on a GPU `cuda`) against the float64 definition: values, gradients, limits."""

import math

import pytest
import torch

from megatron_rl_kernels.logprob_from_logits import (
    logprob_from_logits,
    logprob_from_logits_,
    logprob_from_logits_reference,
    native,
)
from megatron_rl_kernels.logprob_from_logits.autograd import LogprobFromLogits
from megatron_rl_kernels.logprob_from_logits.shards import RowValues, Shard

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def _inputs(num_tokens, vocab, *, scale=3.0, dtype=torch.float32, seed=0):
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_tokens, vocab, generator=draw).mul(scale).to(dtype)
    target = torch.randint(vocab, (num_tokens,), generator=draw)
    upstream = torch.randn(2, num_tokens, generator=draw)
    # as on a masked token
    upstream[:, 1::4] = 0
    return logits, target, upstream


def _shard(vocab, **changes):
    given = {"temperature": 1.0, "vocab_start": 0, "num_columns": vocab, "group": None, "with_entropy": True}
    return Shard(**{**given, "overwrites_logits": False, **changes})


def _host(logits, target, upstream, shard, device="cpu"):
    """The op on a device, its results on the CPU."""
    leaf = logits.detach().clone().to(device).requires_grad_()
    target, upstream = target.to(device), upstream.to(device)
    # not a leaf, as where backward overwrites it
    logprob, entropy, lse = LogprobFromLogits.apply(leaf * 1, target, shard, native)
    (upstream[0] * logprob + upstream[1] * entropy).sum().backward()
    return tuple(tensor.detach().cpu() for tensor in (logprob, entropy, lse, leaf.grad))


def _definition(logits, target, upstream, **options):
    wide = logits.detach().double().requires_grad_()
    out = logprob_from_logits_reference(wide, target, **options)
    (upstream[0] * out.logprob + upstream[1] * out.entropy).sum().backward()
    return out.logprob.detach(), out.entropy.detach(), out.lse.detach(), wide.grad


def _assert_matches(got, want, *, value_atol=5e-6, grad_atol=2e-6, grad_rtol=1e-5):
    for name, actual, expected in zip(("logprob", "entropy", "lse"), got[:3], want[:3], strict=True):
        torch.testing.assert_close(
            actual.double(), expected, rtol=1e-6, atol=value_atol, msg=lambda m, n=name: f"{n}: {m}"
        )
    torch.testing.assert_close(got[3].double(), want[3], rtol=grad_rtol, atol=grad_atol)


@pytest.mark.parametrize("num_tokens", [1, 63], ids="n{}".format)
@pytest.mark.parametrize("vocab", [1, 255, 2048, 5001], ids="v{}".format)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("device", DEVICES)
def test_values_and_gradients_match_the_float64_definition(num_tokens, vocab, temperature, device):
    logits, target, upstream = _inputs(num_tokens, vocab)
    got = _host(logits, target, upstream, _shard(vocab, temperature=temperature), device)
    _assert_matches(got, _definition(logits, target, upstream, temperature=temperature))


def test_each_token_may_have_its_own_temperature():
    logits, target, upstream = _inputs(40, 999)
    temperature = torch.linspace(0.3, 2.0, 40)
    got = _host(logits, target, upstream, _shard(999, temperature=temperature))
    _assert_matches(got, _definition(logits, target, upstream, temperature=temperature.double()))


@pytest.mark.parametrize("device", DEVICES)
def test_bf16_logits_are_read_exactly_and_their_gradient_is_rounded_once(device):
    logits, target, upstream = _inputs(40, 3000, dtype=torch.bfloat16)
    got = _host(logits, target, upstream, _shard(3000), device)
    assert got[3].dtype == torch.bfloat16 and got[0].dtype == torch.float32
    # half a unit of 8 bits
    _assert_matches(got, _definition(logits, target, upstream), grad_rtol=2**-8, grad_atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_a_gradient_over_the_logits_has_the_bits_of_one_beside_them(dtype, device):
    logits, target, upstream = (tensor.to(device) for tensor in _inputs(20, 2500, dtype=dtype))
    shard = _shard(2400)
    values = native.row_values(logits, target % 2400, shard)
    beside = torch.full_like(logits, math.nan)
    native.write_gradients(beside, logits, target % 2400, shard, values, upstream[0], upstream[1])
    over = logits.clone()
    native.write_gradients(over, over, target % 2400, shard, values, upstream[0], upstream[1])
    assert torch.equal(over, beside)
    assert not beside[:, 2400:].any() and beside[:, :2400].any()


def test_padding_and_foreign_targets_take_no_part():
    logits, target, upstream = _inputs(30, 700)
    padded = torch.cat((logits, torch.full((30, 50), 1e4)), dim=1)
    got = _host(padded, target, upstream, _shard(700))
    want = _host(logits, target, upstream, _shard(700))
    for one, other in zip(got[:3], want[:3], strict=True):
        assert torch.equal(one, other)
    assert torch.equal(got[3][:, :700], want[3]) and not got[3][:, 700:].any()
    # id 700 is a padded column, not the first one of the next shard
    assert native.row_values(padded, target * 0 + 700, _shard(700)).logprob.isnan().all()


def test_two_shards_merge_to_the_whole():
    logits, target, _ = _inputs(50, 1000)
    whole = native.row_values(logits, target, _shard(1000))
    parts = [
        native._row_statistics(logits[:, start:stop], target, _shard(stop - start, vocab_start=start))
        for start, stop in ((0, 300), (300, 1000))
    ]
    merged = native._merged(torch.stack(parts), _shard(1000))
    for name in RowValues._fields:
        torch.testing.assert_close(getattr(merged, name), getattr(whole, name), rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("offset", [-1e4, -300.0, 300.0, 1e4])
def test_an_offset_of_all_logits_changes_nothing_but_lse(offset):
    logits, target, upstream = _inputs(20, 600)
    # a multiple of a power of two, so that the sum is exact
    logits = (logits * 16).round() / 16
    got = _host(logits + offset, target, upstream, _shard(600))
    want = _host(logits, target, upstream, _shard(600))
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1]) and torch.equal(got[3], want[3])


@pytest.mark.parametrize("device", DEVICES)
def test_impossible_tokens_have_no_probability_and_no_gradient(device):
    logits, target, upstream = _inputs(6, 5000)
    # the first tile of row 0 is empty; row 1 has one token left, its target; row 2 has none
    logits[0, :2100] = -math.inf
    target[0] = 4000
    logits[1] = -math.inf
    logits[1, 17] = 2.0
    target[1] = 17
    logits[2] = -math.inf
    upstream[:, 1] = 1.0
    logprob, entropy, lse, grad = _host(logits, target, upstream, _shard(5000), device)
    want = _definition(logits[:1], target[:1], upstream[:, :1])
    _assert_matches((logprob[:1], entropy[:1], lse[:1], grad[:1]), want)
    assert not grad[0, :2100].any()
    assert (logprob[1], entropy[1], lse[1]) == (0, 0, 2) and not grad[1].any()
    assert (logprob[2], entropy[2], lse[2]) == (-math.inf, 0, -math.inf) and not grad[2].any()


def test_rows_that_nothing_flows_into_get_zero_whatever_they_hold():
    logits, target, upstream = _inputs(4, 100)
    logits[1] = math.nan
    upstream[:, 1] = 0
    grad = _host(logits, target, upstream, _shard(100))[3]
    assert not grad[1].any() and grad[0].any()


def test_strided_rows_and_a_shifted_target_are_read_in_place():
    logits, target, upstream = _inputs(21, 800)
    room = torch.full((21, 900), math.nan)
    room[:, 3:803] = logits
    values = native.row_values(room[:, 3:803], target, _shard(800))
    assert torch.equal(values.logprob, native.row_values(logits, target, _shard(800)).logprob)
    shifted = native.row_values(logits[1:], target[1:], _shard(800))
    assert torch.equal(shifted.logprob, values.logprob[1:])
    out = torch.zeros(21, 900)
    native.write_gradients(
        out[:, 3:803], room[:, 3:803], target, _shard(800), values, upstream[0], upstream[1]
    )
    assert not out[:, :3].any() and not out[:, 803:].any() and out[:, 3:803].any() and not out.isnan().any()


def test_no_tokens_give_no_values():
    logits, target, upstream = _inputs(0, 10)
    got = _host(logits, target, upstream, _shard(10))
    assert [tuple(one.shape) for one in got] == [(0,), (0,), (0,), (0, 10)]


def test_what_the_kernels_cannot_read_is_refused():
    logits, target, _ = _inputs(4, 10)
    with pytest.raises(TypeError, match=r"take float32 or bfloat16, got logits of torch\.float16"):
        native.row_values(logits.half(), target, _shard(10))
    with pytest.raises(ValueError, match=r"columns must be contiguous; pass logits\.contiguous\(\)"):
        native.row_values(torch.zeros(10, 4).T, target, _shard(10))


def test_the_public_op_runs_it_when_asked_for():
    logits, target, upstream = _inputs(9, 300)
    want = _host(logits, target, upstream, _shard(300, temperature=0.7))
    for op in (logprob_from_logits, logprob_from_logits_):
        leaf = logits.clone().requires_grad_()
        out = op(leaf * 1, target, temperature=0.7, impl="host")
        (upstream[0] * out.logprob + upstream[1] * out.entropy).sum().backward()
        assert torch.equal(out.logprob, want[0]) and torch.equal(leaf.grad, want[3])
    with pytest.raises(ValueError, match=r"this op has reference, portable, triton$"):
        logprob_from_logits(logits.half(), target, impl="host")

"""The Triton kernels of linear_policy_loss, in Triton's interpreter, against the float64 definition."""

import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from megatron_rl_kernels.linear_policy_loss import linear_policy_loss
from tests.helpers.policy_batch import (
    CONFIGS,
    Batch,
    LargestTensor,
    assert_matches,
    make_batch,
    reference,
    relative_error,
    run,
)
from tests.helpers.source import ROOT

# float32 sums of 72 products of size 1
EXACT = {"value_atol": 5e-5, "grad_rtol": 5e-6}
# the interpreter cuts bfloat16 off instead of rounding it: 2^-8 of each logit's gradient, then of the sum
BF16 = {"value_atol": 5e-5, "grad_rtol": 8e-3}


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Memory that nothing was written to holds NaN."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.isnan(torch.empty(3)).all()
    yield
    torch.use_deterministic_algorithms(False)


def _batch(num_tokens=70, vocab=300, *, dtype=torch.float32, **options) -> Batch:
    return make_batch(num_tokens, vocab, hidden_size=72, dtype=dtype, **options)


@pytest.mark.parametrize("name", ["clip", "gppo", "cispo", "clip, entropy bonus", "gmpo, entropy bonus"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_values_and_gradients_match_the_float64_definition(name, dtype):
    batch = _batch(dtype=dtype)
    got = run(batch, CONFIGS[name], impl="triton", chunk_tokens=33)
    assert got.grad_hidden.dtype == got.grad_weight.dtype == dtype
    assert_matches(got, reference(batch, CONFIGS[name]), **(EXACT if dtype == torch.float32 else BF16))


@pytest.mark.parametrize(
    ("num_tokens", "vocab"), [(1, 2), (63, 255), (190, 257), (200, 128)], ids="{}".format
)
def test_sizes_around_those_of_a_tile(num_tokens, vocab):
    # 190 tokens: more trained ones than a tile has rows, in one chunk
    batch = _batch(num_tokens, vocab)
    config = CONFIGS["clip, entropy bonus"]
    assert_matches(run(batch, config, impl="triton"), reference(batch, config), **EXACT)


@pytest.mark.parametrize("temperature", [0.5, "per token"], ids="t {}".format)
def test_temperature_scales_values_and_gradients_in_one_place(temperature):
    batch = _batch(temperature=0.5)
    if temperature == "per token":
        temperature = torch.linspace(0.4, 1.5, 70)
    config = CONFIGS["clip, entropy bonus"]
    got = run(batch, config, impl="triton", temperature=temperature, chunk_tokens=40)
    want = reference(batch, config, temperature=temperature)
    assert_matches(got, want, value_atol=1e-4, grad_rtol=1e-5)


@pytest.mark.parametrize("junk", [1e4, math.inf, math.nan], ids="{}".format)
def test_padded_rows_take_no_part_and_get_no_gradient(junk):
    batch = _batch(valid_vocab=261)
    batch.weight[261:] = junk
    config = CONFIGS["clip, entropy bonus"]
    got = run(batch, config, impl="triton", valid_vocab=261)
    want = reference(replace(batch, weight=batch.weight[:261]), config)
    assert got.grad_weight[261:].abs().max() == 0
    assert_matches(replace(got, grad_weight=got.grad_weight[:261]), want, **EXACT)


def test_rows_between_guard_bands_of_nan_are_read_and_nothing_else():
    batch = _batch()
    hidden, weight = (torch.full((len(one) + 2, 96), math.nan) for one in (batch.hidden, batch.weight))
    hidden[1:-1, 8:80], weight[1:-1, 8:80] = batch.hidden, batch.weight
    strided = replace(batch, hidden=hidden[1:-1, 8:80], weight=weight[1:-1, 8:80])
    leaves = [one.requires_grad_() for one in (strided.hidden.detach(), strided.weight.detach())]
    config = CONFIGS["clip"]
    linear_policy_loss(*leaves, batch.target, batch.inputs, config, impl="triton").loss.backward()
    want = run(batch, config, impl="triton")
    assert torch.equal(leaves[0].grad, want.grad_hidden) and torch.equal(leaves[1].grad, want.grad_weight)


def test_masked_rows_hold_anything_and_get_exact_zeros():
    batch = _batch(60)
    masked = ~batch.inputs.mask
    want = run(batch, CONFIGS["clip"], impl="triton")
    hidden = batch.hidden.clone()
    hidden[masked] = torch.tensor([math.inf, -math.inf, math.nan, 1e38]).repeat(18)
    got = run(replace(batch, hidden=hidden), CONFIGS["clip"], impl="triton")
    for name in ("loss", "logprob", "entropy", "metrics", "grad_hidden", "grad_weight"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    assert got.grad_hidden[masked].abs().max() == 0


@pytest.mark.parametrize("num_tokens", [0, 20], ids=["no tokens", "all masked"])
def test_nothing_to_train_on_gives_zeros(num_tokens):
    batch = _batch(num_tokens, 33)
    batch = replace(batch, inputs=replace(batch.inputs, mask=torch.zeros(num_tokens, dtype=torch.bool)))
    got = run(batch, CONFIGS["clip, entropy bonus"], impl="triton")
    assert got.loss == 0 and got.metrics.abs().max() == 0
    assert got.grad_hidden.abs().sum() == got.grad_weight.abs().sum() == got.logprob.abs().sum() == 0


@pytest.mark.parametrize("name", ["clip", "clip, entropy bonus"])
def test_a_whole_tile_of_minus_inf_logits_takes_no_part(name):
    # the product of 1e30 and -1e30 is -inf in float32, for the first tile of columns and a bit of the second
    batch = _batch(20)
    hidden, weight = batch.hidden.clone(), batch.weight.clone()
    hidden[:, 0], weight[:, 0] = 1e30, 0
    weight[:130, 0] = -1e30
    target = 130 + batch.target % 170
    got = run(Batch(hidden, weight, target, batch.inputs), CONFIGS[name], impl="triton")
    want = reference(Batch(hidden, weight[130:], target - 130, batch.inputs), CONFIGS[name])
    assert got.grad_weight[:130].abs().max() == 0
    assert relative_error(got.grad_hidden[:, 1:], want.grad_hidden[:, 1:]) < 5e-6
    assert relative_error(got.grad_weight[130:, 1:], want.grad_weight[:, 1:]) < 5e-6
    torch.testing.assert_close(got.entropy.double(), want.entropy, rtol=0, atol=5e-5)


def test_target_with_minus_inf_logit_has_finite_gradients():
    batch = _batch(20, 140)
    hidden, weight = batch.hidden.clone(), batch.weight.clone()
    hidden[:, 0], weight[:, 0] = 1e30, 0
    weight[3, 0] = -1e30
    batch.target[0] = 3
    got = run(replace(batch, hidden=hidden, weight=weight), CONFIGS["clip, entropy bonus"], impl="triton")
    assert got.logprob[0] == -math.inf and torch.isfinite(got.loss)
    assert torch.isfinite(got.grad_hidden).all() and torch.isfinite(got.grad_weight).all()


@pytest.mark.parametrize("offset", [-300.0, 1e4], ids="offset{:g}".format)
def test_offset_shared_by_all_logits_changes_nothing(offset):
    # every number here is exact in float32, so the offset alone could do harm
    draw = torch.Generator().manual_seed(0)
    weight = torch.randint(-8, 8, (300, 8), generator=draw) / 4
    weight[:, 0] = 1
    hidden = torch.randint(-4, 4, (20, 8), generator=draw) / 4
    batch = replace(_batch(20), weight=weight)
    moved = hidden + torch.tensor([offset] + [0.0] * 7)
    config = CONFIGS["clip, entropy bonus"]
    here, there = (run(replace(batch, hidden=one), config, impl="triton") for one in (hidden, moved))
    torch.testing.assert_close(there.logprob, here.logprob, rtol=0, atol=1e-6)
    torch.testing.assert_close(there.entropy, here.entropy, rtol=0, atol=2e-6)
    assert relative_error(there.grad_hidden, here.grad_hidden) < 1e-5


def test_runs_are_equal_bit_by_bit_and_leave_their_inputs_alone():
    batch = _batch(dtype=torch.bfloat16)
    copies = [one.clone() for one in (batch.hidden, batch.weight)]
    first, second = (run(batch, CONFIGS["clip, entropy bonus"], impl="triton") for _ in range(2))
    for name in ("loss", "logprob", "entropy", "metrics", "grad_hidden", "grad_weight"):
        assert torch.equal(getattr(first, name), getattr(second, name)), name
    assert torch.equal(batch.hidden, copies[0]) and torch.equal(batch.weight, copies[1])


def test_main_grad_gets_every_chunk_on_top_of_what_it_holds():
    batch = _batch()
    want = run(batch, CONFIGS["clip"], impl="triton", upstream=4.0)
    main_grad = torch.ones_like(batch.weight)
    options = {"main_grad": main_grad, "loss_scale": 4.0, "upstream": 4.0, "chunk_tokens": 16}
    got = run(batch, CONFIGS["clip"], impl="triton", **options)
    assert got.grad_weight is None
    # float32 sums with 1
    torch.testing.assert_close(main_grad - 1, want.grad_weight, rtol=0, atol=1e-6)
    assert relative_error(got.grad_hidden, want.grad_hidden) < 1e-6


def test_sequences_longer_than_a_chunk_give_the_gradients_of_whole_ones():
    batch = _batch(60)
    got = run(batch, CONFIGS["gspo"], impl="triton", chunk_tokens=8)
    assert_matches(got, reference(batch, CONFIGS["gspo"]), **EXACT)


def test_without_gradients_values_are_the_same_bits():
    batch = _batch()
    with torch.no_grad():
        got = linear_policy_loss(
            batch.hidden, batch.weight, batch.target, batch.inputs, CONFIGS["clip"], impl="triton"
        )
    want = run(batch, CONFIGS["clip"], impl="triton")
    assert torch.equal(got.loss, want.loss) and torch.equal(got.logprob, want.logprob)


def test_no_tensor_is_larger_than_the_workspace_of_a_chunk():
    batch = make_batch(300, 1000, hidden_size=8)
    with LargestTensor() as largest:
        run(batch, CONFIGS["clip"], impl="triton", chunk_tokens=64)
    # rows are padded to whole tiles of columns
    assert largest.num_bytes == 4 * 64 * 1024


FAR_ROWS = """
import torch
from megatron_rl_kernels.linear_policy_loss import triton_kernels as kernels

stride, ones = 2**30, torch.ones(3)
# 6 GiB of addresses of which three pages are used
exp = torch.empty(2 * stride + 128, dtype=torch.bfloat16).as_strided((3, 128), (stride, 1))
exp.fill_(1.0)
column = torch.tensor([0, 5, 127])
parts = torch.zeros(1, 4, 3)
log_sum = torch.full((3,), 128.0).log()
kernels.exp_to_gradient[(1, 1)](
    exp, stride, parts, column, 0 * ones, log_sum, -log_sum, ones, ones, ones, 3, 128, BN=128, ROWS=4, ENTROPY=False
)
want = torch.nn.functional.one_hot(column, 128) - 1 / 128
assert torch.equal(exp.float(), want.to(torch.bfloat16).float()), exp
"""


def test_rows_two_gigabytes_apart_are_found():
    # an address computed in 32 bits would end this process
    code = f"import sys, triton; sys.path.insert(0, 'kernels'); triton.knobs.runtime.interpret = True\n{FAR_ROWS}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"dtype": torch.float16}, TypeError, "takes torch.bfloat16 and torch.float32"),
        ({"dtype": torch.float64}, TypeError, "takes torch.bfloat16 and torch.float32"),
        ({"columns": slice(0, 12)}, ValueError, "multiple of 8"),
        ({"columns": slice(2, 10)}, ValueError, "not a multiple of 16 bytes"),
        ({"columns": slice(0, 32, 2)}, ValueError, "must be contiguous"),
        ({"row": 13}, ValueError, "row stride of 13"),
    ],
    ids=["float16", "float64", "H", "address", "last stride", "row stride"],
)
def test_heads_that_the_kernels_cannot_take_are_named(change, error, words):
    dtype, columns = change.get("dtype", torch.float32), change.get("columns", slice(0, 8))
    weight = torch.ones(7 * change.get("row", 32), dtype=dtype).view(7, -1)[:, columns]
    batch = make_batch(3, 7)
    hidden = torch.ones(3, weight.shape[1], dtype=dtype)
    with pytest.raises(error, match=words):
        linear_policy_loss(hidden, weight, batch.target, batch.inputs, CONFIGS["clip"], impl="triton")

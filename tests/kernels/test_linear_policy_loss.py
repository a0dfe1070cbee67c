"""linear_policy_loss in plain torch against its float64 definition: values, gradients, limits, memory."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_rl_kernels.linear_logprob import linear_logprob
from megatron_rl_kernels.linear_policy_loss import PolicyInputs, linear_policy_loss
from megatron_rl_kernels.linear_policy_loss.autograd import spoil_unless
from megatron_rl_kernels.linear_policy_loss.chunks import plan_sequences
from megatron_rl_kernels.policy_loss import METRICS, PolicyLossConfig, policy_loss
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

PPO = CONFIGS["clip"]
# float32 sums of 16 products of size 1; the loss weights add up to about 1
EXACT = {"value_atol": 2e-5, "grad_rtol": 5e-6}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize("chunk_tokens", [7, 33, None], ids="chunk{}".format)
def test_values_and_gradients_match_the_float64_definition(config, chunk_tokens):
    batch = make_batch(70, 130)
    assert_matches(run(batch, config, chunk_tokens=chunk_tokens), reference(batch, config), **EXACT)


@pytest.mark.parametrize("num_tokens", [1, 63, 130], ids="n{}".format)
@pytest.mark.parametrize("vocab", [2, 255, 9001], ids="v{}".format)
def test_any_size_matches_with_and_without_a_gradient_of_the_entropy(num_tokens, vocab):
    # 9001 columns are three blocks, the last one ragged
    batch = make_batch(num_tokens, vocab)
    for name in ("clip", "clip, entropy bonus"):
        got = run(batch, CONFIGS[name], chunk_tokens=50)
        assert_matches(got, reference(batch, CONFIGS[name]), **EXACT)


@pytest.mark.parametrize("seed", range(12))
def test_random_shapes_chunks_and_temperatures_match(seed):
    draw = torch.Generator().manual_seed(seed)

    def pick(*choices):
        return choices[int(torch.randint(len(choices), (1,), generator=draw))]

    num_tokens, vocab = (
        int(torch.randint(1, 131, (1,), generator=draw)),
        pick(1, 2, 255, 256, 257, 1000, 4099),
    )
    valid_vocab = max(1, vocab - pick(0, 1, 7))
    temperature = pick(0.3, 1.0, 2.0)
    batch = make_batch(
        num_tokens,
        vocab,
        hidden_size=pick(1, 8, 40),
        temperature=temperature,
        valid_vocab=valid_vocab,
        seed=seed,
    )
    config = pick(*CONFIGS.values())
    options = {"temperature": temperature, "valid_vocab": valid_vocab}
    got = run(batch, config, chunk_tokens=pick(1, 13, 64, None), **options)
    # at a temperature of 0.3 logits reach 30
    assert_matches(got, reference(batch, config, **options), value_atol=1e-4, grad_rtol=2e-5)


def test_float64_inputs_are_computed_in_float64():
    batch = make_batch(40, 90, dtype=torch.float64)
    config = CONFIGS["clip, entropy bonus"]
    assert_matches(
        run(batch, config, chunk_tokens=9), reference(batch, config), value_atol=1e-12, grad_rtol=1e-12
    )


@pytest.mark.parametrize("name", ["gppo", "clip, entropy bonus"])
def test_fused_and_separate_operators_agree(name):
    batch, config = make_batch(90, 300), CONFIGS[name]
    got = run(batch, config, chunk_tokens=32)
    hidden, weight = batch.hidden.clone().requires_grad_(), batch.weight.clone().requires_grad_()
    separate = linear_logprob(hidden, weight, batch.target)
    inputs = batch.inputs
    loss = policy_loss(
        separate.logprob,
        inputs.old_logprob,
        inputs.advantage,
        inputs.mask,
        config,
        token_weight=inputs.token_weight,
        entropy=separate.entropy,
        ref_logprob=inputs.ref_logprob,
        correction=inputs.correction,
        nll_weight=inputs.nll_weight,
    )
    loss.loss.backward()
    torch.testing.assert_close(got.loss, loss.loss.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got.metrics, loss.metrics, rtol=1e-5, atol=1e-5)
    trained = inputs.mask
    torch.testing.assert_close(got.logprob[trained], separate.logprob[trained].detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.entropy[trained], separate.entropy[trained].detach(), rtol=1e-5, atol=1e-5)
    assert relative_error(got.grad_hidden, hidden.grad) < 1e-5
    assert relative_error(got.grad_weight, weight.grad) < 1e-5


@pytest.mark.parametrize("temperature", [0.3, 2.0, "per token"], ids="t {}".format)
@pytest.mark.parametrize("name", ["clip", "clip, entropy bonus"])
def test_temperature_scales_values_and_gradients_in_one_place(temperature, name):
    value = 0.7 if temperature == "per token" else temperature
    batch = make_batch(63, 140, temperature=value)
    if temperature == "per token":
        temperature = torch.linspace(0.3, 1.5, 63)
    got = run(batch, CONFIGS[name], temperature=temperature, chunk_tokens=20)
    assert_matches(
        got, reference(batch, CONFIGS[name], temperature=temperature), value_atol=5e-5, grad_rtol=1e-5
    )


def test_one_temperature_for_all_and_the_same_for_each_give_the_same_bits():
    batch = make_batch(63, 140)
    one, each = (run(batch, PPO, temperature=value) for value in (0.7, torch.full((63,), 0.7)))
    assert torch.equal(one.logprob, each.logprob) and torch.equal(one.grad_weight, each.grad_weight)


def test_supervised_training_is_reinforce_with_advantage_one():
    batch = make_batch(50, 77)
    mask = batch.inputs.mask
    weight = torch.full((50,), 1 / int(mask.sum()))
    inputs = PolicyInputs(advantage=torch.ones(50), mask=mask, token_weight=weight)
    got = run(replace(batch, inputs=inputs), CONFIGS["reinforce"])
    hidden, head = (one.double().requires_grad_() for one in (batch.hidden, batch.weight))
    loss = torch.nn.functional.cross_entropy((hidden @ head.T)[mask], batch.target[mask])
    loss.backward()
    torch.testing.assert_close(got.loss.double(), loss.detach(), rtol=1e-6, atol=1e-6)
    assert relative_error(got.grad_hidden, hidden.grad) < 1e-6
    assert relative_error(got.grad_weight, head.grad) < 1e-6


@pytest.mark.parametrize("name", ["clip", "gspo"])
def test_without_old_logprobs_every_ratio_is_exactly_one(name):
    batch = make_batch(50, 77)
    batch = replace(batch, inputs=replace(batch.inputs, old_logprob=None))
    got = run(batch, CONFIGS[name], chunk_tokens=20)
    metrics = dict(zip(METRICS, got.metrics.tolist(), strict=True))
    assert metrics["ratio"] == metrics["tokens"] == int(batch.inputs.mask.sum())
    assert metrics["ratio_max"] == 1 and metrics["clipped_high"] == metrics["clipped_low"] == 0
    assert_matches(got, reference(batch, CONFIGS[name]), **EXACT)


@pytest.mark.parametrize("name", ["clip", "gspo", "gmpo, entropy bonus"])
@pytest.mark.parametrize("num_parts", [2, 4], ids="{} parts".format)
def test_gradients_of_micro_batches_add_up_to_those_of_the_batch(name, num_parts):
    batch = make_batch(80, 140)
    bounds = torch.arange(0, 81, 10, dtype=torch.int32)
    batch = replace(batch, inputs=replace(batch.inputs, cu_seqlens=bounds))
    want = run(batch, CONFIGS[name])
    loss, main_grad, grad_hidden = 0.0, torch.zeros_like(batch.weight), []
    size = 80 // num_parts
    for start in range(0, 80, size):
        inputs = batch.inputs.map(lambda one, here=slice(start, start + size): one[here])
        inputs = replace(inputs, cu_seqlens=bounds[: size // 10 + 1])
        part = Batch(
            batch.hidden[start : start + size], batch.weight, batch.target[start : start + size], inputs
        )
        got = run(part, CONFIGS[name], main_grad=main_grad, chunk_tokens=17)
        loss += got.loss
        grad_hidden.append(got.grad_hidden)
    torch.testing.assert_close(loss, want.loss, rtol=1e-5, atol=1e-6)
    assert relative_error(torch.cat(grad_hidden), want.grad_hidden) < 1e-5
    assert relative_error(main_grad, want.grad_weight) < 1e-5


@pytest.mark.parametrize("name", ["gspo", "gmpo, entropy bonus"])
def test_sequences_longer_than_a_chunk_give_the_gradients_of_whole_ones(name):
    batch = make_batch(120, 140)
    # 40, 0, 0 (15 masked), 65 tokens: none fits in 5, so log-probs come first
    split, whole = (run(batch, CONFIGS[name], chunk_tokens=size) for size in (5, 120))
    assert_matches(split, whole, value_atol=1e-6, grad_rtol=1e-5)
    # with a chunk's log-probs alone, ratios would differ between the chunks of a sequence
    assert_matches(split, reference(batch, CONFIGS[name]), **EXACT)


@pytest.mark.parametrize("seed", range(5))
def test_chunks_of_whole_sequences_hold_every_token_once(seed):
    lengths = torch.randint(0, 11, (40,), generator=torch.Generator().manual_seed(seed))
    bounds = [0, *lengths.cumsum(0).tolist()]
    chunks = plan_sequences(bounds, 10)
    assert [chunk.start for chunk in chunks] == [0, *(chunk.stop for chunk in chunks[:-1])]
    assert chunks[-1].stop == bounds[-1]
    for chunk in chunks:
        assert 0 < chunk.stop - chunk.start <= 10
        assert (bounds[chunk.first_bound], bounds[chunk.last_bound]) == (chunk.start, chunk.stop)
    assert plan_sequences(bounds, 9) is None
    assert plan_sequences([0], 10) == plan_sequences([0, 0, 0], 10) == []


def test_masked_rows_hold_anything_and_get_exact_zeros():
    batch = make_batch(60, 140)
    masked = ~batch.inputs.mask
    want = run(batch, CONFIGS["clip, kl"])
    hidden = batch.hidden.clone()
    hidden[masked] = torch.tensor([math.inf, -math.inf, math.nan, 1e38]).repeat(4)
    target = batch.target.masked_fill(masked, -100)
    junk = batch.inputs.map(lambda one: one if one.dtype == torch.bool else one.masked_fill(masked, math.nan))
    got = run(Batch(hidden, batch.weight, target, junk), CONFIGS["clip, kl"])
    for name in ("loss", "logprob", "entropy", "metrics", "grad_hidden", "grad_weight"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    assert got.grad_hidden[masked].abs().max() == 0
    assert got.logprob[masked].abs().max() == got.entropy[masked].abs().max() == 0


@pytest.mark.parametrize("junk", [1e4, math.inf, math.nan], ids="{}".format)
@pytest.mark.parametrize("name", ["clip", "clip, entropy bonus"])
def test_padded_rows_take_no_part_and_get_no_gradient(junk, name):
    batch = make_batch(63, 148, valid_vocab=131)
    batch.weight[131:] = junk
    got = run(batch, CONFIGS[name], valid_vocab=131)
    want = reference(replace(batch, weight=batch.weight[:131]), CONFIGS[name])
    assert got.grad_weight[131:].abs().max() == 0
    assert_matches(replace(got, grad_weight=got.grad_weight[:131]), want, **EXACT)


@pytest.mark.parametrize("name", ["clip", "clip, entropy bonus", "gspo"])
@pytest.mark.parametrize("num_tokens", [0, 20], ids=["no tokens", "all masked"])
def test_nothing_to_train_on_gives_zeros(name, num_tokens):
    batch = make_batch(num_tokens, 33)
    batch = replace(batch, inputs=replace(batch.inputs, mask=torch.zeros(num_tokens, dtype=torch.bool)))
    got = run(batch, CONFIGS[name])
    assert got.loss == 0 and got.metrics.abs().max() == 0
    assert got.logprob.shape == got.entropy.shape == (num_tokens,)
    assert got.grad_hidden.shape == (num_tokens, 16) and got.grad_weight.shape == (33, 16)
    assert got.grad_hidden.abs().sum() == got.grad_weight.abs().sum() == got.logprob.abs().sum() == 0


@pytest.mark.parametrize("name", ["clip", "clip, entropy bonus"])
def test_a_whole_block_of_minus_inf_logits_takes_no_part(name):
    # the product of 1e30 and -1e30 is -inf in float32, for the first block of columns and a bit of the second
    batch = make_batch(20, 9000)
    hidden, weight = batch.hidden.clone(), batch.weight.clone()
    hidden[:, 0], weight[:, 0] = 1e30, 0
    weight[:4100, 0] = -1e30
    target = 4100 + batch.target % 4900
    got = run(Batch(hidden, weight, target, batch.inputs), CONFIGS[name])
    # the definition, on columns that exist; hidden's first value reaches none of them
    exact = Batch(hidden.clone(), weight[4100:], target - 4100, batch.inputs)
    want = reference(exact, CONFIGS[name])
    assert got.grad_weight[:4100].abs().max() == 0
    assert torch.isfinite(got.grad_hidden).all()
    assert relative_error(got.grad_hidden[:, 1:], want.grad_hidden[:, 1:]) < 5e-6
    assert relative_error(got.grad_weight[4100:, 1:], want.grad_weight[:, 1:]) < 5e-6
    torch.testing.assert_close(got.entropy.double(), want.entropy, rtol=0, atol=2e-5)


@pytest.mark.parametrize("old", ["given", None], ids="old logprobs {}".format)
def test_target_with_minus_inf_logit_has_a_defined_loss_and_finite_gradients(old):
    weight = torch.tensor([[-1e30, 0.0], [0.0, 1.0], [0.0, -1.0]])
    hidden = torch.tensor([[1e30, 0.5], [1e30, 0.5]])
    ones = torch.ones(2)
    inputs = PolicyInputs(
        advantage=ones, mask=ones.bool(), token_weight=ones, old_logprob=-ones if old else None
    )
    got = run(Batch(hidden, weight, torch.tensor([0, 1]), inputs), PPO)
    assert got.logprob[0] == -math.inf and got.logprob[1] < 0
    assert torch.isfinite(got.loss) and torch.isfinite(got.entropy).all()
    assert torch.isfinite(got.grad_hidden).all() and torch.isfinite(got.grad_weight).all()


@pytest.mark.parametrize("offset", [-1e4, -300.0, 300.0, 1e4], ids="offset{:g}".format)
def test_offset_shared_by_all_logits_changes_nothing(offset):
    # every number here is exact in float32, so the offset alone could do harm
    weight = torch.tensor([[0.0, 1.0], [1.0, 1.0], [3.0, 1.0], [-2.0, 1.0], [0.5, 1.0]])
    hidden = torch.tensor([[1.0, 0.0], [2.0, 0.0], [-1.0, 0.0]])
    batch = make_batch(3, 5, hidden_size=2)
    moved = hidden + torch.tensor([0.0, offset])
    here, there = (
        run(replace(batch, hidden=one, weight=weight), CONFIGS["clip, entropy bonus"])
        for one in (hidden, moved)
    )
    torch.testing.assert_close(there.logprob, here.logprob, rtol=0, atol=1e-6)
    torch.testing.assert_close(there.entropy, here.entropy, rtol=0, atol=1e-6)
    torch.testing.assert_close(there.grad_weight[:, 0], here.grad_weight[:, 0], rtol=1e-5, atol=1e-6)


def test_gradient_of_logits_adds_up_to_zero_over_the_vocabulary():
    # row i of hidden picks column i of weight, so column i of its gradient is the gradient of the logits of token i
    batch = make_batch(24, 5000, hidden_size=24)
    batch = replace(batch, hidden=torch.eye(24))
    got = run(batch, CONFIGS["clip, entropy bonus"])
    assert got.grad_weight.abs().max() > 1e-3
    # float32 sums of numbers of at most 0.1
    assert got.grad_weight.sum(0).abs().max() < 2e-6


def test_target_that_no_shard_owns_is_nan_and_not_a_loss_that_looks_right():
    batch = make_batch(5, 9)
    batch.target[0] = 9
    assert torch.isnan(run(batch, PPO).loss)


def test_bf16_inputs_are_multiplied_and_summed_in_float32():
    batch = make_batch(300, 4200, dtype=torch.bfloat16)
    got = run(batch, CONFIGS["clip, entropy bonus"], chunk_tokens=17)
    assert got.logprob.dtype == got.entropy.dtype == got.loss.dtype == torch.float32
    assert got.grad_hidden.dtype == got.grad_weight.dtype == torch.bfloat16
    # one rounding to bf16 (2^-9) of each gradient, however many chunks added up to it
    assert_matches(got, reference(batch, CONFIGS["clip, entropy bonus"]), value_atol=2e-5, grad_rtol=2e-3)


def test_strided_inputs_are_read_correctly():
    batch = make_batch(64, 40, hidden_size=32)
    inputs = replace(batch.inputs.map(lambda one: one[1:]), cu_seqlens=None)
    strided = Batch(batch.hidden[1:, ::2], batch.weight[:, ::2], batch.target[1:], inputs)
    assert_matches(run(strided, PPO, chunk_tokens=9), reference(strided, PPO), **EXACT)


def test_runs_are_equal_bit_by_bit_and_leave_their_inputs_alone():
    batch = make_batch(63, 4200)
    copies = [one.clone() for one in (batch.hidden, batch.weight, batch.target, batch.inputs.token_weight)]
    first, second = (run(batch, CONFIGS["clip, entropy bonus"], chunk_tokens=20) for _ in range(2))
    for name in ("loss", "logprob", "entropy", "metrics", "grad_hidden", "grad_weight"):
        assert torch.equal(getattr(first, name), getattr(second, name)), name
    for one, copy in zip(
        (batch.hidden, batch.weight, batch.target, batch.inputs.token_weight), copies, strict=True
    ):
        assert torch.equal(one, copy)


@pytest.mark.parametrize("upstream", [0.0, -2.5, 1024.0], ids="g{:g}".format)
def test_upstream_gradient_multiplies_once(upstream):
    batch = make_batch(40, 60)
    one, scaled = run(batch, PPO), run(batch, PPO, upstream=upstream)
    torch.testing.assert_close(scaled.grad_hidden, one.grad_hidden * upstream, rtol=1e-6, atol=0)
    torch.testing.assert_close(scaled.grad_weight, one.grad_weight * upstream, rtol=1e-6, atol=0)


def _leaves(batch: Batch) -> tuple[Tensor, Tensor]:
    return batch.hidden.clone().requires_grad_(), batch.weight.clone().requires_grad_()


@pytest.mark.parametrize("with_main_grad", [False, True], ids=["own gradient", "main_grad"])
def test_second_backward_raises_and_changes_nothing(with_main_grad):
    batch = make_batch(40, 60)
    hidden, weight = _leaves(batch)
    main_grad = torch.zeros_like(batch.weight) if with_main_grad else None
    loss = linear_policy_loss(hidden, weight, batch.target, batch.inputs, PPO, main_grad=main_grad).loss
    loss.backward(retain_graph=True)
    kept = hidden.grad.clone(), (main_grad if with_main_grad else weight.grad).clone()
    with pytest.raises(RuntimeError, match="backward ran a second time"):
        loss.backward()
    assert torch.equal(hidden.grad, kept[0])
    assert torch.equal(main_grad if with_main_grad else weight.grad, kept[1])


@pytest.mark.parametrize("loss_scale", [1.0, 8.0, torch.tensor(-0.5)], ids=["1", "8", "tensor"])
def test_main_grad_gets_the_scaled_gradient_on_top_of_what_it_holds(loss_scale):
    batch = make_batch(40, 60)
    want = run(batch, PPO, upstream=float(loss_scale))
    main_grad = torch.randn(batch.weight.shape, generator=torch.Generator().manual_seed(3))
    before = main_grad.clone()
    got = run(
        batch, PPO, upstream=float(loss_scale), main_grad=main_grad, loss_scale=loss_scale, chunk_tokens=11
    )
    assert got.grad_weight is None
    # float32 numbers of size 1 hold sums with gradients of size 1e-2
    assert relative_error(main_grad - before, want.grad_weight) < 2e-5
    assert relative_error(got.grad_hidden, want.grad_hidden) < 2e-6
    assert got.loss == want.loss


def test_upstream_gradient_that_is_not_the_announced_one_raises():
    batch = make_batch(40, 60)
    with pytest.raises(RuntimeError, match=r"upstream gradient 2.*loss_scale = 1"):
        run(batch, PPO, upstream=2.0, main_grad=torch.zeros_like(batch.weight))


def test_on_a_device_a_gradient_of_the_wrong_scale_turns_into_nan():
    for fits, is_spoiled in ((True, False), (False, True)):
        grads = torch.ones(2, 3, 4)
        spoil_unless(torch.tensor(fits), grads[0], None, grads[1][:1])
        assert torch.isnan(grads[0]).all() == torch.isnan(grads[1][0]).all() == is_spoiled
        assert torch.equal(grads[1][1:], torch.ones(2, 4))


def test_main_grad_is_not_touched_without_gradients(recwarn):
    batch = make_batch(40, 60)
    hidden, weight = _leaves(batch)
    main_grad = torch.zeros_like(batch.weight)
    with torch.no_grad():
        quiet = linear_policy_loss(hidden, weight, batch.target, batch.inputs, PPO, main_grad=main_grad)
    frozen = linear_policy_loss(
        hidden, batch.weight, batch.target, batch.inputs, PPO, main_grad=main_grad, loss_scale=4.0
    )
    (frozen.loss * 4.0).backward()
    assert not quiet.loss.requires_grad and quiet.loss == frozen.loss.detach()
    assert torch.equal(hidden.grad, run(batch, PPO, upstream=4.0).grad_hidden)
    assert main_grad.abs().max() == 0
    assert not recwarn.list


def test_loss_dropped_without_backward_says_that_main_grad_holds_its_gradient():
    batch = make_batch(40, 60)
    hidden, weight = _leaves(batch)
    main_grad = torch.zeros_like(batch.weight)
    with pytest.warns(RuntimeWarning, match="whose backward never ran"):
        linear_policy_loss(hidden, weight, batch.target, batch.inputs, PPO, main_grad=main_grad)


def test_frozen_hidden_states_leave_the_gradient_of_the_head_as_it_is():
    batch = make_batch(40, 60)
    weight = batch.weight.clone().requires_grad_()
    linear_policy_loss(batch.hidden, weight, batch.target, batch.inputs, PPO).loss.backward()
    assert torch.equal(weight.grad, run(batch, PPO).grad_weight)


@pytest.mark.parametrize("name", ["clip", "clip, entropy bonus", "gspo"])
def test_no_tensor_is_larger_than_one_chunk_of_logits(name):
    batch = make_batch(2048, 1000, hidden_size=8)
    with LargestTensor() as largest:
        run(batch, CONFIGS[name], chunk_tokens=64)
    assert largest.num_bytes <= 4 * 64 * 1000
    # the instrument does see what the definition materialises
    with LargestTensor() as largest:
        run(batch, CONFIGS[name], impl="reference")
    assert largest.num_bytes == 4 * int(batch.inputs.mask.sum()) * 1000


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"hidden": torch.zeros(3, 5)}, ValueError, "H of hidden and weight"),
        ({"target": torch.zeros(4, dtype=torch.int64)}, ValueError, "N of hidden and target"),
        ({"target": torch.zeros(3)}, TypeError, "must be torch.int64"),
        ({"weight": torch.zeros(7, 16, dtype=torch.bfloat16)}, TypeError, "same one of"),
        ({"temperature": 0.0}, ValueError, "temperature = 0.0"),
        ({"temperature": torch.ones(2)}, TypeError, r"temperature \(2,\)"),
        ({"chunk_tokens": 0}, ValueError, "chunk_tokens = 0"),
        ({"valid_vocab": 5, "vocab_start": 5}, ValueError, "no real row"),
        ({"main_grad": torch.zeros(7, 15)}, ValueError, "main_grad"),
        ({"main_grad": torch.zeros(7, 16, dtype=torch.bfloat16)}, ValueError, "main_grad"),
        ({"loss_scale": 2.0}, ValueError, "loss_scale = 2.0 without main_grad"),
        ({"impl": "reference", "vocab_start": 1}, ValueError, "takes the whole head"),
        ({"config": CONFIGS["gspo"]}, ValueError, "cu_seqlens"),
        ({"advantage": torch.zeros(4)}, ValueError, "inputs.advantage"),
        ({"mask": torch.ones(3)}, TypeError, "inputs.mask"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_arguments_that_do_not_fit_are_named(change, error, words):
    batch = make_batch(3, 7)
    inputs = replace(batch.inputs, cu_seqlens=None)
    for name in ("advantage", "mask"):
        if name in change:
            change = dict(change)
            inputs = replace(inputs, **{name: change.pop(name)})
    arguments = {
        "hidden": batch.hidden,
        "weight": batch.weight,
        "target": batch.target,
        "inputs": inputs,
        "config": PolicyLossConfig(surrogate="clip"),
    }
    with pytest.raises(error, match=words):
        linear_policy_loss(**(arguments | change))


@pytest.mark.parametrize("impl", ["reference", "portable"])
def test_trained_foreign_target_gives_a_loss_of_nan_in_each_implementation(impl):
    batch = make_batch(5, 20)
    for foreign in (-100, 20):
        target = batch.target.clone()
        target[batch.inputs.mask.nonzero()[0]] = foreign
        loss = linear_policy_loss(batch.hidden, batch.weight, target, batch.inputs, PPO, impl=impl).loss
        assert math.isnan(loss.item())


def test_constants_with_a_gradient_or_on_another_device_are_named():
    batch = make_batch(5, 20)
    args = batch.hidden, batch.weight, batch.target
    advantage = batch.inputs.advantage.clone().requires_grad_()
    with pytest.raises(ValueError, match=r"inputs\.advantage requires a gradient"):
        linear_policy_loss(*args, replace(batch.inputs, advantage=advantage), PPO)
    for temperature, what in (
        (torch.ones(5, device="meta"), "temperature on meta"),
        (torch.ones(5, requires_grad=True), "temperature requires a gradient"),
    ):
        with pytest.raises(ValueError, match=what):
            linear_policy_loss(*args, batch.inputs, PPO, temperature=temperature)
    expanded = torch.zeros(1, batch.weight.shape[1]).expand_as(batch.weight)
    for main_grad, what in ((expanded, "expanded"), (batch.weight.detach(), "memory of weight")):
        with pytest.raises(ValueError, match=f"linear_policy_loss: main_grad .*{what}"):
            linear_policy_loss(*args, batch.inputs, PPO, main_grad=main_grad)
    with pytest.raises(ValueError, match="H must be at least 1"):
        linear_policy_loss(batch.hidden[:, :0], batch.weight[:, :0], batch.target, batch.inputs, PPO)


@pytest.mark.parametrize("impl", ["reference", "portable"])
@pytest.mark.parametrize("bad", [0.0, -1.0, math.inf, math.nan])
def test_unusable_temperature_of_a_trained_token_gives_a_loss_of_nan(bad, impl):
    batch = make_batch(5, 20)
    temperature = torch.ones(5)
    temperature[batch.inputs.mask.nonzero()[0]] = bad
    out = linear_policy_loss(
        batch.hidden, batch.weight, batch.target, batch.inputs, PPO, temperature=temperature, impl=impl
    )
    assert math.isnan(out.loss.item()) and int(out.logprob.isnan().sum()) == 1


def test_chunks_that_are_no_whole_number_are_named():
    batch = make_batch(5, 20)
    with pytest.raises(TypeError, match=r"linear_policy_loss: chunk_tokens = 1\.5"):
        linear_policy_loss(batch.hidden, batch.weight, batch.target, batch.inputs, PPO, chunk_tokens=1.5)
    for name in ("chunk_tokens", "chunk_vocab"):
        with pytest.raises(TypeError, match=rf"linear_logprob: {name} = 1\.5"):
            linear_logprob(batch.hidden, batch.weight, batch.target, **{name: 1.5})

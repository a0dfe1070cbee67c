"""Losses of a micro-batch: values, gradients, metrics, and independence of how the batch is cut."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from megatron_rl.algo.aggregate import token_weights
from megatron_rl.algo.losses import mismatch_metrics, policy_loss, sft_loss
from megatron_rl.algo.surrogates import clip_higher, gppo, make_policy_loss, reinforce
from megatron_rl.data.types import PackedBatch, RlFields
from megatron_rl.errors import TrainingError
from megatron_rl.recipe.algorithm import KlConfig
from megatron_rl.recipe.stages import AlgorithmConfig
from tests.helpers.losses import evaluate

LENGTHS = [3, 5, 2, 6]


def _batch(lengths, *, seed=0):
    """Random packed sequences and log-probs [T]; masked: the first position of each, the last sequence."""
    draw = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    starts = torch.tensor([0, *lengths]).cumsum(0)
    mask = torch.ones(total, dtype=torch.bool)
    mask[starts[:-1]] = False
    mask[starts[-2] :] = False
    old = -torch.rand(total, generator=draw)
    # from +1 for the first sequence down to -1 for the last
    advantages = torch.linspace(1, -1, len(lengths)).repeat_interleave(torch.tensor(lengths))
    rl = RlFields(
        advantages=advantages.where(mask, 0),
        rollout_logprobs=old.where(mask, 0),
        old_logprobs=old.where(mask, 0),
        positives=(mask & (advantages > 0)).float(),
    )
    batch = PackedBatch(
        input_ids=torch.zeros(total, dtype=torch.int64),
        labels=torch.zeros(total, dtype=torch.int64),
        position_ids=torch.cat([torch.arange(length) for length in lengths]),
        cu_seqlens=starts.int(),
        loss_mask=mask,
        rl=rl,
    )
    return batch, old + torch.randn(total, generator=draw) * 0.5


def _cut(batch, start, stop):
    """Sequences start to stop of a batch, as a batch of its own, and the slice of tokens that they take."""
    bounds = batch.cu_seqlens[start : stop + 1]
    tokens = slice(int(bounds[0]), int(bounds[-1]))
    fields = {name: getattr(batch.rl, name) for name in RlFields.__slots__}
    rl = RlFields(**{name: one[tokens] for name, one in fields.items() if one is not None})
    names = ("input_ids", "labels", "position_ids", "loss_mask")
    fields = {name: getattr(batch, name)[tokens] for name in names}
    return PackedBatch(**fields, cu_seqlens=bounds - bounds[0], rl=rl), tokens


def test_sft_loss_is_the_mean_negative_log_likelihood_of_trained_tokens():
    batch, logprob = _batch(LENGTHS)
    logprob.requires_grad_()
    tokens = int(batch.loss_mask.sum())
    out = evaluate(sft_loss(batch, normaliser=tokens), logprob, torch.full_like(logprob, 0.5))
    out.loss.backward()
    assert out.loss.item() == pytest.approx(-logprob[batch.loss_mask].mean().item())
    assert torch.equal(logprob.grad, -batch.loss_mask.float() / tokens)
    metrics = out.metrics
    assert float(metrics["sft/loss"].value) == pytest.approx(out.loss.item())
    assert float(metrics["sft/entropy"].value) == pytest.approx(0.5)
    assert int(metrics["sft/loss"].weight) == tokens


@pytest.mark.parametrize("aggregate", ["token_mean", "sequence_mean"])
def test_policy_loss_equals_autograd_of_its_definition(aggregate):
    batch, logprob = _batch(LENGTHS)
    logprob.requires_grad_()
    options = {"surrogate": clip_higher(0.2, 0.28), "aggregate": aggregate, "normaliser": 7.0}
    out = evaluate(policy_loss(batch, **options, sft_on_positives=0.1, positive_normaliser=3.0), logprob)
    (grad,) = torch.autograd.grad(out.loss, logprob)

    ratio = (logprob - batch.rl.old_logprobs).exp()
    gain = torch.minimum(ratio * batch.rl.advantages, ratio.clamp(0.8, 1.28) * batch.rl.advantages)
    want = torch.zeros(())
    for start, stop in pairwise(batch.cu_seqlens.tolist()):
        trained = batch.loss_mask[start:stop]
        scale = max(int(trained.sum()), 1) if aggregate == "sequence_mean" else 1
        want = want - gain[start:stop][trained].sum() / scale / 7.0
    want = want - 0.1 * (logprob * batch.rl.positives).sum() / 3.0
    torch.testing.assert_close(out.loss, want)
    torch.testing.assert_close(grad, torch.autograd.grad(want, logprob)[0])


@pytest.mark.parametrize("aggregate", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize("cuts", [[0, 2, 4], [0, 1, 2, 3, 4]], ids=["2 parts", "4 parts"])
def test_loss_gradient_and_metrics_do_not_depend_on_the_cut_into_micro_batches(aggregate, cuts):
    batch, logprob = _batch(LENGTHS)
    logprob.requires_grad_()
    options = {
        "surrogate": gppo(0.2, 0.28),
        "aggregate": aggregate,
        "normaliser": 7.0,
        "sft_on_positives": 0.1,
        "positive_normaliser": 3.0,
    }
    whole = evaluate(policy_loss(batch, **options), logprob, logprob.detach().abs())
    (want,) = torch.autograd.grad(whole.loss, logprob)
    parts, grad = [], torch.zeros_like(logprob)
    for start, stop in pairwise(cuts):
        part, tokens = _cut(batch, start, stop)
        parts.append(evaluate(policy_loss(part, **options), logprob[tokens], logprob[tokens].detach().abs()))
        grad += torch.autograd.grad(parts[-1].loss, logprob)[0]
    torch.testing.assert_close(grad, want)
    torch.testing.assert_close(sum(part.loss for part in parts), whole.loss)
    for name, metric in whole.metrics.items():
        each = [part.metrics[name] for part in parts]
        if metric.reduce == "sum":
            merged = sum(one.value for one in each)
        else:
            merged = sum(one.value * one.weight for one in each) / sum(one.weight for one in each)
        torch.testing.assert_close(merged, metric.value, msg=lambda m, n=name: f"{n}: {m}")


def test_policy_gradient_follows_a_scale_on_the_loss():
    batch, logprob = _batch(LENGTHS)
    logprob.requires_grad_()
    options = {"surrogate": gppo(0.2, 0.28), "aggregate": "token_mean", "normaliser": 7.0}
    plain, scaled = (
        torch.autograd.grad(evaluate(policy_loss(batch, **options), logprob).loss * scale, logprob)[0]
        for scale in (1.0, -4.0)
    )
    assert plain.abs().max() > 0 and torch.equal(scaled, -4 * plain)


def test_policy_metrics_say_what_happened():
    batch, _ = _batch([5, 2])
    # the trained tokens are 1 to 4: ratios of 2, 0.5, 1 and 1
    ratios = torch.tensor([1.0, 2.0, 0.5, 1.0, 1.0, 1.0, 1.0])
    advantages = torch.tensor([0.0, 1.0, -1.0, 1.0, 1.0, 0.0, 0.0])
    rl = RlFields(
        advantages=advantages,
        rollout_logprobs=batch.rl.rollout_logprobs,
        old_logprobs=torch.zeros(7),
        positives=torch.zeros(7),
    )
    fields = {name: getattr(batch, name) for name in PackedBatch.__slots__ if name != "rl"}
    logprob, entropy = ratios.log(), torch.tensor([9.0, 1.0, 2.0, 3.0, 4.0, 9.0, 9.0])
    loss = policy_loss(
        PackedBatch(**fields, rl=rl), surrogate=gppo(0.2, 0.28), aggregate="token_mean", normaliser=4.0,
        sft_on_positives=0.1,
    )  # fmt: skip
    out = evaluate(loss, logprob, entropy)
    values = {name: float(metric.value) for name, metric in out.metrics.items()}
    kl = ((2 - 1 - math.log(2)) + (0.5 - 1 - math.log(0.5))) / 4
    assert values == pytest.approx(
        {
            "policy/loss": (-1.28 + 0.8 - 1 - 1) / 4,
            "policy/clip_high_frac": 0.25,
            "policy/clip_low_frac": 0.25,
            "policy/entropy": 2.5,
            "policy/kl_old": kl,
        }
    )


def test_masked_positions_reach_neither_value_nor_gradient():
    batch, logprob = _batch(LENGTHS)
    poisoned = logprob.masked_fill(~batch.loss_mask, math.nan).requires_grad_()
    entropy = torch.full_like(logprob, math.nan).where(~batch.loss_mask, 1.0)
    policy = policy_loss(
        batch, surrogate=gppo(0.2, 0.28), aggregate="token_mean", normaliser=5.0, sft_on_positives=0.1,
        positive_normaliser=2.0,
    )  # fmt: skip
    out = evaluate(policy, poisoned, entropy)
    sft = evaluate(sft_loss(batch, normaliser=5.0), poisoned, entropy)
    (out.loss + sft.loss).backward()
    assert torch.isfinite(out.loss) and torch.isfinite(sft.loss)
    assert (poisoned.grad[~batch.loss_mask] == 0).all() and (poisoned.grad[batch.loss_mask] != 0).all()
    assert all(math.isfinite(metric.value) for metric in (out.metrics | sft.metrics).values())


def test_micro_batch_without_trained_tokens_gives_zero_loss_that_still_has_a_gradient():
    batch, logprob = _batch([4])
    logprob.requires_grad_()
    loss = policy_loss(
        batch, surrogate=gppo(0.2, 0.28), aggregate="sequence_mean", normaliser=5.0, sft_on_positives=0.1,
        positive_normaliser=2.0,
    )  # fmt: skip
    out = evaluate(loss, logprob)
    out.loss.backward()
    assert out.loss.item() == 0.0 and logprob.grad.tolist() == [0.0] * 4
    assert all(math.isfinite(metric.value) for metric in out.metrics.values())


@pytest.mark.parametrize("normaliser", [0.0, math.nan])
def test_step_that_trains_on_nothing_is_an_error(normaliser):
    batch, _ = _batch([4])
    with pytest.raises(TrainingError, match="no token of the global batch"):
        sft_loss(batch, normaliser=normaliser)
    with pytest.raises(TrainingError, match="no token of the global batch"):
        policy_loss(batch, surrogate=gppo(0.2, 0.28), aggregate="token_mean", normaliser=normaliser)


def test_mismatch_metrics_are_mean_nearest_rank_p99_and_max_of_absolute_gaps():
    diffs = torch.arange(1, 201).float() * torch.tensor([1.0, -1.0]).repeat(100)
    values = {metric.name: float(metric.value) for metric in mismatch_metrics(diffs)}
    assert values == {"mismatch/mean": 100.5, "mismatch/p99": 198.0, "mismatch/max": 200.0}


def test_no_gaps_give_no_mismatch_metrics():
    assert mismatch_metrics(torch.zeros(0)) == []


def _with(batch, **fields):
    """The batch with some of its RL fields replaced."""
    return replace(batch, rl=replace(batch.rl, **fields))


@pytest.mark.parametrize("aggregate", ["token_mean", "sequence_mean", "sequence_sum", "token_sum_norm"])
def test_a_rejected_token_keeps_its_place_in_the_denominator(aggregate):
    batch, logprob = _batch(LENGTHS)
    options = {"surrogate": reinforce(), "aggregate": aggregate, "normaliser": 7.0}
    logprob.requires_grad_()
    (plain,) = torch.autograd.grad(evaluate(policy_loss(batch, **options), logprob).loss, logprob)
    correction = torch.ones_like(plain)
    correction[::2] = 0.0
    correction[1] = 3.0
    loss = evaluate(policy_loss(_with(batch, correction=correction), **options), logprob).loss
    (corrected,) = torch.autograd.grad(loss, logprob)
    torch.testing.assert_close(corrected, plain * correction)


def test_kl_in_the_loss_is_aggregated_like_the_surrogate_and_reported():
    batch, logprob = _batch(LENGTHS)
    ref = batch.rl.old_logprobs - 0.3
    recipe = AlgorithmConfig(
        surrogate="reinforce", kl=KlConfig(coefficient=0.5, estimator="k3_straight_through")
    )
    loss = policy_loss(
        _with(batch, ref_logprobs=ref, advantages=torch.zeros_like(ref)),
        surrogate=make_policy_loss(recipe), aggregate="sequence_mean", normaliser=3.0,
    )  # fmt: skip
    logprob.requires_grad_()
    out = evaluate(loss, logprob)
    (grad,) = torch.autograd.grad(out.loss, logprob)
    weights = token_weights("sequence_mean", loss_mask=batch.loss_mask, cu_seqlens=batch.cu_seqlens)
    gap = torch.where(batch.loss_mask, ref - logprob.detach(), 0.0)
    torch.testing.assert_close(grad, weights / 3.0 * 0.5 * -gap)
    want = (gap.exp() - 1 - gap)[batch.loss_mask].mean()
    torch.testing.assert_close(out.metrics["policy/kl_ref"].value, want)


def test_without_a_reference_no_distance_to_one_is_reported():
    batch, logprob = _batch(LENGTHS)
    options = {"aggregate": "token_mean", "normaliser": 7.0}
    anchored = AlgorithmConfig(surrogate="dro", tau=0.1)
    for surrogate, is_anchored in ((make_policy_loss(anchored), True), (gppo(0.2, 0.28), False)):
        loss = policy_loss(batch, surrogate=surrogate, anchored_to_old=is_anchored, **options)
        assert "policy/kl_ref" not in evaluate(loss, logprob).metrics


def test_means_of_micro_batches_are_weighted_by_sequences_for_surrogate_and_positives_alike():
    """As released with arXiv 2508.07629: sum over micro-batches of sequences / all sequences * token mean."""
    batch, logprob = _batch([5, 3, 9, 4, 2])
    logprob.requires_grad_()
    wanted = torch.zeros(())
    loss = torch.zeros(())
    for start, stop in ((0, 2), (2, 4)):
        part, tokens = _cut(batch, start, stop)
        mask, rl = part.loss_mask, part.rl
        of_mean = -(rl.advantages * logprob[tokens])[mask].mean()
        positive = rl.positives > 0
        if positive.any():
            of_mean = of_mean + 0.1 * -logprob[tokens][positive].mean()
        wanted = wanted + 2 / 4 * of_mean
        options = {
            "normaliser": 4.0,
            "sft_on_positives": 0.1,
            "positive_normaliser": 99.0,
            "per_micro_batch": True,
        }
        loss = (
            loss
            + evaluate(
                policy_loss(part, surrogate=reinforce(), aggregate="token_mean", **options), logprob[tokens]
            ).loss
        )
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(*(torch.autograd.grad(one, logprob)[0] for one in (loss, wanted)))

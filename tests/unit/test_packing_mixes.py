"""Micro-batches are full and ranks are even on the length mixes that training meets, and on hostile ones."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest

from megatron_rl.data.balance import Plan, fewest_microbatches, microbatch_plan, work
from megatron_rl.data.load import Load, load_of
from megatron_rl.data.types import TrainSample
from megatron_rl.model.spec import ModelSpec
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.train.batches import attention_weight, step_batches

BUDGET = 32768
# attention costs as much as the rest of a position at 48k tokens, as in a model of 4,096 hidden units
QUADRATIC = 1 / 49152


def _sample(length: int) -> TrainSample:
    return TrainSample(token_ids=range(length + 1), loss_mask=[True] * (length + 1))


def _lognormal(count: int, sigma: float) -> list[int]:
    """Mean of an eighth of the budget before what does not fit is cut."""
    rng, mu = random.Random(0), math.log(BUDGET / 8) - sigma**2 / 2
    return [min(BUDGET, max(1, int(rng.lognormvariate(mu, sigma)))) for _ in range(count)]


def _plan(
    lengths: Sequence[int], dp: int, *, attention_weight: float = 0.0, multiple_of: int = 1
) -> tuple[Plan, Load]:
    plan = microbatch_plan(
        # the mask is not looked at: one for all keeps long samples cheap
        [TrainSample(token_ids=range(length + 1), loss_mask=()) for length in lengths],
        dp=dp,
        tokens_per_microbatch=BUDGET,
        multiple_of=multiple_of,
        attention_weight=attention_weight,
    )
    load = load_of(
        plan,
        lengths,
        tokens_per_microbatch=BUDGET,
        pad_multiples=[1] * dp,
        multiple_of=multiple_of,
        attention_weight=attention_weight,
    )
    return plan, load


@pytest.mark.parametrize("attention_weight", [0.0, QUADRATIC], ids=["linear", "quadratic"])
@pytest.mark.parametrize("dp", [1, 2, 8])
@pytest.mark.parametrize("sigma", [0.5, 1.0, 1.5])
def test_a_lognormal_mix_fills_97_percent_and_ranks_are_even_within_one(sigma, dp, attention_weight):
    _, load = _plan(_lognormal(512 * dp, sigma), dp, attention_weight=attention_weight)
    metrics = load.metrics()
    assert metrics["batch/packing_efficiency"] >= 0.97
    assert metrics["batch/dp_imbalance"] <= 0.01
    assert metrics["batch/padding_frac"] == 0.0


@pytest.mark.parametrize("multiple_of", [1, 4])
@pytest.mark.parametrize(("count", "dp"), [(64, 2), (256, 8), (256, 32), (1024, 64)])
@pytest.mark.parametrize("sigma", [0.5, 1.0, 1.5])
def test_a_small_batch_takes_the_fewest_micro_batches_or_one_more_and_is_even(sigma, count, dp, multiple_of):
    lengths = _lognormal(count, sigma)
    plan, load = _plan(lengths, dp, attention_weight=QUADRATIC, multiple_of=multiple_of)
    fewest = fewest_microbatches(sum(lengths), dp=dp, tokens_per_microbatch=BUDGET, multiple_of=multiple_of)
    assert len(plan[0]) in (fewest, fewest + multiple_of)
    # one sample alone may be more than an even share
    assert load.heaviest <= 1.03 * max(load.mean, max(work(length, QUADRATIC) for length in lengths))


def test_equal_samples_are_dealt_evenly_and_bins_hold_as_many_as_fit():
    plan, load = _plan([3000] * 80, 4)
    assert [sorted(map(len, rank)) for rank in plan] == [[10, 10]] * 4
    assert load.metrics()["batch/dp_imbalance"] == 0.0


def test_one_giant_sample_has_a_rank_to_itself_while_the_others_share_the_rest():
    plan, load = _plan([BUDGET] + [1000] * 60, 3, attention_weight=QUADRATIC)
    giant = next(rank for rank in plan if any(0 in one for one in rank))
    assert [one for rank in [giant] for one in rank if one] == [[0]]
    others = sorted(sum(map(len, rank)) for rank in plan if rank is not giant)
    assert others == [30, 30]
    # nothing evens that out, and the metric says so
    assert load.metrics()["batch/dp_imbalance"] > 0.2


def test_fewer_samples_than_ranks_leave_ranks_empty_and_that_is_measured():
    plan, load = _plan([100, 200], 4)
    assert sorted(sum(map(len, rank)) for rank in plan) == [0, 0, 1, 1]
    assert load.metrics()["batch/dp_imbalance"] == pytest.approx(200 / 75 - 1)
    # an empty micro-batch is two positions long
    assert load.metrics()["batch/padding_frac"] == pytest.approx(4 / 304)


def test_a_few_uneven_samples_are_dealt_better_than_longest_first_would():
    # longest first to the lightest rank makes 17 and 13 of these
    plan, _ = _plan([8, 7, 6, 5, 4], 2)
    assert sorted(sum([8, 7, 6, 5, 4][i] for one in rank for i in one) for rank in plan) == [14, 16]


def test_long_samples_count_for_what_attention_costs():
    lengths = [BUDGET] + [BUDGET // 8] * 8
    # by tokens alone, half of them are in the long one
    _, by_tokens = _plan(lengths, 2)
    plan, by_work = _plan(lengths, 2, attention_weight=QUADRATIC)
    assert by_tokens.metrics()["batch/dp_imbalance"] == 0.0
    assert by_work.mean == pytest.approx(
        (BUDGET * (1 + BUDGET / 49152) + BUDGET * (1 + BUDGET / 8 / 49152)) / 2
    )
    assert sorted(sum(map(len, rank)) for rank in plan) == [1, 8]


def test_a_budget_that_is_not_used_up_gives_even_micro_batches_not_full_ones_and_a_rest():
    plan, _ = _plan([BUDGET // 4] * 9, 1)
    assert sorted(map(len, plan[0])) == [3, 3, 3]


def test_the_plan_is_the_same_every_time():
    lengths = _lognormal(200, 1.0)
    assert _plan(lengths, 4, attention_weight=QUADRATIC) == _plan(lengths, 4, attention_weight=QUADRATIC)


@pytest.mark.parametrize(
    "layout",
    [
        ParallelLayout(dp=3),
        ParallelLayout(dp=2, tp=4, sp=True),
        ParallelLayout(dp=2, pp=2, vpp=2),
        ParallelLayout(dp=2, tp=2, sp=True, pp=4, vpp=2),
    ],
    ids=str,
)
def test_what_is_counted_is_what_all_ranks_run(layout):
    samples = [_sample(length) for length in (7, 30, 12, 12, 3, 25, 1)]
    steps = [
        step_batches(samples, layout, dp_rank=rank, tokens_per_microbatch=40, attention_weight=0.01)
        for rank in range(layout.dp)
    ]
    assert all(step.load == steps[0].load for step in steps)
    load, batches = steps[0].load, [batch for step in steps for batch in step.batches]
    assert load.filled == sum(int(batch.loss_mask.sum()) for batch in batches) == 90
    assert load.computed == sum(batch.num_tokens for batch in batches)
    assert load.capacity == 40 * len(batches)
    assert load.num_microbatches == len(steps[0].batches)


def test_steps_add_up_and_nothing_has_no_metrics():
    _, one = _plan([BUDGET], 1)
    _, two = _plan([BUDGET // 2, BUDGET // 4], 2)
    metrics = (one + two).metrics()
    assert metrics["batch/num_microbatches"] == 2.0
    assert metrics["batch/packing_efficiency"] == pytest.approx(1.75 / 3)
    # the slowest ranks do 1 and 1/2 of a budget, the mean ones 1 and 3/8
    assert metrics["batch/dp_imbalance"] == pytest.approx(1.5 / 1.375 - 1)
    assert Load().metrics() == {}


def test_attention_costs_as_much_as_the_rest_at_the_length_that_the_model_sizes_say():
    spec = ModelSpec(
        family="llama", num_layers=32, hidden_size=4096, ffn_size=14336, num_heads=32, num_kv_heads=8, head_dim=128,
        vocab_size=128256, max_positions=8192, rope_theta=5e5, norm_eps=1e-5, tied=False, qkv_bias=False, qk_norm=False,
    )  # fmt: skip
    # 8.03e9 weights, less the embedding, which is looked up and not multiplied with
    weights = 8_030_261_248 - 128256 * 4096 - 65 * 4096
    assert 1 / attention_weight(spec) == pytest.approx(weights / (32 * 4096))

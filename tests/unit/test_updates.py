"""From graded groups to the optimizer steps of an iteration."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import pytest

from megatron_rl.algo.metric import Metric
from megatron_rl.data.types import RolloutGroup, Verdict
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.recipe.algorithm import CorrectionConfig, KlConfig
from megatron_rl.recipe.amounts import has_old_logprob_pass
from megatron_rl.recipe.stages import AlgorithmConfig, OptimizerConfig, RlStage, SamplingConfig
from megatron_rl.train.batches import local_batches, rollout_samples, split_updates
from megatron_rl.train.groups import Collected, informative_groups, outcome_metrics
from megatron_rl.train.rl_metrics import iteration_counts, num_tokens, rollout_metrics
from megatron_rl.train.updates import plan_updates
from tests.helpers.rollouts import group

C, W = Verdict.CORRECT, Verdict.WRONG


def collected(groups: list[RolloutGroup], kept: list[RolloutGroup]) -> Collected:
    return Collected(groups=groups, kept=kept, metrics={}, counts={})


def test_groups_whose_verdicts_agree_are_dropped_only_on_request() -> None:
    groups = [group("all right", [C, C]), group("mixed", [C, W]), group("all wrong", [W, Verdict.NO_ANSWER])]
    assert [g.prompt.id for g in informative_groups(groups, drop_zero_advantage=True)] == ["mixed"]
    assert len(informative_groups(groups, drop_zero_advantage=False)) == 3


def test_wrong_answers_of_different_rewards_teach_nothing() -> None:
    """A reward for form or length must not tell wrong answers apart."""
    plain = group("all wrong", [W, W, Verdict.NO_ANSWER])
    shaped = [
        replace(rollout, reward=replace(rollout.reward, score=0.1 * index))
        for index, rollout in enumerate(plain.rollouts)
    ]
    assert informative_groups([replace(plain, rollouts=shaped)], drop_zero_advantage=True) == []


def test_an_iteration_counts_prompts_rollouts_and_why_groups_were_dropped() -> None:
    groups = [
        group("right", [C, C]),
        group("mixed", [C, W]),
        group("wrong", [W, W]),
        group("g", [C, Verdict.ERROR]),
    ]
    kept = informative_groups(groups, drop_zero_advantage=True)
    taken, skipped = (Metric(name=name, value=1.0, reduce="max") for name in ("optim/lr", "optim/skipped"))
    assert iteration_counts(collected(groups, kept), [[[taken]], [[taken, skipped]]]) == {
        "prompts": 4,
        "rollouts": 8,
        "dropped_ungraded": 1,
        "dropped_uninformative": 2,
        "updates": 1,
        "skipped_steps": 1,
    }


@pytest.mark.parametrize("failed", [Verdict.ERROR, Verdict.BAD_GOLD])
def test_a_group_whose_grader_failed_is_never_trained_on(failed: Verdict) -> None:
    assert informative_groups([group("g", [C, failed])], drop_zero_advantage=False) == []


def test_a_timeout_counts_as_a_wrong_answer() -> None:
    assert len(informative_groups([group("g", [C, Verdict.TIMEOUT])], drop_zero_advantage=True)) == 1


@pytest.mark.parametrize(
    ("count", "per_update", "sizes"),
    [(8, 4, [4, 4]), (10, 4, [4, 3, 3]), (3, 4, [3]), (5, 1, [1] * 5), (0, 4, [])],
)
def test_groups_spread_evenly_over_as_few_updates_as_fit(
    count: int, per_update: int, sizes: list[int]
) -> None:
    groups = [group(str(i), [C, W]) for i in range(count)]
    updates = split_updates(groups, groups_per_update=per_update)
    assert [len(update) for update in updates] == sizes
    assert list(chain(*updates)) == groups


def test_a_rollout_is_trained_on_its_response_alone() -> None:
    first, second = rollout_samples([group("g", [C, W])], [[0.5, -0.5]])
    assert first.token_ids == [1, 2, 3, 3, 3]
    assert first.loss_mask == [False, False, True, True, True]
    assert first.rollout_logprobs == [0.0, 0.0, -0.5, -0.5, -0.5]
    assert (first.advantage, first.is_positive, second.advantage, second.is_positive) == (
        0.5,
        True,
        -0.5,
        False,
    )
    assert first.sample_id != second.sample_id


@pytest.mark.parametrize(
    "layout",
    [
        ParallelLayout(dp=1),
        ParallelLayout(dp=3),
        ParallelLayout(tp=2, dp=2, sp=True),
        ParallelLayout(pp=2, vpp=2, dp=2),
        ParallelLayout(tp=4, pp=2, vpp=2, sp=True),
    ],
    ids=str,
)
def test_every_sample_is_in_one_micro_batch_of_one_rank(layout: ParallelLayout) -> None:
    groups = [group(str(i), [C, W], response_tokens=2 + i) for i in range(5)]
    samples = rollout_samples(groups, [[1.0, -1.0]] * 5)
    ranks = [local_batches(samples, layout, dp_rank=r, tokens_per_microbatch=16) for r in range(layout.dp)]
    seen = sorted(i for batches in ranks for batch in batches for i in batch.sample_index)
    assert seen == list(range(10))
    assert len({len(batches) for batches in ranks}) == 1
    assert sum(int(b.loss_mask.sum()) for batches in ranks for b in batches) == sum(
        s.num_trained_tokens for s in samples
    )
    if layout.sp:
        assert all(batch.num_tokens % layout.tp == 0 for batches in ranks for batch in batches)
    if layout.vpp > 1:
        assert len(ranks[0]) % layout.pp == 0
        # two interleaved stages exchange both directions at once: see local_batches
        assert all(len({batch.num_tokens for batch in batches}) == 1 for batches in ranks)


def test_rollout_metrics_count_every_rollout_before_groups_are_dropped() -> None:
    groups = [group("a", [C, C]), group("b", [C, W]), group("c", [Verdict.NO_ANSWER, Verdict.ERROR])]
    metrics = rollout_metrics(groups)
    assert metrics["reward/mean"] == 0.5
    # the third group was not graded, so it says nothing about advantages
    assert outcome_metrics(groups, by="verdict")["reward/zero_advantage_frac"] == 0.5
    assert metrics["reward/no_answer_frac"] == metrics["reward/error_frac"] == pytest.approx(1 / 6)
    assert metrics["rollout/tokens"] == 18
    assert metrics["rollout/response_tokens_mean"] == 3
    assert metrics["rollout/truncated_frac"] == 0
    assert metrics["rollout/weight_version"] == 7
    assert num_tokens(groups) == 6 * 5


def test_an_update_that_trains_on_nothing_is_not_taken() -> None:
    stage = RlStage(
        kind="rl", prompts="p.jsonl", rewards={"math_answer": 1.0}, iterations=1, prompts_per_iteration=2,
        group_size=2, updates_per_rollout=2, tokens_per_microbatch=64,
        sampling=SamplingConfig(max_prompt_tokens=8, max_response_tokens=8), optimizer=OptimizerConfig(lr=1e-3),
    )  # fmt: skip
    groups = [group("empty", [C, W], response_tokens=0), group("full", [C, W])]
    (update,) = plan_updates(groups, stage, ParallelLayout(), dp_rank=0)
    assert [sample.sample_id for sample in update.samples] == ["full/0", "full/1"]
    assert plan_updates(groups[:1], stage, ParallelLayout(), dp_rank=0) == []


def test_a_skipped_update_is_counted_apart_from_those_that_were_taken() -> None:
    groups = [group("mixed", [C, W]), group("all right", [C, C]), group("failed", [C, Verdict.ERROR])]
    taken = [[Metric(name="policy/grad_norm", value=1.0, reduce="mean")]]
    skipped = [[Metric(name="optim/skipped", value=1.0, reduce="sum")]]
    counts = iteration_counts(collected(groups, groups[:1]), [taken, skipped])
    taken_and_dropped = {
        "prompts": 3,
        "rollouts": 6,
        "dropped_ungraded": 1,
        "dropped_uninformative": 1,
        "updates": 1,
    }
    assert counts == taken_and_dropped | {"skipped_steps": 1}
    assert "skipped_steps" not in iteration_counts(collected(groups, groups[:1]), [taken])


@pytest.mark.parametrize(
    ("algorithm", "updates", "has_pass"),
    [
        (AlgorithmConfig(), 1, False),
        (AlgorithmConfig(), 2, True),
        (AlgorithmConfig(kl=KlConfig(coefficient=0.1)), 1, False),
        # what is made of old log-probs before the step needs them before it
        (AlgorithmConfig(kl=KlConfig(coefficient=0.1, where="reward")), 1, True),
        (AlgorithmConfig(correction=CorrectionConfig(kind="token_tis", high=2.0)), 1, True),
        (AlgorithmConfig(correction=CorrectionConfig(old="rollout")), 2, False),
    ],
)
def test_old_log_probs_take_a_pass_of_their_own_where_the_step_cannot_give_them(
    algorithm: AlgorithmConfig, updates: int, has_pass: bool
) -> None:
    stage = RlStage(
        kind="rl", prompts="p.jsonl", rewards={"math_answer": 1.0}, iterations=1, prompts_per_iteration=2,
        group_size=2, updates_per_rollout=updates, tokens_per_microbatch=64,
        sampling=SamplingConfig(max_response_tokens=8), optimizer=OptimizerConfig(lr=1e-3), algorithm=algorithm,
    )  # fmt: skip
    assert has_old_logprob_pass(stage, updates=updates) is has_pass

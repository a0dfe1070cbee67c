"""Which groups an iteration trains on: outcomes, rounds of generation, overlong responses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron_rl.algo.overlong import overlong_penalty
from megatron_rl.data.types import Finish, RolloutGroup, Verdict
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.recipe.batch import DynamicSamplingConfig, OverlongConfig
from megatron_rl.recipe.stages import AlgorithmConfig, OptimizerConfig, RlStage, SamplingConfig
from megatron_rl.train.groups import collect_groups, informative_groups, outcome_metrics
from megatron_rl.train.rl_metrics import iteration_counts
from megatron_rl.train.updates import plan_updates
from tests.helpers.rollouts import group

C, W = Verdict.CORRECT, Verdict.WRONG


def stage(**changes: Any) -> RlStage:
    plain = RlStage(
        kind="rl", prompts="p.jsonl", rewards={"math_answer": 1.0}, iterations=1, prompts_per_iteration=4, group_size=2,
        tokens_per_microbatch=64, sampling=SamplingConfig(max_prompt_tokens=8, max_response_tokens=10),
        optimizer=OptimizerConfig(lr=1e-3),
    )  # fmt: skip
    return replace(plain, **changes)


def scored(name: str, *scores: float, verdict: Verdict = W) -> RolloutGroup:
    """A group whose rollouts have these task scores; those of 1 are correct."""
    verdicts = [C if score == 1.0 else verdict for score in scores]
    plain = group(name, verdicts)
    rewards = [
        replace(r, reward=replace(r.reward, task_score=s))
        for r, s in zip(plain.rollouts, scores, strict=True)
    ]
    return replace(plain, rollouts=rewards)


def truncated(one: RolloutGroup, *indices: int) -> RolloutGroup:
    """The group with these rollouts at the length limit."""
    rollouts = [
        replace(r, completion=replace(r.completion, finish=Finish.LENGTH)) if i in indices else r
        for i, r in enumerate(one.rollouts)
    ]
    return replace(one, rollouts=rollouts)


@pytest.mark.parametrize(
    ("by", "kept"),
    [("verdict", ["one solved"]), ("score", ["partial", "one solved"]), ("all_pass", ["one solved"])],
)
def test_outcomes_are_verdicts_scores_or_whether_all_tests_passed(by: Any, kept: list[str]) -> None:
    groups = [
        scored("partial", 0.25, 0.75), scored("one solved", 0.75, 1.0), scored("all", 1.0, 1.0),
        scored("same", 0.5, 0.5),
    ]  # fmt: skip
    found = informative_groups(groups, drop_zero_advantage=True, by=by)
    assert [one.prompt.id for one in found] == kept


def test_scores_are_compared_exactly_and_without_what_shaping_added() -> None:
    nearly = scored("nearly", 0.1 + 0.2, 0.3)
    assert informative_groups([nearly], drop_zero_advantage=True, by="score") == [nearly]
    shaped = [
        replace(r, reward=replace(r.reward, score=0.1 * i))
        for i, r in enumerate(scored("s", 0.5, 0.5).rollouts)
    ]
    alike = replace(nearly, rollouts=shaped)
    assert informative_groups([alike], drop_zero_advantage=True, by="score") == []


def test_a_score_just_below_one_has_not_passed_all() -> None:
    group_of = [scored("almost", 1.0 - 2**-53, 0.5)]
    assert informative_groups(group_of, drop_zero_advantage=True, by="all_pass") == []


def test_shares_of_all_right_and_all_wrong_groups_are_those_before_the_filter() -> None:
    groups = [
        group("r", [C, C]),
        group("w", [W, W]),
        group("m", [C, W]),
        group("v", [W, W]),
        group("g", [C, Verdict.ERROR]),
    ]
    assert outcome_metrics(groups, by="verdict") == {
        "reward/zero_advantage_frac": 0.75, "reward/all_right_frac": 0.25, "reward/all_wrong_frac": 0.5,
    }  # fmt: skip


def test_without_dynamic_sampling_there_is_one_round_and_no_number_of_it() -> None:
    rounds = []

    def generate() -> list[RolloutGroup]:
        rounds.append(1)
        return [group("a", [C, W]), group("b", [C, C])]

    got = collect_groups(generate, stage(), pool_size=99)
    assert rounds == [1] and [one.prompt.id for one in got.kept] == ["a"]
    assert got.metrics["reward/dropped_frac"] == 0.5
    assert not any(name.startswith("sampling/") for name in got.metrics) and got.counts == {}


def test_refill_ends_after_its_rounds_and_trains_on_what_there_is() -> None:
    sampling = DynamicSamplingConfig(kind="refill", generate_prompts=4, max_rounds=3)
    numbers = iter(range(9))
    got = collect_groups(
        lambda: [
            group(f"{number}.{i}", [C, W] if i == 0 else [W, W])
            for number in [next(numbers)]
            for i in range(4)
        ],
        stage(dynamic_sampling=sampling),
    )
    assert [one.prompt.id for one in got.kept] == ["0.0", "1.0", "2.0"]
    assert got.metrics["sampling/rounds"] == 3 and got.metrics["sampling/generated"] == 12
    assert got.counts == {"cut_by_sampling": 0, "short_iterations": 1}


def test_refill_ends_when_its_pool_has_no_further_prompts_for_a_round() -> None:
    sampling = DynamicSamplingConfig(kind="refill", generate_prompts=4, max_rounds=9)
    for pool_size, rounds in ((4, 1), (11, 2), (99, 9)):
        got = collect_groups(
            lambda: [group("g", [W, W])] * 4, stage(dynamic_sampling=sampling), pool_size=pool_size
        )
        assert got.metrics["sampling/rounds"] == rounds and got.kept == []


def test_oversampling_takes_the_first_groups_of_one_round_and_counts_those_it_cuts() -> None:
    sampling = DynamicSamplingConfig(kind="oversample", generate_prompts=8)
    groups = [group(str(i), [W, W] if i == 1 else [C, W]) for i in range(8)]
    got = collect_groups(lambda: groups, stage(dynamic_sampling=sampling))
    assert [one.prompt.id for one in got.kept] == ["0", "2", "3", "4"]
    assert {name: value for name, value in got.metrics.items() if name.startswith("sampling/")} == {
        "sampling/rounds": 1, "sampling/generated": 8, "sampling/kept": 4, "sampling/cut": 3,
    }  # fmt: skip
    counts = iteration_counts(got, [])
    assert (counts["prompts"], counts["dropped_uninformative"], counts["cut_by_sampling"]) == (8, 1, 3)


def test_few_groups_left_of_a_round_are_all_trained_on_by_every_rank() -> None:
    sampling = DynamicSamplingConfig(kind="oversample", generate_prompts=8)
    groups = [group(str(i), [C, W] if i < 3 else [W, W]) for i in range(8)]
    got = collect_groups(lambda: groups, stage(dynamic_sampling=sampling))
    updates = [plan_updates(got.kept, stage(), ParallelLayout(dp=4), dp_rank=rank) for rank in range(4)]
    seen = [index for (update,) in updates for batch in update.batches for index in batch.sample_index]
    assert sorted(seen) == list(range(6))


@pytest.mark.parametrize(
    ("num_tokens", "penalty"),
    [(0, 0.0), (16383, 0.0), (16384, 0.0), (16385, -1 / 4096), (18432, -0.5), (20479, -4095 / 4096), (20480, -1.0),
     (20481, -1.0)],
)  # fmt: skip
def test_the_penalty_falls_over_the_buffer_before_the_limit(num_tokens: int, penalty: float) -> None:
    assert overlong_penalty(num_tokens, max_tokens=20480, buffer_tokens=4096) == penalty


def test_a_penalty_changes_rewards_and_not_outcomes() -> None:
    one = group("a", [C, W], response_tokens=8)
    got = collect_groups(lambda: [one], stage(overlong=OverlongConfig(kind="penalty", buffer_tokens=4)))
    rewards = [rollout.reward for rollout in got.kept[0].rollouts]
    assert [reward.score for reward in rewards] == [0.5, -0.5]
    assert [(reward.parts["overlong"], reward.task_score) for reward in rewards] == [(-0.5, 1.0), (-0.5, 0.0)]


def test_filtered_responses_count_in_their_group_and_not_in_the_loss() -> None:
    filtering = stage(
        overlong=OverlongConfig(kind="filter"), algorithm=AlgorithmConfig(advantage="group_mean")
    )
    one = truncated(group("a", [C, W]), 1)
    got = collect_groups(lambda: [one, truncated(group("b", [C, W]), 0, 1)], filtering)
    # nothing of the second is left
    assert [each.prompt.id for each in got.kept] == ["a"]
    (update,) = plan_updates(got.kept, filtering, ParallelLayout(), dp_rank=0)
    (sample,) = update.samples
    # the mean of the group is over both of its rollouts
    assert (sample.sample_id, sample.advantage) == ("a/0", 0.5)
    assert len(plan_updates(got.kept, stage(), ParallelLayout(), dp_rank=0)[0].samples) == 2

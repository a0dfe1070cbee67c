"""When a window of the curriculum ends early, on histories made up for it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.data.promotion import observe, promotion_metrics, reason_to_end, window_of
from megatron_rl.recipe.batch import PromoteConfig
from megatron_rl.recipe.stages import CurriculumWindow, OptimizerConfig, RlStage, SamplingConfig
from megatron_rl.train.progress import Progress

PLATEAU = PromoteConfig(on="reward_plateau", window=2, threshold=0.125)
TRUNCATED = PromoteConfig(on="truncated_frac", window=3, threshold=0.25)


def stage(
    *iterations: int, promote: PromoteConfig | None = None, rules: Sequence[PromoteConfig | None] = ()
) -> RlStage:
    """Windows of so many iterations, with rules of their own where given; one number is a stage without windows."""
    rules = [*rules, *[None] * (len(iterations) - len(rules))]
    windows = [
        CurriculumWindow(iterations=count, difficulty=(0, 9), promote=rule)
        for count, rule in zip(iterations, rules, strict=True)
    ]
    return RlStage(
        kind="rl", prompts="p", rewards={"math_answer": 1.0}, iterations=sum(iterations), prompts_per_iteration=1,
        group_size=2, sampling=SamplingConfig(max_response_tokens=8), optimizer=OptimizerConfig(lr=1e-3),
        curriculum=tuple(windows) if len(windows) > 1 else (), promote=promote,
    )  # fmt: skip


def walk(
    one: RlStage, rewards: Sequence[float], truncated: Sequence[float] | None = None
) -> list[tuple[int, Any]]:
    """(planned iteration, promotion) of each iteration until the stage is over; every pace goes through JSON."""
    progress, seen = Progress(), []
    while progress.step < progress.last_step([one]):
        i = progress.step
        metrics = {
            "reward/mean": rewards[i],
            "rollout/truncated_frac": (truncated or [0.0] * len(rewards))[i],
        }
        pace, promotion = observe(progress.pace, one, i, metrics)
        seen.append((i + progress.skipped, promotion))
        progress = Progress(**json.loads(json.dumps(progress.advanced(i + 1, pace=pace).to_dict())))
    return seen


@pytest.mark.parametrize(
    ("values", "ends"),
    [
        ([0.5, 0.5, 0.5], False),                # two pairs are needed
        ([0.5, 0.5, 0.5, 0.5], True),
        ([0.0, 0.5, 0.25, 0.5], True),           # by exactly the threshold
        ([0.0, 0.5, 0.375, 0.5], False),
        ([0.9, 0.9, 0.1, 0.1], True),            # a fall is no rise
        ([0.0, 1.0, 0.0, 0.0, 0.5, 0.5], False), # only the last four count
    ],
)  # fmt: skip
def test_a_plateau_is_a_mean_reward_that_no_longer_rises(values: list[float], ends: bool) -> None:
    assert (reason_to_end(PLATEAU, values) is not None) is ends


@pytest.mark.parametrize(
    ("values", "ends"),
    [
        ([0.9, 0.9], False),
        ([0.0, 0.25, 0.5], True),
        ([0.0, 0.25, 0.25], False),
        ([0.9, 0.9, 0.0, 0.0, 0.1], False),
    ],
)
def test_the_length_limit_binds_when_enough_responses_are_truncated(values: list[float], ends: bool) -> None:
    assert (reason_to_end(TRUNCATED, values) is not None) is ends


def test_no_window_ends_before_its_least_number_of_iterations() -> None:
    rule = PromoteConfig(on="reward_plateau", window=1, threshold=0.0, min_iterations=5)
    assert reason_to_end(rule, [0.5] * 4) is None
    assert reason_to_end(rule, [0.5] * 5) == "the mean reward of 1 iterations rose by 0, at most 0"


def test_a_window_that_ends_early_is_followed_by_the_first_iteration_of_the_next() -> None:
    seen = walk(stage(6, 5, promote=PLATEAU), rewards=[0.5] * 4 + [0.1 * i for i in range(20)])
    assert [planned for planned, _ in seen] == [0, 1, 2, 3, 6, 7, 8, 9, 10]
    (promotion,) = [one for _, one in seen if one is not None]
    assert str(promotion) == (
        "window 1 of 2 ends after 4 of 6 iterations: the mean reward of 2 iterations rose by 0, at most 0.125; "
        "the next one begins"
    )


def test_values_of_one_window_say_nothing_of_the_next() -> None:
    seen = walk(stage(6, 6, promote=PLATEAU), rewards=[0.5] * 12)
    # the second needs four iterations of its own
    assert [planned for planned, _ in seen] == [0, 1, 2, 3, 6, 7, 8, 9]
    assert seen[-1][1].ends_stage and "the stage is over" in str(seen[-1][1])


def test_a_stage_without_windows_ends_itself() -> None:
    seen = walk(stage(10, promote=TRUNCATED), rewards=[0.0] * 10, truncated=[0.0, 0.0, 0.25, 0.5, 0.5, 0.5])
    assert len(seen) == 4 and str(seen[-1][1]) == (
        "the stage ends after 4 of 10 iterations: 0.25 of the responses of 3 iterations were truncated, at least 0.25"
    )


def test_a_windows_own_rule_counts_and_one_without_any_lasts() -> None:
    seen = walk(stage(6, 4, 6, rules=[PLATEAU, None, TRUNCATED]), [0.5] * 20, truncated=[1.0] * 20)
    assert [planned for planned, _ in seen] == [0, 1, 2, 3, 6, 7, 8, 9, 10, 11, 12]


def test_without_a_rule_nothing_is_kept_or_told() -> None:
    one = stage(3, 3)
    assert observe({}, one, 0, {}) == ({}, None)
    assert promotion_metrics(one, {}, 0, None) == {}


def test_metrics_tell_the_window_of_the_iteration_and_whether_it_ended_early() -> None:
    one = stage(6, 5, promote=PLATEAU)
    assert promotion_metrics(one, {"skipped": 2, "values": []}, 4, None) == {
        "curriculum/window": 2.0, "curriculum/promoted": 0.0,
    }  # fmt: skip


@given(
    st.lists(st.floats(0, 1), min_size=30, max_size=30),
    st.integers(1, 4),
    st.floats(-0.1, 0.3),
    st.integers(1, 9),
)
def test_every_window_is_entered_in_order_and_lasts_as_long_as_it_must(
    rewards: list[float], window: int, threshold: float, least: int
) -> None:
    rule = PromoteConfig(on="reward_plateau", window=window, threshold=threshold, min_iterations=least)
    one = stage(10, 10, 10, promote=rule)
    seen = walk(one, rewards)
    numbers = [window_of(one, planned).number for planned, _ in seen]
    assert numbers == sorted(numbers) and set(numbers) == {0, 1, 2}
    for number in range(3):
        assert min(10, max(least, 2 * window)) <= numbers.count(number) <= 10
    # a pause after any iteration changes nothing: `walk` goes through JSON, this one does not
    pace: dict[str, Any] = {}
    for i, (planned, promotion) in enumerate(seen):
        assert planned == i + pace.get("skipped", 0)
        pace, again = observe(pace, one, i, {"reward/mean": rewards[i]})
        assert again == promotion


def test_steps_that_were_skipped_leave_no_gap_on_the_axis_of_steps() -> None:
    stages = (stage(10, promote=PLATEAU), stage(5))
    first = Progress().advanced(4, pace={"skipped": 6, "values": []})
    assert first.last_step(stages) == 4 and first.global_step(stages) == 4
    second = first.next_stage(1)
    assert (second.skipped, second.skipped_before, second.global_step(stages)) == (0, 6, 4)
    assert second.advanced(2).global_step(stages) == 6

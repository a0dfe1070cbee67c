"""The learning rate is a pure function of the step."""

from __future__ import annotations

import pytest

from megatron_rl.recipe.stages import OptimizerConfig, ScheduleConfig
from megatron_rl.train.optimizer import learning_rate

OPTIMIZER = OptimizerConfig(lr=8e-5)


def _rates(schedule: ScheduleConfig, total: int = 100) -> list[float]:
    return [learning_rate(s, total_steps=total, optimizer=OPTIMIZER, schedule=schedule) for s in range(total)]


@pytest.mark.parametrize("kind", ["constant", "cosine", "linear"])
def test_warm_up_rises_linearly_to_the_full_rate_on_its_last_step(kind: str) -> None:
    rates = _rates(ScheduleConfig(kind=kind, warmup_steps=10, min_lr=0.0))  # type: ignore[arg-type]
    assert rates[:10] == pytest.approx([8e-5 * (i + 1) / 10 for i in range(10)])


@pytest.mark.parametrize("kind", ["cosine", "linear"])
def test_decay_ends_exactly_at_the_minimum_on_the_last_step(kind: str) -> None:
    rates = _rates(ScheduleConfig(kind=kind, warmup_steps=10, min_lr=4e-5))  # type: ignore[arg-type]
    assert rates[10] == pytest.approx(8e-5)
    assert rates[-1] == pytest.approx(4e-5)
    assert rates[9:] == sorted(rates[9:], reverse=True)


def test_cosine_is_half_way_down_in_the_middle() -> None:
    rates = _rates(ScheduleConfig(kind="cosine", min_lr=4e-5), total=101)
    assert rates[50] == pytest.approx(6e-5)


def test_constant_without_warm_up_is_constant() -> None:
    assert set(_rates(ScheduleConfig())) == {8e-5}


@pytest.mark.parametrize("total", [1, 2])
def test_a_stage_of_one_or_two_steps_has_finite_rates(total: int) -> None:
    for rate in _rates(ScheduleConfig(kind="cosine", min_lr=1e-5), total=total):
        assert 0 < rate <= 8e-5

"""The entropy coefficient: fixed, and adapted towards a target."""

from __future__ import annotations

import json
import math

import pytest

from megatron_rl.algo.entropy import EntropyState
from megatron_rl.recipe.algorithm import EntropyConfig

ADAPTIVE = EntropyConfig(target=0.2, max_coefficient=0.003, delta=0.001)


def test_a_fixed_coefficient_stays_and_acts_at_any_entropy() -> None:
    fixed = EntropyConfig(coefficient=0.01)
    state = EntropyState.start(fixed, {})
    for entropy in (0.0, 5.0, 0.1):
        assert state.active_coefficient(fixed) == 0.01
        state = state.after_step(fixed, entropy)


def test_without_an_entropy_config_there_is_no_bonus() -> None:
    state = EntropyState.start(None, {})
    assert state.active_coefficient(None) == 0.0 and state.after_step(None, 1.0) == state


def test_an_adapted_coefficient_rises_below_the_target_falls_above_it_and_keeps_its_bounds() -> None:
    state = EntropyState.start(ADAPTIVE, {})
    seen = []
    for entropy in (0.1, 0.1, 0.1, 0.1, 0.3, 0.1, 0.3, 0.3, 0.3, 0.3, 0.3):
        state = state.after_step(ADAPTIVE, entropy)
        seen.append(state.coefficient)
    want = [0.001, 0.002, 0.003, 0.003, 0.002, 0.003, 0.002, 0.001, 0.0, 0.0, 0.0]
    assert seen == pytest.approx(want, abs=1e-15)


def test_the_bonus_acts_only_while_the_entropy_was_below_the_target() -> None:
    state = EntropyState(coefficient=0.002, measured=0.1)
    assert state.active_coefficient(ADAPTIVE) == 0.002
    above = state.after_step(ADAPTIVE, 0.25)
    assert above.coefficient == pytest.approx(0.001) and above.active_coefficient(ADAPTIVE) == 0.0
    below = above.after_step(ADAPTIVE, 0.15)
    assert below.active_coefficient(ADAPTIVE) == below.coefficient == pytest.approx(0.002)


def test_a_step_whose_entropy_means_nothing_leaves_the_coefficient() -> None:
    state = EntropyState(coefficient=0.002, measured=0.1)
    assert state.after_step(ADAPTIVE, None) == state.after_step(ADAPTIVE, math.nan) == state


def test_state_survives_a_checkpoint_to_the_last_bit() -> None:
    state = EntropyState.start(ADAPTIVE, {})
    for _ in range(3):
        again = EntropyState.start(ADAPTIVE, json.loads(json.dumps(state.to_dict())))
        assert again == state
        state = state.after_step(ADAPTIVE, 0.1 / 3)


def test_numbers_that_are_left_out_are_those_of_the_source() -> None:
    config = EntropyConfig(target=0.2)
    state = EntropyState.start(config, {}).after_step(config, 0.1)
    assert state.coefficient == 1e-4
    for _ in range(60):
        state = state.after_step(config, 0.1)
    assert state.coefficient == 0.005

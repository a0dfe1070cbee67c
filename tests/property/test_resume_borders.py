"""Wherever a stage is cut, between two epochs or two windows too, what follows is what would have followed."""

from __future__ import annotations

import json
from itertools import accumulate, chain

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.data.curriculum import CurriculumSampler
from megatron_rl.data.types import Prompt
from megatron_rl.recipe.stages import CurriculumWindow, OptimizerConfig, ScheduleConfig
from megatron_rl.train.optimizer import learning_rate

PROMPTS = [
    Prompt(id=f"p{i}", messages=[{"role": "user", "content": str(i)}], answer=i, difficulty=float(i % 4))
    for i in range(24)
]
_bands = st.tuples(st.integers(0, 3), st.integers(0, 3)).map(sorted)
_windows = st.lists(
    st.tuples(st.integers(1, 5), _bands).map(
        lambda pair: CurriculumWindow(iterations=pair[0], difficulty=(float(pair[1][0]), float(pair[1][1])))
    ),
    max_size=3,
)


def _ids(sampler, iterations, count):
    return [[prompt.id for prompt in sampler.take(i, count)] for i in iterations]


@settings(deadline=None, max_examples=40)
@given(_windows, st.integers(0, 9), st.integers(1, 6))
def test_a_sampler_restored_after_any_iteration_draws_the_same_prompts(windows, seed, count):
    # without windows 12 iterations of up to 6 go through the 24 prompts up to three times
    total = sum(window.iterations for window in windows) or 12
    straight = CurriculumSampler(PROMPTS, windows, seed)
    states, drawn = [], []
    for iteration in range(total):
        states.append(json.dumps(straight.state_dict()))
        drawn += _ids(straight, [iteration], count)
    for iteration, state in enumerate(states):
        resumed = CurriculumSampler(PROMPTS, windows, seed)
        resumed.load_state_dict(json.loads(state))
        assert _ids(resumed, range(iteration, total), count) == drawn[iteration:]


def test_a_sampler_restored_exactly_between_two_epochs_begins_the_second():
    straight = CurriculumSampler(PROMPTS, [], 1)
    first = _ids(straight, range(3), 8)
    state = straight.state_dict()
    assert [(c["epoch"], c["position"]) for c in state["cursors"]] == [(1, 0)]
    resumed = CurriculumSampler(PROMPTS, [], 1)
    resumed.load_state_dict(state)
    second = _ids(resumed, range(3, 6), 8)
    assert second == _ids(straight, range(3, 6), 8)
    assert sorted(chain(*first)) == sorted(chain(*second)) and first != second


@settings(deadline=None)
@given(
    st.sampled_from(["constant", "linear", "cosine"]),
    st.integers(1, 30),
    st.integers(1, 4),
    st.integers(0, 10),
)
def test_the_learning_rate_follows_optimizer_steps_however_many_an_iteration_takes(
    kind, iterations, updates, warmup
):
    """Some iterations take fewer updates than planned: the rate belongs to the steps taken, not to iterations."""
    optimizer = OptimizerConfig(lr=1e-3)
    schedule = ScheduleConfig(kind=kind, warmup_steps=warmup, min_lr=0.0 if kind == "constant" else 1e-5)
    total = iterations * updates

    def rates(first, count):
        steps = range(first, first + count)
        return [learning_rate(s, total_steps=total, optimizer=optimizer, schedule=schedule) for s in steps]

    taken = [(7 * iteration) % (updates + 1) for iteration in range(iterations)]
    straight = rates(0, sum(taken))
    for done in accumulate(taken, initial=0):
        assert rates(done, sum(taken) - done) == straight[done:]
    assert all(0 < rate <= 1e-3 for rate in straight)

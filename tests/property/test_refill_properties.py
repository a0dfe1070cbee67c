"""Dynamic sampling is bounded, takes groups in the order of drawing, and moves the cursor by what it drew."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.data.curriculum import CurriculumSampler
from megatron_rl.data.types import Prompt, RolloutGroup, Verdict
from megatron_rl.recipe.batch import DynamicSamplingConfig
from megatron_rl.recipe.stages import OptimizerConfig, RlStage, SamplingConfig
from megatron_rl.train.groups import Collected, collect_groups
from tests.helpers.rollouts import group

C, W = Verdict.CORRECT, Verdict.WRONG
PROMPTS = [Prompt(id=str(i), messages=[{"role": "user", "content": str(i)}], answer=i) for i in range(30)]


def stage(sampling: DynamicSamplingConfig, wanted: int) -> RlStage:
    return RlStage(
        kind="rl", prompts="p", rewards={"math_answer": 1.0}, iterations=1, prompts_per_iteration=wanted, group_size=2,
        sampling=SamplingConfig(max_response_tokens=8), optimizer=OptimizerConfig(lr=1e-3), dynamic_sampling=sampling,
    )  # fmt: skip


_stages = st.builds(
    lambda wanted, extra, rounds, refills: stage(
        DynamicSamplingConfig(
            kind="refill" if refills else "oversample", generate_prompts=wanted + extra, max_rounds=rounds
        ),
        wanted,
    ),
    st.integers(1, 8),
    st.integers(0, 8),
    st.integers(1, 5),
    st.booleans(),
)


@settings(deadline=None, max_examples=40)
@given(_stages, st.data())
def test_refilling_ends_as_soon_as_there_are_enough_and_at_its_bound(
    one: RlStage, data: st.DataObject
) -> None:
    sampling = one.dynamic_sampling
    assert sampling is not None
    useful: list[str] = []
    before: list[int] = []

    def generate() -> list[RolloutGroup]:
        number = len(before)
        before.append(len(useful))
        groups = []
        for i in range(sampling.generate_prompts):
            is_useful = data.draw(st.booleans())
            useful.extend([f"{number}.{i}"] * is_useful)
            groups.append(group(f"{number}.{i}", [C, W] if is_useful else [C, C]))
        return groups

    got = collect_groups(generate, one)
    most = sampling.max_rounds if sampling.kind == "refill" else 1
    assert 1 <= len(before) <= most
    # no round was begun with enough, and none was left out with too few
    assert all(count < one.prompts_per_iteration for count in before)
    assert len(before) == most or len(useful) >= one.prompts_per_iteration
    assert [each.prompt.id for each in got.kept] == useful[: one.prompts_per_iteration]
    assert got.num_cut == got.metrics["sampling/cut"] == max(0, len(useful) - one.prompts_per_iteration)
    assert len(got.groups) == len(before) * sampling.generate_prompts
    assert got.counts["short_iterations"] == (len(useful) < one.prompts_per_iteration)


def _iteration(sampler: CurriculumSampler, one: RlStage, iteration: int, solved: set[str]) -> Collected:
    sampling = one.dynamic_sampling
    assert sampling is not None
    return collect_groups(
        lambda: [
            group(prompt.id, [C, W] if prompt.id in solved else [W, W])
            for prompt in sampler.take(iteration, sampling.generate_prompts)
        ],
        one,
        pool_size=sampler.pool_size(iteration),
    )


@settings(deadline=None, max_examples=40)
@given(_stages, st.sets(st.sampled_from([prompt.id for prompt in PROMPTS])), st.integers(1, 6))
def test_a_cursor_moves_by_what_was_drawn_and_a_resumed_one_draws_the_same(
    one: RlStage, solved: set[str], iterations: int
) -> None:
    straight = CurriculumSampler(PROMPTS, [], 1)
    states, runs, drawn = [], [], 0
    for iteration in range(iterations):
        states.append(json.dumps(straight.state_dict()))
        runs.append(_iteration(straight, one, iteration, solved))
        drawn += len(runs[-1].groups)
        ids = [each.prompt.id for each in runs[-1].groups]
        # the advantages of a group are found by its prompt
        assert len(set(ids)) == len(ids)
    (cursor,) = straight.state_dict()["cursors"]
    assert cursor["epoch"] * len(PROMPTS) + cursor["position"] == drawn
    for iteration, state in enumerate(states):
        resumed = CurriculumSampler(PROMPTS, [], 1)
        resumed.load_state_dict(json.loads(state))
        again = [_iteration(resumed, one, i, solved) for i in range(iteration, iterations)]
        assert again == runs[iteration:]

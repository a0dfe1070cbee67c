"""Each iteration draws from its window, without replacement, and a resumed run draws the same."""

from __future__ import annotations

import json

import pytest

from megatron_rl.data.curriculum import CurriculumSampler, row_pass_rate
from megatron_rl.data.types import Prompt
from megatron_rl.errors import DataError, RecipeError
from megatron_rl.recipe.stages import CurriculumWindow

PROMPTS = [
    Prompt(id=f"p{i}", messages=[{"role": "user", "content": str(i)}], answer=i, difficulty=2.0 + i % 4)
    for i in range(40)
]
WINDOWS = [
    CurriculumWindow(iterations=2, difficulty=(2, 3)),
    CurriculumWindow(iterations=3, difficulty=(3, 5)),
]


def test_every_draw_lies_in_the_window_of_its_iteration():
    sampler = CurriculumSampler(PROMPTS, WINDOWS, 1)
    for iteration, window in enumerate([WINDOWS[0]] * 2 + [WINDOWS[1]] * 3):
        assert sampler.window(iteration) == window
        low, high = window.difficulty
        assert all(low <= prompt.difficulty <= high for prompt in sampler.take(iteration, 8))


def test_both_ends_of_a_window_belong_to_it():
    sampler = CurriculumSampler(PROMPTS, WINDOWS, 1)
    assert sampler.pool_size(0) == 20
    assert {prompt.difficulty for prompt in sampler.take(0, 20)} == {2.0, 3.0}


def test_without_windows_all_prompts_are_drawn_once_per_epoch():
    sampler = CurriculumSampler(PROMPTS, [], 1)
    drawn = [prompt.id for iteration in range(5) for prompt in sampler.take(iteration, 8)]
    assert sorted(drawn) == sorted(prompt.id for prompt in PROMPTS)
    assert sampler.window(0) is None


def test_order_depends_on_the_seed():
    first, second = (CurriculumSampler(PROMPTS, [], seed).take(0, 40) for seed in (1, 2))
    assert [p.id for p in first] != [p.id for p in second]


def test_restored_sampler_continues_where_the_saved_one_stood():
    sampler = CurriculumSampler(PROMPTS, WINDOWS, 1)
    for iteration in range(3):
        sampler.take(iteration, 8)
    saved = json.loads(json.dumps(sampler.state_dict()))
    restored = CurriculumSampler(PROMPTS, WINDOWS, 1)
    restored.load_state_dict(saved)
    assert [restored.take(i, 8) for i in (3, 4)] == [sampler.take(i, 8) for i in (3, 4)]


def test_state_of_other_data_is_refused():
    saved = CurriculumSampler(PROMPTS, WINDOWS, 1).state_dict()
    with pytest.raises(DataError, match="holds 10 prompts, but the saved cursor belongs to 20"):
        CurriculumSampler(PROMPTS[:20], WINDOWS, 1).load_state_dict(saved)
    with pytest.raises(DataError, match="has 1 windows, but the saved state has 2"):
        CurriculumSampler(PROMPTS, WINDOWS[:1], 1).load_state_dict(saved)


def test_window_without_prompts_is_an_error_that_lists_the_bands():
    window = CurriculumWindow(iterations=1, difficulty=(6, 9))
    with pytest.raises(
        DataError, match=r"no prompt lies in \[6, 9\]; the data has .*2: 10, 3: 10, 4: 10, 5: 10"
    ):
        CurriculumSampler(PROMPTS, [window], 1)


def test_prompts_without_difficulty_are_an_error_only_with_windows():
    plain = [Prompt(id="q", messages=[{"role": "user", "content": "1"}], answer=1)]
    assert len(CurriculumSampler(plain, [], 1).take(0, 1)) == 1
    with pytest.raises(DataError, match=r"1 of 41 prompts carry no difficulty \(first: q\)"):
        CurriculumSampler([*PROMPTS, *plain], WINDOWS, 1)


def test_windows_that_do_not_fill_the_stage_are_an_error_with_the_sum():
    with pytest.raises(RecipeError, match=r"2 \+ 3 = 5 iterations, but the stage has 6"):
        CurriculumSampler(PROMPTS, WINDOWS, 1, iterations=6)
    CurriculumSampler(PROMPTS, WINDOWS, 1, iterations=5)


def test_iteration_beyond_the_last_window_is_an_error():
    with pytest.raises(RecipeError, match="iteration 5 lies beyond"):
        CurriculumSampler(PROMPTS, WINDOWS, 1).take(5, 1)


def test_empty_pool_is_an_error():
    with pytest.raises(DataError, match="got 0 prompts"):
        CurriculumSampler([], [], 1)


def rated(count=8, **meta):
    return [
        Prompt(
            id=str(i),
            messages=[{"role": "user", "content": "1"}],
            answer=1,
            meta={**meta, "pass_rate": i / 8},
        )
        for i in range(count)
    ]


def test_a_window_of_pass_rates_draws_the_prompts_in_it():
    windows = [CurriculumWindow(iterations=1, pass_rate=(0.25, 0.5))]
    assert {prompt.id for prompt in CurriculumSampler(rated(), windows, 1).take(0, 3)} == {"2", "3", "4"}


def test_measured_pass_rates_count_instead_of_those_of_the_rows():
    windows = [CurriculumWindow(iterations=1, pass_rate=(0.9, 1.0))]
    sampler = CurriculumSampler(rated(), windows, 1, pass_rates={"0": 1.0, "5": 0.95, "6": 0.1})
    assert {prompt.id for prompt in sampler.take(0, 2)} == {"0", "5"}


@pytest.mark.parametrize(
    ("meta", "rate"),
    [
        ({"pass_rate": 0.5}, 0.5), ({"llama8b_solve_rate": 1}, 1.0), ({"pass_rate_72b_tir": "0.65625"}, 0.65625),
        ({"pass_rate_72b_tir": "n/a"}, None), ({"pass_rate": 12}, None), ({"pass_rate": True}, None), ({}, None),
    ],
)  # fmt: skip
def test_pass_rates_are_read_under_the_names_of_public_data_sets(meta, rate):
    assert row_pass_rate(Prompt(id="p", messages=[], answer=1, meta=meta)) == rate


def test_prompts_without_pass_rate_are_an_error_that_names_re_scoring():
    windows = [CurriculumWindow(iterations=1, pass_rate=(0.0, 1.0))]
    with pytest.raises(DataError, match=r"40 of 40 prompts carry no pass_rate .*set `rescore` to measure it"):
        CurriculumSampler(PROMPTS, windows, 1)

"""Curriculum windows in a report: where the recipe and early ends say that they begin."""

from megatron_rl.recipe.read_resolved import read_resolved
from megatron_rl.report.source import read_sources
from megatron_rl.report.windows import window_starts
from megatron_rl.train.records import RunRecords

RECIPE = """name: demo
stages:
  - kind: sft  # file
    steps: 5  # file
  - kind: rl  # file
    curriculum:
      - iterations: 2  # file
        difficulty: [2.0, 4.0]  # file
        pass_rate: null  # default
      - iterations: 3  # file
        difficulty: null  # default
        pass_rate: [0.1, 0.9]  # file
      - iterations: 2  # file
        difficulty: null  # default
        pass_rate: null  # default
"""
SETTINGS = read_resolved(RECIPE)


def lines(count, *, stage="rl", promoted=()):
    return [
        {"stage": stage, "iteration": i, "step": 5 + i, "curriculum/promoted": float(i in promoted)}
        for i in range(1, count + 1)
    ]


def test_windows_begin_where_the_plan_says():
    assert list(window_starts(SETTINGS, lines(7))) == [
        (8.0, "window 2: pass rate [0.1, 0.9]"),
        (11.0, "window 3: all prompts"),
    ]
    assert list(window_starts(SETTINGS, lines(2))) == []


def test_a_window_behind_an_early_end_is_not_marked_twice_and_the_next_one_comes_sooner():
    # the second window ends after one of its three iterations
    assert list(window_starts(SETTINGS, lines(5, promoted={3}))) == [(8.0, "window 2: pass rate [0.1, 0.9]")]
    assert list(window_starts(SETTINGS, lines(6, promoted={1}))) == [(10.0, "window 3: all prompts")]


def test_other_stages_and_recipes_without_windows_have_no_marks():
    assert list(window_starts(SETTINGS, lines(7, stage="sft"))) == []
    assert list(window_starts(read_resolved("stages:\n  - kind: rl\n    curriculum: []\n"), lines(7))) == []
    assert list(window_starts([], lines(7))) == []


def test_a_report_marks_them(tmp_path):
    records = RunRecords(tmp_path)
    records.write_recipe(RECIPE)
    for line in lines(3):
        records.log_step({"reward/mean": 0.5}, stage="rl", iteration=line["iteration"], step=line["step"])
    records.close()
    (source,) = read_sources([tmp_path])
    assert [(mark.kind, mark.step, mark.text) for mark in source.marks] == [
        ("window", 8.0, "window 2: pass rate [0.1, 0.9]")
    ]

"""How metrics merge, where time goes, and what an evaluation adds up to."""

import math

import pytest
import torch

from megatron_rl.algo.metric import Metric
from megatron_rl.errors import TrainingError
from megatron_rl.evaluation.result import EvalProblem, EvalResult, paired_bands
from megatron_rl.train.metrics import Meter, merge


class Clock:
    """Advances only when told."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_each_metric_merges_by_its_own_rule():
    parts = [
        [
            Metric(name="loss", value=1.0, reduce="sum"),
            Metric(name="entropy", value=2.0, reduce="mean", weight=30),
            Metric(name="gap", value=0.1, reduce="max"),
        ],
        [
            Metric(name="loss", value=torch.tensor(0.5), reduce="sum"),
            Metric(name="entropy", value=torch.tensor(4.0), reduce="mean", weight=torch.tensor(10)),
            Metric(name="gap", value=-0.3, reduce="max"),
        ],
    ]
    assert merge(parts) == {"loss": 1.5, "entropy": 2.5, "gap": 0.1}


def test_merging_does_not_depend_on_how_parts_are_cut():
    metrics = [Metric(name="x", value=float(n), reduce="mean", weight=n) for n in range(1, 9)]
    whole = merge([metrics])["x"]
    assert merge([metrics[:3], metrics[3:]])["x"] == pytest.approx(whole)
    assert merge([[metric] for metric in metrics])["x"] == pytest.approx(whole)


def test_a_part_with_weight_zero_does_not_count_whatever_its_value():
    empty = Metric(name="x", value=math.nan, reduce="mean", weight=0)
    assert merge([[empty], [Metric(name="x", value=3.0, reduce="mean", weight=2)]]) == {"x": 3.0}
    assert merge([[empty], [empty]]) == {}


@pytest.mark.parametrize("rule", ["sum", "mean", "max"])
def test_a_nan_is_never_hidden(rule):
    values = [1.0, math.nan, 2.0]
    merged = merge([[Metric(name="x", value=value, reduce=rule)] for value in values])
    assert math.isnan(merged["x"])


def test_one_name_with_two_rules_is_an_error():
    with pytest.raises(TrainingError, match="metric x: reduced by mean and by sum"):
        merge([[Metric(name="x", value=1.0, reduce="sum")], [Metric(name="x", value=1.0, reduce="mean")]])


def test_spans_and_the_rest_add_up_to_the_iteration():
    clock = Clock()
    meter = Meter(clock)
    with meter.span("generate"):
        clock.now += 3.0
    clock.now += 0.5
    for _ in range(2):
        with meter.span("train"):
            clock.now += 1.0
    assert meter.metrics(tokens=1100) == {
        "time/generate_s": 3.0,
        "time/train_s": 2.0,
        "time/other_s": 0.5,
        "time/iteration_s": 5.5,
        "throughput/tokens_per_s": 200.0,
    }


def test_a_span_inside_a_span_is_an_error():
    meter = Meter()
    message = "span 'reward' opened inside 'generate'"
    with meter.span("generate"), pytest.raises(TrainingError, match=message), meter.span("reward"):
        pass


def test_a_span_that_fails_is_still_timed_and_closed():
    clock = Clock()
    meter = Meter(clock)
    with pytest.raises(ZeroDivisionError), meter.span("train"):
        clock.now += 2.0
        raise ZeroDivisionError
    with meter.span("train"):
        clock.now += 1.0
    assert meter.metrics()["time/train_s"] == 3.0


def problem(name, num_correct, difficulty, *, num_samples=4):
    return EvalProblem(id=name, num_correct=num_correct, num_samples=num_samples, difficulty=difficulty)


def test_avg_at_k_is_the_mean_over_problems_and_its_error_is_over_problems():
    result = EvalResult(
        name="heldout",
        iteration=3,
        samples=4,
        problems=(problem("a", 4, 2), problem("b", 0, 2), problem("c", 2, 3)),
    )
    assert result.avg_at_k == pytest.approx(0.5)
    assert result.overall().stderr == pytest.approx(0.5 / math.sqrt(3))
    assert [(band.label, band.num_problems, band.avg_at_k) for band in result.bands()] == [
        ("2", 2, 0.5),
        ("3", 1, 0.5),
    ]
    assert result.metrics()["eval/heldout/avg_at_k"] == pytest.approx(0.5)


def test_many_difficulties_fall_into_few_bands_that_hold_every_problem_once():
    problems = (*(problem(str(n), n % 5, n / 10) for n in range(50)), problem("x", 1, None))
    bands = EvalResult(name="s", iteration=0, samples=4, problems=problems).bands(max_bands=4)
    assert [band.label for band in bands] == [
        "0 to 1.1",
        "1.2 to 2.4",
        "2.5 to 3.6",
        "3.7 to 4.9",
        "none given",
    ]
    assert sum(band.num_problems for band in bands) == 51


def test_bands_of_two_evaluations_pair_up():
    before = EvalResult(name="s", iteration=0, samples=4, problems=(problem("a", 1, 2), problem("b", 0, 3)))
    after = EvalResult(name="s", iteration=9, samples=4, problems=(problem("a", 4, 2), problem("b", 1, 3)))
    pairs = [(old.label, old.avg_at_k, new.avg_at_k) for old, new in paired_bands(before, after)]
    assert pairs == [("2", 0.25, 1.0), ("3", 0.0, 0.25), ("all", 0.125, 0.625)]


def test_an_evaluation_survives_its_json():
    result = EvalResult(name="s", iteration=7, samples=4, weight_version=9, problems=(problem("a", 1, None),))
    assert EvalResult.from_json(result.to_json()) == result


def test_an_evaluation_without_problems_has_no_average():
    assert math.isnan(EvalResult(name="s", iteration=0, samples=1, problems=()).avg_at_k)

"""Estimators of evaluations against what they stand for, counted out in full."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.errors import DataError
from megatron_rl.evaluation.statistics import consensus, estimate, pass_at_k, percentile


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_is_the_share_of_subsets_that_hold_a_right_sample(n):
    for correct in range(n + 1):
        samples = [True] * correct + [False] * (n - correct)
        for k in range(1, n + 1):
            subsets = list(combinations(samples, k))
            share = Fraction(sum(any(subset) for subset in subsets), len(subsets))
            assert pass_at_k(n, correct, k) == pytest.approx(float(share), abs=1e-12)


def test_pass_at_k_is_unbiased_where_the_plug_in_form_is_not():
    """Expectation over the number of right samples of n = 6, each right with p, against 1 - (1 - p)^k."""
    n, p, k = 6, 0.3, 4
    chances = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    expected = sum(chance * pass_at_k(n, c, k) for c, chance in enumerate(chances))
    plug_in = sum(chance * (1 - (1 - c / n) ** k) for c, chance in enumerate(chances))
    truth = 1 - (1 - p) ** k
    assert expected == pytest.approx(truth, abs=1e-12)
    assert plug_in < truth - 0.02


def test_pass_at_k_survives_counts_whose_binomials_do_not_fit_a_float():
    assert pass_at_k(100_000, 1, 50_000) == pytest.approx(0.5)
    assert pass_at_k(64, 0, 32) == 0.0


@pytest.mark.parametrize(("n", "correct", "k"), [(4, 1, 5), (4, 1, 0), (4, 5, 2), (4, -1, 2), (0, 0, 1)])
def test_pass_at_k_is_refused_where_it_is_not_defined(n, correct, k):
    with pytest.raises(DataError, match=f"pass@{k}: got|pass@{k}: {correct} right"):
        pass_at_k(n, correct, k)


@given(st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))))
def test_pass_at_one_is_the_share_of_right_samples_and_more_tries_never_hurt(counts):
    n, correct = counts
    values = [pass_at_k(n, correct, k) for k in range(1, n + 1)]
    assert values[0] == pytest.approx(correct / n)
    assert values == sorted(values)
    assert values[-1] == (correct > 0)
    assert all(0.0 <= value <= 1.0 for value in values)


def test_the_standard_error_is_clustered_by_problem():
    """Four samples of each problem that always agree are worth two problems, not eight draws."""
    found = estimate([1.0, 0.0])
    assert found.mean == 0.5
    assert found.stderr == pytest.approx(math.sqrt(0.5 / 2))
    naive = math.sqrt(0.5 * 0.5 / 8)
    assert found.stderr > 2 * naive


def test_the_standard_error_is_what_means_of_resampled_sets_spread_by():
    """All 4^4 sets of four problems drawn from four: their spread is that of the population form."""
    values = [0.0, 0.25, 0.25, 1.0]
    means = [(a + b + c + d) / 4 for a in values for b in values for c in values for d in values]
    centre = sum(means) / len(means)
    spread = math.sqrt(sum((mean - centre) ** 2 for mean in means) / len(means))
    assert estimate(values).stderr == pytest.approx(spread * math.sqrt(4 / 3))


def test_one_problem_has_no_standard_error_and_none_has_no_mean():
    assert estimate([0.5]).mean == 0.5
    assert math.isnan(estimate([0.5]).stderr)
    assert math.isnan(estimate([]).mean)


@pytest.mark.parametrize(
    ("sizes", "correct", "credit"),
    [
        ((3, 1), (True, False), 1.0),
        ((3, 1), (False, True), 0.0),
        ((2, 2), (True, False), 0.5),
        ((2, 2), (False, True), 0.5),
        ((2, 2, 2, 1), (False, True, False, True), 1 / 3),
        ((1, 1, 1), (False, False, False), 0.0),
        ((), (), 0.0),
    ],
)
def test_the_largest_class_wins_and_ties_split_the_credit(sizes, correct, credit):
    assert consensus(sizes, correct) == pytest.approx(credit)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 6), st.booleans()), min_size=1, max_size=6), st.randoms())
def test_a_vote_does_not_depend_on_the_order_of_its_classes(classes, random):
    shuffled = random.sample(classes, len(classes))
    before, after = (consensus(*map(tuple, zip(*each, strict=True))) for each in (classes, shuffled))
    assert before == pytest.approx(after)
    assert 0.0 <= before <= 1.0


@given(st.lists(st.integers(0, 50), min_size=1, max_size=40), st.floats(1, 100))
def test_a_percentile_is_a_value_that_exactly_so_many_do_not_exceed(values, percent):
    found = percentile(values, percent)
    assert found in values
    assert sum(value <= found for value in values) * 100 >= percent * len(values) * (1 - 1e-12)
    assert sum(value < found for value in values) * 100 < percent * len(values) * (1 + 1e-12)


def test_percentiles_of_few_values_by_hand():
    assert (percentile([30, 10, 20], 50), percentile([30, 10, 20], 95), percentile([1, 2, 3, 4], 50)) == (
        20,
        30,
        2,
    )
    assert math.isnan(percentile([], 50))

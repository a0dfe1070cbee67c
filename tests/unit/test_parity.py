"""The report of a comparison, and the arithmetic that tells one cause of a gap from another."""

import json
import math

import pytest
import torch

from megatron_rl.errors import ReshardError
from megatron_rl.reshard.diagnosis import (
    _ADVICE,
    Diagnosis,
    Fault,
    fit_temperature,
    fit_truncation,
    matching_version,
)
from megatron_rl.reshard.verify import Place, Probe, compare, max_gap

SCORED = Probe(token_ids=[5, 6, 7, 8])
SAMPLED = Probe(token_ids=[5, 6, 7, 8], start=2)
TRAINER = [[-1.0, -2.0, -0.5], [-3.0, -4.0]]


def test_report_has_mean_p99_max_and_the_place_of_the_largest_gap():
    engine = [[-1.0, -2.0, -0.5], [-3.0, -4.0002]]
    report = compare([[SCORED, SAMPLED]] * 2, [TRAINER] * 2, [TRAINER, engine])
    assert (report.mean, report.p99, report.max) == pytest.approx((2e-5, 2e-4, 2e-4), abs=1e-9)
    assert report.num_values == 10
    assert report.worst == Place(replica=1, probe=1, position=3, is_sampled=True)
    assert str(report.worst) == "sampled token 3 of probe 1, engine replica 1"
    assert json.loads(json.dumps(report.to_json()))["worst"]["replica"] == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_an_infinite_gap(bad):
    assert max_gap([-1.0, -2.0], [-1.0, bad]) == math.inf
    assert max_gap([bad, -2.0], [bad, -2.0]) == math.inf
    assert compare([[SCORED]], [[[-1.0, -2.0, bad]]], [[[-1.0, -2.0, -0.5]]]).worst.position == 3


def test_an_engine_that_says_too_little_is_refused():
    with pytest.raises(ReshardError, match="3 log-probs of the trainer, 1 of the engine"):
        compare([[SCORED]], [[[-1.0, -2.0, -0.5]]], [[[-1.0]]])
    with pytest.raises(ReshardError, match="nothing to compare"):
        compare([[]], [[]], [[]])


def test_the_version_that_an_engine_repeats_is_the_nearest_within_the_tolerance():
    history = {3: [[-1.0, -2.0]], 4: [[-1.00005, -2.0]], 5: [[-1.3, -2.0]]}
    assert matching_version(history, [[-1.00004, -2.0]], tolerance=1e-4) == (4, pytest.approx(1e-5, abs=1e-9))
    assert matching_version(history, [[-1.1, -2.0]], tolerance=1e-4) is None
    assert matching_version({}, [[-1.1, -2.0]], tolerance=1e-4) is None


def rows_and_labels(num_rows=12, vocab=97):
    generator = torch.Generator().manual_seed(0)
    rows = (2 * torch.randn(num_rows, vocab, generator=generator)).log_softmax(1)
    # tokens as a sampler picks them: among the likeliest
    return rows, rows.topk(3, dim=1).indices[torch.arange(num_rows), torch.arange(num_rows) % 3]


def picked(rows, labels):
    return rows.gather(1, labels[:, None])[:, 0]


@pytest.mark.parametrize("temperature", [0.13, 0.7, 1.0, 1.31, 8.0])
def test_the_temperature_that_explains_a_gap_is_found(temperature):
    rows, labels = rows_and_labels()
    engine = picked((rows / temperature).log_softmax(1), labels)
    found = fit_temperature(rows, labels, engine)
    assert found.factor == pytest.approx(temperature, rel=1e-5)
    assert found.largest < 1e-5


def truncated(rows, labels, *, top_k=None, top_p=None):
    """Log-probs over what top_k or top_p keeps, computed row by row as a sampler defines it."""
    result = []
    for row, label in zip(rows.double(), labels, strict=True):
        order = row.argsort(descending=True)
        mass = row[order].exp().cumsum(0)
        count = top_k if top_k is not None else int((mass < top_p).sum()) + 1
        assert label in order[:count]
        result.append(row[label] - mass[count - 1].log())
    return torch.stack(result)


def test_top_p_is_recognised_by_the_masses_that_it_keeps():
    rows, labels = rows_and_labels()
    found = fit_truncation(rows, labels, truncated(rows, labels, top_p=0.8))
    assert found.top_k is None
    assert found.largest < 1e-9
    low, high = found.top_p
    assert low < 0.8 <= high
    assert high - low < 0.05
    assert found.kept_mass[0] >= 0.8


def test_top_k_is_recognised_by_the_number_of_tokens_that_it_keeps():
    rows, labels = rows_and_labels()
    found = fit_truncation(rows, labels, truncated(rows, labels, top_k=7))
    assert (found.top_k, found.top_p) == (7, None)
    assert found.largest < 1e-9
    assert "that top_k = 7 keeps" in str(found)


def test_gaps_of_one_sign_alone_are_no_truncation():
    rows, labels = rows_and_labels()
    gaps = 0.05 + 0.3 * torch.rand(len(rows), generator=torch.Generator().manual_seed(1))
    assert fit_truncation(rows, labels, picked(rows, labels) + gaps).largest > 0.01
    assert fit_truncation(rows, labels, picked(rows, labels) - gaps).largest > 0.01


def test_a_token_outside_of_what_was_kept_is_no_truncation():
    rows, labels = rows_and_labels()
    engine = truncated(rows, labels, top_k=7)
    labels[0] = rows[0].argmin()
    engine[0] = rows[0].min() - rows[0].topk(7).values.logsumexp(0)
    found = fit_truncation(rows, labels, engine)
    assert found is None or found.largest > 0.01


@pytest.mark.parametrize("noise", [1e-6, 0.02], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("temperature", [0.5, 0.7, 1.5])
def test_temperature_and_truncation_are_told_apart_despite_rounding(noise, temperature):
    rows, labels = rows_and_labels()
    rounding = noise * torch.randn(len(rows), generator=torch.Generator().manual_seed(2))
    heated = picked((rows / temperature).log_softmax(1), labels) + rounding
    kept = truncated(rows, labels, top_p=0.8) + rounding
    for engine, is_heated in ((heated, True), (kept, False)):
        heat, truncation = fit_temperature(rows, labels, engine), fit_truncation(rows, labels, engine)
        assert (truncation is None or heat.rms < truncation.rms) == is_heated
        assert (heat.largest if is_heated else truncation.largest) < 4 * noise


@pytest.mark.parametrize("fault", Fault, ids=lambda fault: fault.value)
def test_every_fault_says_what_to_do(fault):
    text = str(Diagnosis(fault=fault, evidence="seen"))
    assert text == f"{fault.value}: seen; {_ADVICE[fault]}"

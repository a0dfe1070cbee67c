"""Weights against the mismatch of trainer and engine: each kind by hand, masks, extremes, sums over ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_rl.algo.correction import (
    MismatchSums,
    add_sums,
    correction_metrics,
    correction_weights,
    mean_kept_weight,
    mismatch_sums,
)
from megatron_rl.recipe.algorithm import CorrectionConfig

# two sequences, of four and three labels; the first label of each is a prompt's
MASK = torch.tensor([False, True, True, True, False, True, True])
BOUNDS = torch.tensor([0, 4, 7], dtype=torch.int32)
RHO = torch.tensor([math.nan, 0.25, 1.0, 6.0, math.inf, 1.5, 0.8])
FIRST, SECOND = 0.25 * 1.0 * 6.0, 1.5 * 0.8
K2 = [(math.log(0.25) ** 2 + math.log(6) ** 2) / 6, (math.log(1.5) ** 2 + math.log(0.8) ** 2) / 4]
K3 = [(0.25 + 1 + 6 - 3 - math.log(1.5)) / 3, (1.5 + 0.8 - 2 - math.log(1.2)) / 2]


def _weights(rho: Tensor = RHO, **options: Any) -> list[float]:
    rollout = torch.linspace(-3, -1, len(rho))
    return correction_weights(
        CorrectionConfig(**options), rollout + rho.log(), rollout, loss_mask=MASK, cu_seqlens=BOUNDS
    ).tolist()


@pytest.mark.parametrize(
    ("options", "first", "second"),
    [
        ({"kind": "none"}, [1, 1, 1], [1, 1]),
        ({"kind": "token_tis"}, [0.25, 1, 2], [1.5, 0.8]),
        ({"kind": "token_tis", "high": 5.0}, [0.25, 1, 5], [1.5, 0.8]),
        ({"kind": "sequence_tis"}, [FIRST] * 3, [SECOND] * 2),
        ({"kind": "sequence_tis", "high": 1.3}, [1.3] * 3, [SECOND] * 2),
        ({"kind": "cis"}, [0.5, 1, 2], [1.5, 0.8]),
        ({"kind": "icepop"}, [0, 1, 0], [1.5, 0.8]),
        ({"kind": "icepop", "low": 0.0, "high": 5.0}, [0.25, 1, 0], [1.5, 0.8]),
        ({"kind": "sequence_mask"}, [FIRST] * 3, [SECOND] * 2),
        ({"kind": "sequence_mask", "high": 1.4}, [0, 0, 0], [SECOND] * 2),
        # geometric means 1.5 ** (1 / 3) = 1.145, 1.2 ** (1 / 2) = 1.095
        ({"kind": "geometric_mask"}, [0, 0, 0], [0, 0]),
        ({"kind": "geometric_mask", "high": 1.1}, [0, 0, 0], [1.5, 0.8]),
        ({"kind": "geometric_mask", "high": 1.2}, [0.25, 1, 6], [1.5, 0.8]),
        ({"kind": "k2_mask", "high": K2[0] + 0.01}, [0.25, 1, 6], [1.5, 0.8]),
        ({"kind": "k2_mask", "high": K2[1] + 0.01}, [0, 0, 0], [1.5, 0.8]),
        ({"kind": "k2_mask", "high": K2[1] - 0.01}, [0, 0, 0], [0, 0]),
        ({"kind": "k3_mask", "high": K3[0] + 0.01}, [0.25, 1, 6], [1.5, 0.8]),
        ({"kind": "k3_mask", "high": K3[1] + 0.01}, [0, 0, 0], [1.5, 0.8]),
        ({"kind": "k3_mask", "high": K3[1] - 0.01}, [0, 0, 0], [0, 0]),
        ({"kind": "token_tis", "veto": 0.3}, [0, 0, 0], [1.5, 0.8]),
        ({"kind": "token_tis", "veto": 0.2}, [0.25, 1, 2], [1.5, 0.8]),
    ],
    ids=str,
)
def test_each_kind_weighs_tokens_as_it_is_defined(
    options: dict[str, Any], first: list[float], second: list[float]
) -> None:
    """What is masked holds NaN and inf, and weighs nothing."""
    assert _weights(**options) == pytest.approx([0, *first, 0, *second], abs=1e-5)


@pytest.mark.parametrize("gap", [-1e4, 1e4, -math.inf, math.inf])
@pytest.mark.parametrize(
    "kind", ["token_tis", "sequence_tis", "icepop", "sequence_mask", "geometric_mask", "k3_mask"]
)
def test_log_ratios_are_cut_before_they_overflow(kind: Any, gap: float) -> None:
    old = torch.tensor([0.0, gap, 0.0, gap, 0.0, -1.0, -1.0])
    rollout = torch.tensor([0.0, -1.0, -1.0, -1.0, 0.0, -1.0, -1.0])
    weights = correction_weights(CorrectionConfig(kind=kind), old, rollout, loss_mask=MASK, cu_seqlens=BOUNDS)
    assert torch.isfinite(weights).all() and weights[5:].tolist() == [1.0, 1.0]


def test_equal_policies_weigh_one_by_every_kind() -> None:
    for kind in (
        "token_tis",
        "sequence_tis",
        "cis",
        "icepop",
        "sequence_mask",
        "geometric_mask",
        "k2_mask",
        "k3_mask",
    ):
        assert _weights(torch.ones(7), kind=kind, veto=0.5) == [0, 1, 1, 1, 0, 1, 1]


def test_sums_say_what_was_kept_and_do_not_depend_on_the_cut_into_parts() -> None:
    weights = torch.tensor([9.0, 0.0, 1.0, 3.0, 9.0, 0.0, 2.0])
    old = torch.tensor([0.0, -1.0, -1.0, -1.0, 0.0, -1.0, -2.0])
    rollout = torch.full((7,), -1.0)
    whole = mismatch_sums(weights, old, rollout, MASK)
    parts = [mismatch_sums(weights[s], old[s], rollout[s], MASK[s]) for s in (slice(0, 4), slice(4, 7))]
    assert whole == add_sums(parts)
    values = {metric.name: metric.value for metric in correction_metrics(whole)}
    assert values == pytest.approx(
        {
            "mismatch/k3": math.exp(-1) / 5,
            "mismatch/kept_frac": 3 / 5,
            "mismatch/weight_mean": 6 / 5,
            "mismatch/weight_max": 3.0,
            "mismatch/ess_frac": 36 / (5 * 14),
        }
    )
    assert mean_kept_weight(whole) == 2.0


def test_nothing_trained_or_nothing_kept_has_no_mean_to_divide_by() -> None:
    assert correction_metrics(add_sums([])) == []
    assert mean_kept_weight(MismatchSums(tokens=4.0)) == 1.0
    assert {m.name: m.value for m in correction_metrics(MismatchSums(tokens=4.0))}["mismatch/ess_frac"] == 0.0

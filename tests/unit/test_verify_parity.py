"""Which log-probs count as the same, and how the worst of them is shown."""

from __future__ import annotations

import math
from typing import Any

import pytest

from megatron_rl.verify.parity import parity_faults, report
from megatron_rl.verify.table import PROVEN, REFUTED


def row(one: str, other: str, largest: float) -> dict[str, Any]:
    worst = {"replica": 0, "probe": 0, "position": 2, "is_sampled": False}
    return {
        "one": one,
        "other": other,
        "mean": 1e-7,
        "p99": 1e-6,
        "max": largest,
        "num_values": 9,
        "worst": worst,
    }


def result(*largest: float, moved: float = 0.1) -> dict[str, Any]:
    pairs = [("trainer", "transformers"), ("trainer", "engine"), ("engine", "transformers")]
    rows = [row(*pair, value) for pair, value in zip(pairs, largest, strict=False)]
    return {
        "rows": rows, "bound": 3e-4, "moved": moved, "tokens": 9, "prompts": 1, "texts": [["a", "b", "c"]],
    }  # fmt: skip


def test_gaps_within_the_bound_are_proven(capsys: pytest.CaptureFixture[str]) -> None:
    assert report(result(1e-5, 1e-5, 1e-5), dtype="float32") == PROVEN
    shown = capsys.readouterr().out
    assert (
        "trainer - engine" in shown
        and "prompt 0, token 2 ('c')" in shown
        and "verdict: proven: 3 pairs" in shown
    )


@pytest.mark.parametrize("gap", [1e-3, math.inf, math.nan])
def test_a_gap_over_the_bound_is_refuted_with_its_pair_and_place(gap: float, capsys) -> None:
    assert report(result(1e-5, gap, 1e-5), dtype="float32") == REFUTED
    assert "trainer and engine differ by" in capsys.readouterr().out


def test_weights_that_did_not_move_prove_no_transfer() -> None:
    assert "old weights would not be noticed" in parity_faults(result(0.0, 0.0, 0.0, moved=1e-5))[0]
    # without an engine there is no transfer
    assert parity_faults(result(0.0, moved=1e-5)) == []

"""Layouts on the command line, and what counts as the same gradient."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace

import pytest

from megatron_rl import cli
from megatron_rl.errors import LayoutError
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.verify.layout import report
from megatron_rl.verify.layouts import (
    Measurement,
    TensorGap,
    is_override,
    layout_config,
    layout_text,
    parse_layout,
)
from megatron_rl.verify.table import PROVEN, REFUTED
from tests.helpers.proofs import write_proof

REFERENCE = Measurement(part="sft", layout="1 process", loss=2.0, grad_norm=3.0)
GAPS = tuple(TensorGap(name=f"w{n}", difference=1e-7, scale=1.0, rank=0) for n in range(12))
SOUND = Measurement(part="sft", layout="tp=2", loss=2.0 + 1e-7, grad_norm=3.0, gaps=GAPS)


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ("tp=2", ParallelLayout(tp=2)),
        ("tp=2,pp=2,sp", ParallelLayout(tp=2, pp=2, sp=True)),
        ("dp=2,ep=2", ParallelLayout(dp=2, ep=2)),
        ("pp=2,vpp=2", ParallelLayout(pp=2, vpp=2)),
        ("pp=2,first_stage_layers=1", ParallelLayout(pp=2, first_stage_layers=1)),
    ],
)
def test_a_layout_reads_as_it_is_written(text: str, layout: ParallelLayout) -> None:
    assert parse_layout(text) == layout
    assert layout_text(layout) == ",".join(sorted(text.split(","), key=layout_text(layout).index))
    assert layout_config(layout).tp == layout.tp


@pytest.mark.parametrize("text", ["tq=2", "tp=x", "tp", "sp=2", "tp=0", "sp", "tp=2,", "vpp=2"])
def test_a_layout_that_does_not_exist_is_an_error_that_says_so(text: str) -> None:
    with pytest.raises(LayoutError):
        parse_layout(text)


def test_overrides_behind_the_layouts_are_told_from_them() -> None:
    assert is_override("run.seed=3") and is_override("name=x") and is_override("layout={tp: 2}")
    # a mistyped degree is told of as one
    assert not is_override("tp=2,sp") and not is_override("tq=2")


def test_a_gap_within_rounding_is_no_fault() -> None:
    assert SOUND.faults(REFERENCE) == []


@pytest.mark.parametrize("gap", [2e-4, math.inf, math.nan])
def test_a_gap_over_the_bound_or_without_a_value_is_a_fault_with_the_name_of_the_tensor(gap: float) -> None:
    wrong = replace(GAPS[3], difference=gap, rank=1)
    (fault,) = replace(SOUND, gaps=(*GAPS[:3], wrong, *GAPS[4:])).faults(REFERENCE)
    assert "1 of 12 gradient tensors differ: w3 (" in fault and "rank 1" in fault


def test_eight_names_are_shown_and_the_rest_counted() -> None:
    gaps = tuple(replace(gap, difference=0.5) for gap in GAPS)
    (fault,) = replace(SOUND, gaps=gaps).faults(REFERENCE)
    assert "12 of 12" in fault and "w7" in fault and "w8" not in fault and "and 4 more" in fault


def test_a_tensor_without_gradient_in_the_reference_must_have_none() -> None:
    assert not TensorGap(name="w", difference=0.0, scale=0.0, rank=0).is_over
    assert TensorGap(name="w", difference=1e-9, scale=0.0, rank=0).is_over


@pytest.mark.parametrize(
    "change", [{"loss": 2.1}, {"loss": math.nan}, {"grad_norm": 3.1}, {"unequal": ("w1",)}]
)
def test_loss_norm_and_replicas_are_compared_too(change: dict[str, object]) -> None:
    assert len(replace(SOUND, **change).faults(REFERENCE)) == 1


def test_the_report_gives_exit_code_and_json(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "layout.json"
    assert report([REFERENCE], [SOUND], json_file=file) == PROVEN
    shown = capsys.readouterr().out
    assert "tp=2" in shown and "0 of 12" in shown and "verdict: proven: 1 layouts" in shown
    data = json.loads(file.read_text())
    assert data["proven"] and Measurement.from_json(data["layouts"][0]) == SOUND
    assert report([REFERENCE], [SOUND, replace(SOUND, layout="dp=2", loss=5.0)]) == REFUTED
    assert "verdict: refuted\n  dp=2, sft: the loss is 5, not 2" in capsys.readouterr().out


def test_measurements_survive_json() -> None:
    one = replace(SOUND, unequal=("w1",), shares=(0.25, 0.5))
    assert Measurement.from_json(json.loads(json.dumps(asdict(one)))) == one


def test_options_stand_anywhere_and_overrides_reach_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr("megatron_rl.verify.layout.verify_layout", lambda args: seen.append(args) or 0)
    assert (
        cli.main(["verify", "layout", "r.yaml", "run.seed=2", "--shrink", "--layouts", "tp=2", "name=x"]) == 0
    )
    assert seen[0].layouts == ["tp=2"] and seen[0].overrides == ["run.seed=2", "name=x"] and seen[0].shrink


def test_a_recipe_that_is_not_there_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    for proof in ("layout", "resume", "parity"):
        assert cli.main(["verify", proof, "nowhere.yaml"]) == 2
        assert "nowhere.yaml: no such recipe file" in capsys.readouterr().err


def test_a_loss_that_depends_on_the_layout_by_definition_is_not_put_to_the_proof(
    tmp_path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = write_proof(tmp_path)
    own = ["stages.1.algorithm.aggregate=token_mean", "stages.1.algorithm.normaliser=micro_batch"]
    assert cli.main(["verify", "layout", str(recipe), *own, "--layouts", "dp=2"]) == 2
    assert "stages.1.algorithm.normaliser: got micro_batch, whose loss depends" in capsys.readouterr().err

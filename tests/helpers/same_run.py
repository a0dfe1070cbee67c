"""Whether two run directories tell of one and the same run: all but wall time is equal, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.helpers.quickstart import lines

# wall time and memory are all that may differ
_MACHINE = ("time/", "memory/")
_CLOCK = (
    "time_s",
    "sync/transfer_s",
    "sync/parity_s",
    "throughput/tokens_per_s",
    "overlap/generate_s",
    "overlap/reward_s",
    "overlap/hidden_s",
    "engine/imbalance",
)


def without_clock(line: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in line.items() if key not in _CLOCK and not key.startswith(_MACHINE)}


def assert_same_metrics(want: Path, got: Path) -> None:
    """Each step once, with the same numbers; the same evaluations."""
    steps = lines(got)
    assert [line["step"] for line in steps] == list(range(1, len(lines(want)) + 1))
    for a, b in zip(lines(want), steps, strict=True):
        assert without_clock(b) == without_clock(a)
    if (want / "eval.jsonl").exists():
        assert lines(got, "eval.jsonl") == lines(want, "eval.jsonl")


def assert_same_board(want: Path, got: Path) -> None:
    """Every curve of TensorBoard has each step once, with the same value."""
    curves = [curves_of(run_dir) for run_dir in (want, got)]
    assert curves[1] == curves[0]
    for name, points in curves[1].items():
        assert len({step for step, _ in points}) == len(points) > 0, name


def curves_of(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    board = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0})
    board.Reload()
    tags = [tag for tag in board.Tags()["scalars"] if not tag.startswith(_MACHINE) and tag not in _CLOCK]
    return {tag: [(event.step, event.value) for event in board.Scalars(tag)] for tag in tags}


def assert_same_rollouts(want: Path, got: Path, *, same_layout: bool = True) -> None:
    """Every file of rollouts; in another layout without the trainer's log-probs, whose last bits differ there."""
    names = sorted(path.name for path in (want / "rollouts").iterdir())
    assert sorted(path.name for path in (got / "rollouts").iterdir()) == names
    for name in names:
        if not same_layout and name.startswith("tokens_"):
            continue
        assert (got / "rollouts" / name).read_bytes() == (want / "rollouts" / name).read_bytes(), name


def assert_same_transfers(want: Path, got: Path) -> None:
    """Each weight transfer is recorded once, with the same parity, though a resume sends the checkpoint's again."""
    records = [json.loads((run_dir / "parity.json").read_text()) for run_dir in (want, got)]
    for of_run in records:
        for record in of_run:
            assert record.pop("seconds") > 0 and record.pop("parity_seconds") > 0
            assert record["max"] <= record["bound"]
    assert records[1] == records[0]


def assert_same_model(want: Path, got: Path) -> None:
    """The exported model, byte for byte."""
    name = "model/model.safetensors"
    assert (got / name).read_bytes() == (want / name).read_bytes()

"""tools/bench_loop.py: what it makes of measurements, what both sides are given, and what it refuses."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from megatron_rl.data.chat import render_conversation
from megatron_rl.data.tokenizer import load_tokenizer
from megatron_rl.errors import TrainingError
from megatron_rl.recipe.load import load_recipe
from megatron_rl.recipe.stages import RlStage
from tests.helpers.source import ROOT


@pytest.fixture(scope="module")
def tool() -> Iterator[ModuleType]:
    """It imports its neighbours, as a script does."""
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import bench_loop

        yield bench_loop
    finally:
        sys.path.remove(str(ROOT / "tools"))


def line(time_s: float, **phases: float) -> dict[str, float]:
    return {"time_s": time_s, "rollouts": 256, **{f"time/{name}_s": value for name, value in phases.items()}}


def test_the_first_step_warms_up_and_what_no_phase_holds_is_counted(tool: ModuleType) -> None:
    import bench_loop_figures as figures

    lines = [
        line(30.0, generate=20.0),
        line(34.0, generate=2.0, train=1.5),
        line(38.0, generate=3.0, train=0.9),
    ]
    steps = figures.steps_of(lines, [20.0, 26.0, 32.0], work="rollouts")
    assert steps.seconds == [4.0, 4.0]
    assert steps.cpu_seconds == [6.0, 6.0]
    assert steps.rate == 64.0
    assert steps.cpu_rate == pytest.approx(512 / 12)
    assert figures.other_frac(steps) == pytest.approx(0.6 / 8)


def test_a_report_has_the_ratio_of_rounds_and_both_histograms(tool: ModuleType) -> None:
    import bench_loop_figures as figures

    ours = figures.Steps(
        seconds=[2.0],
        cpu_seconds=[2.0],
        work=[256.0],
        lengths=[*range(1, 101)],
        phases=[{n: 0.325 for n in figures.PHASES}],
    )
    theirs = figures.peer_steps(
        [{"seconds": 9.0, "cpu_seconds": 9.0, "lengths": [1]}]
        + [{"seconds": 1.0, "cpu_seconds": 2.0, "lengths": [64] * 128}] * 2
    )
    text = figures.report(
        figures.CASES["short"],
        {"ratios": [1.0, 1.5, 1.2], "cpu_ratios": [2.0], "ours": ours, "theirs": theirs},
    )
    assert "ours 128.0, peer 128.0; ratio 1.20 (1.00 to 1.50), aim 1.3" in text
    assert "per CPU second 128.0 and 64.0" in text
    assert "outside of them 2.5 %" in text
    assert "mean 50.5, p10 11, p50 51, p90 91, p99 100, longest 100, at the limit 37.0 %" in text
    assert "mean 64.0, p10 64, p50 64, p90 64, p99 64, longest 64, at the limit 100.0 %" in text


def test_the_exponent_of_a_cost_is_that_of_its_power_law(tool: ModuleType) -> None:
    import bench_loop_figures as figures

    work = [1000.0, 2000.0, 4000.0, 8000.0]
    assert figures.exponent(work, [0.2 * w for w in work]) == pytest.approx(1.0)
    assert figures.exponent(work, [w**1.5 for w in work]) == pytest.approx(1.5)


def test_both_stages_pass_the_check_of_recipes(tool: ModuleType, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    bench = tool.Bench(tmp_path, tmp_path / "python")
    cases = tool.CASES
    stages = [
        tool.rl_stage(cases["short"]),
        tool.rl_stage(cases["long"], replicas=2, overlap="one_step"),
        tool.sft_stage(cases["sft"], 2),
    ]
    for number, stage in enumerate(stages):
        recipe = {
            "name": "bench",
            "model": {"hf_path": str(tmp_path / "model"), "dtype": "float32"},
            "stages": [stage],
        }
        path = tmp_path / f"{number}.yaml"
        path.write_text(json.dumps(recipe))
        loaded = load_recipe(path).recipe.stages[0]
        if isinstance(loaded, RlStage):
            # the peer has no pass for old log-probs either where an iteration has one step
            assert loaded.prompts_per_iteration * loaded.group_size == 256
            assert loaded.updates_per_rollout == 1
    assert bench.num_parameters == 755_840
    # what the peer is given to train on is what our SFT trains on
    tokenizer = load_tokenizer(tmp_path / "model")
    for messages in tool.log_normal_conversations(3):
        ids, is_trained = render_conversation(tokenizer, messages)
        given = tool.tokens_of(messages)
        assert given["ids"] == ids
        assert given["labels"] == [i if trained else -100 for i, trained in zip(ids, is_trained, strict=True)]


def test_a_peer_that_has_no_trl_is_refused_with_advice(tool: ModuleType, tmp_path, capsys) -> None:
    with pytest.raises(TrainingError, match=r"--trl-python: .*nowhere cannot be run .*--help"):
        tool.check_peer(tmp_path / "nowhere")
    assert tool.main(["--trl-python", str(tmp_path / "nowhere")]) == 2
    assert "error: --trl-python" in capsys.readouterr().err
    bare = tmp_path / "bare"
    bare.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'trl'\" >&2\nexit 1\n")
    bare.chmod(0o755)
    with pytest.raises(
        TrainingError, match="cannot import trl \\(ModuleNotFoundError: No module named 'trl'\\)"
    ):
        tool.check_peer(bare)
    with pytest.raises(SystemExit):
        tool.main(["--trl-python", "python", "--micro-batch", "3"])

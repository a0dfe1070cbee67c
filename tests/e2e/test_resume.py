"""A run that was killed and resumed is the run that was not: bit for bit, through the real command line."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_rl.train.phases import PHASES, read_phase
from tests.helpers.checkpoints import load_tool
from tests.helpers.distributed import free_port
from tests.helpers.processes import assert_nothing_is_left, ended, processes_of, wait_for
from tests.helpers.quickstart import ROOT, lines, start, train

SFT_STEPS, ITERATIONS = 12, 8
GOLDEN = ROOT / "tests" / "golden" / "recipe.yaml"
KILLED_AFTER = SFT_STEPS + 3  # one iteration beyond a checkpoint
# wall time is all that may differ
_CLOCK = ("time_s", "sync/transfer_s", "sync/parity_s", "throughput/tokens_per_s")
ENGINE = "megatron_rl.rollout.vllm_worker"


@pytest.fixture(scope="module")
def straight(place: Path, beginner: Path) -> Path:
    """The run directory of the run that nothing happened to."""
    run_dir = place / "runs" / "straight"
    done = train(place, run_dir, f"model.hf_path={beginner}", recipe=GOLDEN)
    assert done.returncode == 0, done.stderr[-3000:]
    return run_dir


@pytest.fixture(scope="module")
def resumed(place: Path, beginner: Path) -> Path:
    """The same run, killed with all its processes in the middle of RL, then continued."""
    run_dir, model = place / "runs" / "resumed", f"model.hf_path={beginner}"
    process = start(place, run_dir, model, recipe=GOLDEN)
    try:
        wait_for(lambda: process.poll() is not None or num_steps(run_dir) >= KILLED_AFTER, "the third iteration")
        os.killpg(process.pid, signal.SIGKILL)
    finally:
        code, _, errors = ended(process)
    assert code == -signal.SIGKILL, errors[-3000:]
    assert (run_dir / "rollouts" / "iter_000003.jsonl").exists()
    done = train(place, run_dir, model, "--resume", recipe=GOLDEN)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "resuming from" in done.stdout and "stage_1_step_000002" in done.stdout
    return run_dir


def num_steps(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def without_clock(line: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in line.items() if key not in _CLOCK and not key.startswith("time/")}


@pytest.mark.timeout(900)
def test_the_weights_change_and_rewards_differ_in_every_iteration(straight: Path) -> None:
    rl = lines(straight)[SFT_STEPS:]
    assert all(line["policy/updates"] == 2 and line["policy/grad_norm"] > 0 for line in rl)
    assert all(line["reward/std"] > 0 for line in rl)


@pytest.mark.timeout(900)
def test_the_run_is_the_golden_trajectory(straight: Path, beginner: Path) -> None:
    """Bit for bit on the processor that it was kept on, else within tolerances; the tool tells how to keep another."""
    tool = load_tool("golden_trajectory")
    got = tool.trajectory(straight, start=beginner)
    assert list(tool.differences(json.loads(tool.TRAJECTORY.read_text()), got)) == []


@pytest.mark.timeout(900)
def test_a_killed_and_resumed_run_measures_bit_for_bit_what_it_would_have(straight: Path, resumed: Path) -> None:
    want, got = lines(straight), lines(resumed)
    assert [line["step"] for line in got] == list(range(1, SFT_STEPS + ITERATIONS + 1))
    for a, b in zip(want, got, strict=True):
        assert without_clock(b) == without_clock(a)


@pytest.mark.timeout(900)
def test_parity_of_each_transfer_is_recorded_once(straight: Path, resumed: Path) -> None:
    records = [json.loads((run_dir / "parity.json").read_text()) for run_dir in (straight, resumed)]
    for of_run in records:
        for record in of_run:
            assert record.pop("seconds") > 0 and record.pop("parity_seconds") > 0
            assert record["max"] <= record["bound"]
    # the checkpoint's weights went to two engines
    assert [record["iteration"] for record in records[1]] == list(range(ITERATIONS + 1))
    assert records[1] == records[0]


@pytest.mark.timeout(900)
def test_a_killed_and_resumed_run_draws_the_same_prompts_and_samples(straight: Path, resumed: Path) -> None:
    names = [f"iter_{number:06d}.jsonl" for number in range(1, ITERATIONS + 1)]
    for run_dir in (straight, resumed):
        assert sorted(path.name for path in (run_dir / "rollouts").iterdir()) == names
    for name in names:
        assert (resumed / "rollouts" / name).read_bytes() == (straight / "rollouts" / name).read_bytes()


@pytest.mark.timeout(900)
def test_a_killed_and_resumed_run_ends_with_the_same_model(straight: Path, resumed: Path) -> None:
    for run_dir in (straight, resumed):
        assert_nothing_is_left(run_dir)
    name = "model/model.safetensors"
    assert (resumed / name).read_bytes() == (straight / name).read_bytes()


@pytest.mark.timeout(900)
def test_tensorboard_holds_each_step_once_after_a_resume(straight: Path, resumed: Path) -> None:
    for tag in ("reward/mean", "sft/loss", "optim/lr"):
        curves = []
        for run_dir in (straight, resumed):
            board = EventAccumulator(str(run_dir / "tensorboard"))
            board.Reload()
            curves.append([(event.step, event.value) for event in board.Scalars(tag)])
        assert curves[0] == curves[1]
        assert len({step for step, _ in curves[1]}) == len(curves[1]) > 0


@pytest.mark.timeout(900)
def test_resuming_a_finished_run_changes_nothing_but_the_report(place: Path, beginner: Path, resumed: Path) -> None:
    before = contents(resumed)
    done = train(place, resumed, f"model.hf_path={beginner}", "--resume", recipe=GOLDEN)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "nothing is left to train" in done.stdout
    assert "report.html" in done.stdout
    assert contents(resumed) == before


def contents(run_dir: Path) -> dict[str, bytes]:
    """Every file but the reports and the logs, which tell of each start."""
    files = (path for path in run_dir.rglob("*") if path.is_file())
    named = {path.relative_to(run_dir).as_posix(): path for path in files}
    return {
        name: path.read_bytes()
        for name, path in named.items()
        if name not in ("report.html", "load.json") and not name.startswith("logs/")
    }


@pytest.mark.timeout(900)
def test_a_run_whose_engine_is_killed_and_then_stopped_is_the_run_that_was_not_disturbed(
    place: Path, beginner: Path, straight: Path
) -> None:
    run_dir = place / "runs" / "disturbed"
    # the second group has to get the port of the first
    port, alive = f"stages.1.engine.port={free_port()}", "stages.1.engine.heartbeat_timeout_s=10"
    scratch = run_dir.parent / "disturbed_scratch"
    scratch.mkdir()
    process = start(
        place, run_dir, f"model.hf_path={beginner}", port, alive, recipe=GOLDEN, environment={"TMPDIR": str(scratch)}
    )
    engines = []
    try:
        # stopped while the trainer is busy, the engine meets the next transfer
        for step, phase, number in ((2, "generate", signal.SIGKILL), (3, "train", signal.SIGSTOP)):
            wait_for_phase(process, run_dir, step, phase)
            engines += processes_of(run_dir, ENGINE)
            os.kill(engines[-1], number)
    finally:
        code, output, errors = ended(process, timeout_s=400)
    assert code == 0, errors[-3000:]
    killed, stopped = (f"engine replica 0 (pid {pid}): " for pid in engines)
    assert re.search(re.escape(killed) + r"died \(signal SIGKILL\) while \w+: started again in \S+ s", output), output
    assert f"{stopped}process {engines[1]} stopped (state T) for 10 s (engine.heartbeat_timeout_s) while" in output
    want, got = lines(straight), lines(run_dir)
    counts = [line.pop("engine/restarts", 0) for line in got]
    assert counts == sorted(counts) and set(counts) == {0, 1, 2}
    assert list(map(without_clock, got)) == list(map(without_clock, want))
    assert_same_files(straight, run_dir, "rollouts/iter_*.jsonl", "model/model.safetensors")
    assert_nothing_is_left(run_dir)
    assert not list(scratch.glob("megatron_rl*"))


def wait_for_phase(process: subprocess.Popen[str], run_dir: Path, step: int, phase: str) -> None:
    """Until an iteration is in `phase`, or beyond."""
    order = PHASES.index

    def is_there() -> bool:
        seen = read_phase(run_dir, 0)
        return process.poll() is not None or (
            seen is not None and seen.stage == "rl" and (seen.step, order(seen.phase)) >= (step, order(phase))
        )

    wait_for(is_there, f"{phase} of iteration {step}", timeout_s=400)


def assert_same_files(one: Path, other: Path, *patterns: str) -> None:
    names = [path.relative_to(one) for pattern in patterns for path in sorted(one.glob(pattern))]
    assert len(names) >= len(patterns)
    for name in names:
        assert (other / name).read_bytes() == (one / name).read_bytes(), name

"""Twenty steps are the golden ones, and a run that loses its engine on the way is the run that does not."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_rl.train.launcher import held_port
from megatron_rl.train.phases import PHASES, read_phase
from tests.helpers.checkpoints import load_tool
from tests.helpers.processes import assert_nothing_is_left, ended, processes_of, wait_for
from tests.helpers.quickstart import ROOT, lines, start, train
from tests.helpers.same_run import without_clock

SFT_STEPS, ITERATIONS = 12, 8
GOLDEN = ROOT / "tests" / "golden" / "recipe.yaml"
ENGINE = "megatron_rl.rollout.vllm_worker"


@pytest.fixture(scope="module")
def straight(place: Path, beginner: Path) -> Path:
    """The run directory of the run that nothing happened to."""
    run_dir = place / "runs" / "straight"
    done = train(place, run_dir, f"model.hf_path={beginner}", recipe=GOLDEN)
    assert done.returncode == 0, done.stderr[-3000:]
    return run_dir


@pytest.mark.timeout(900)
def test_the_weights_change_and_rewards_differ_in_nearly_every_iteration(straight: Path) -> None:
    """Which rollouts are right depends on the processor's rounding; two iterations without any may be among them."""
    rl = lines(straight)[SFT_STEPS:]
    teaching = [line for line in rl if line["reward/std"] > 0]
    assert all(line["policy/updates"] == 2 and line["policy/grad_norm"] > 0 for line in teaching)
    assert len(teaching) >= ITERATIONS - 2


@pytest.mark.timeout(900)
def test_the_run_is_the_golden_trajectory(straight: Path, beginner: Path) -> None:
    """Bit for bit on the processor that it was kept on, else within tolerances; the tool tells how to keep another."""
    tool = load_tool("golden_trajectory")
    got = tool.trajectory(straight, start=beginner)
    assert list(tool.differences(json.loads(tool.TRAJECTORY.read_text()), got)) == []


@pytest.fixture
def port() -> Iterator[int]:
    with held_port() as held:
        yield held


@pytest.mark.timeout(900)
def test_a_run_whose_engine_is_killed_and_then_stopped_is_the_run_that_was_not_disturbed(
    place: Path, beginner: Path, straight: Path, port: int
) -> None:
    run_dir = place / "runs" / "disturbed"
    # the second group has to get the port of the first
    engine_port, alive = f"stages.1.engine.port={port}", "stages.1.engine.heartbeat_timeout_s=10"
    # what sleeps is lost as what does not, and gives the same bits
    asleep = "stages.1.engine.sleep=true"
    scratch = run_dir.parent / "disturbed_scratch"
    scratch.mkdir()
    process = start(
        place,
        run_dir,
        f"model.hf_path={beginner}",
        engine_port,
        alive,
        asleep,
        recipe=GOLDEN,
        environment={"TMPDIR": str(scratch)},
    )
    engines = []
    try:
        # stopped while the trainer is busy and it sleeps, the engine meets the next transfer
        for step, phase, number in ((2, "generate", signal.SIGKILL), (3, "train", signal.SIGSTOP)):
            wait_for_phase(process, run_dir, step, phase)
            engines += processes_of(run_dir, ENGINE)
            os.kill(engines[-1], number)
    finally:
        code, output, errors = ended(process, timeout_s=400)
    assert code == 0, errors[-3000:]
    killed, stopped = (f"engine replica 0 (pid {pid}): " for pid in engines)
    assert re.search(
        re.escape(killed) + r"died \(signal SIGKILL\) while \w+: started again in \S+ s", output
    ), output
    assert (
        f"{stopped}process {engines[1]} stopped (state T) for 10 s (engine.heartbeat_timeout_s) while"
        in output
    )
    want, got = lines(straight), lines(run_dir)
    counts = [line.pop("engine/restarts", 0) for line in got]
    assert counts == sorted(counts) and set(counts) == {0, 1, 2}
    assert list(map(without_clock, got)) == list(map(without_clock, want))
    assert_same_files(straight, run_dir, "rollouts/*iter_*.jsonl", "model/model.safetensors")
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

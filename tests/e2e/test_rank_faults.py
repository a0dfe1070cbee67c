"""Ranks that are killed, stopped or asked to stop: an end in good time that names the rank, and a run to go on with."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.train.phases import read_phase
from tests.helpers.processes import assert_nothing_is_left, ended, wait_for
from tests.helpers.quickstart import lines, start, train
from tests.helpers.same_run import without_clock

STEPS = 96  # far more than are run while seven requests and faults are waited for
OPTIONS = (
    "stages=[{kind: sft, data: small/sft.jsonl, "
    f"steps: {STEPS}, global_batch_size: 16, tokens_per_microbatch: 1024, max_sample_tokens: 256, "
    "optimizer: {lr: 1.0e-4}, schedule: {kind: cosine, warmup_steps: 4}}]",
    "run.silence_timeout_s=4",
    "--nproc",
    "2",
)
ONLY_AT_THE_END, ALWAYS = "checkpoint={every_steps: 1000, keep: 1}", "checkpoint={every_steps: 1, keep: 2}"


@pytest.fixture(scope="module")
def straight(place: Path) -> Path:
    """The run that nothing happens to."""
    run_dir = place / "runs" / "straight_ranks"
    done = train(place, run_dir, *OPTIONS, ONLY_AT_THE_END)
    assert done.returncode == 0, done.stderr
    return run_dir


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    """What was logged of every step, without wall time and memory."""
    return [without_clock(line) for line in lines(run_dir)]


class Leg:
    """One start of the run, up to a few steps further than the one before."""

    def __init__(self, place: Path, run_dir: Path, checkpoints: str) -> None:
        self.run_dir = run_dir
        resume = ["--resume"] if run_dir.exists() else []
        before = len(lines(run_dir)) if resume else 0
        self.process = start(place, run_dir, *OPTIONS, checkpoints, *resume)
        # a resume may first take back lines that no checkpoint holds
        wait_for(lambda: self.process.poll() is not None or self.num_steps() >= before + 2, "two more steps")
        assert self.process.poll() is None, self.process.communicate()

    def num_steps(self) -> int:
        path = self.run_dir / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def pid(self, rank: int) -> int:
        phase = read_phase(self.run_dir, rank)
        assert phase is not None
        return phase.pid

    def end(self, *, within_s: float) -> tuple[int, str]:
        """Exit code and what stands in stderr, after checking that nothing is left."""
        began = time.monotonic()
        code, _, errors = ended(self.process, timeout_s=within_s + 60)
        assert time.monotonic() - began < within_s
        assert_nothing_is_left(self.run_dir)
        assert "Traceback" not in errors, errors
        return code, errors

    def stopped(self, reason: str) -> None:
        """It stopped on request at a step border, where it left a checkpoint that was not due."""
        assert self.end(within_s=60) == (75, "stopped: all 2 ranks have ended\n")
        record = json.loads((self.run_dir / "stopped.json").read_text())
        step = self.num_steps()
        checkpoint = f"checkpoints/stage_0_step_{step:06d}"
        assert record == {"reason": reason, "stage": "sft", "step": step, "checkpoint": checkpoint}
        assert (self.run_dir / checkpoint).is_dir()
        assert not list(self.run_dir.glob("logs/stacks_*"))

    def stacks(self, rank: int) -> str:
        path = self.run_dir / "logs" / f"stacks_rank_{rank}.txt"
        text = path.read_text()
        path.unlink()
        return text


@pytest.mark.timeout(900)
def test_ranks_that_are_stopped_hung_or_killed(place: Path, straight: Path) -> None:
    """One run through every fault: it ends bit-equal to the run that nothing happened to."""
    run_dir = place / "runs" / "ranks"

    leg = Leg(place, run_dir, ONLY_AT_THE_END)
    leg.process.send_signal(signal.SIGTERM)
    leg.stopped("SIGTERM")

    leg = Leg(place, run_dir, ONLY_AT_THE_END)
    os.kill(leg.pid(1), signal.SIGUSR1)
    leg.stopped("SIGUSR1")

    leg = Leg(place, run_dir, ONLY_AT_THE_END)
    (run_dir / "stop").touch()
    leg.stopped("the stop file")

    for silent in (1, 0):
        leg = Leg(place, run_dir, ALWAYS)
        pid = leg.pid(silent)
        os.kill(pid, signal.SIGSTOP)
        code, errors = leg.end(within_s=60)
        assert code == 1
        assert re.match(
            rf"error: rank \d of 2 failed first \(exit code 1\)\n"
            rf"  rank {silent} \(pid {pid} on \S+\) has been silent for \d+ s \(run\.silence_timeout_s = 4\): "
            rf"sft step \d+, phase (train|save) for \d+\.\d s; its process is stopped \(state T\)",
            errors,
        ), errors
        for rank in range(2):
            assert "run_training" in leg.stacks(rank)

    leg = Leg(place, run_dir, ALWAYS)
    os.kill(leg.pid(1), signal.SIGKILL)
    code, errors = leg.end(within_s=20)
    assert code == 128 + signal.SIGKILL
    assert re.match(
        r"error: rank 1 of 2 failed first \(killed by SIGKILL in sft step \d+, phase (train|save) for \d+\.\d s\)\n",
        errors,
    ), errors
    assert "run_training" in leg.stacks(0)

    last = start(place, run_dir, *OPTIONS, ONLY_AT_THE_END, "--resume")
    assert ended(last, timeout_s=300)[0] == 0
    assert not (run_dir / "stopped.json").exists()
    assert steps_of(run_dir) == steps_of(straight)
    assert len(steps_of(run_dir)) == STEPS
    weights = "model/model.safetensors"
    assert (run_dir / weights).read_bytes() == (straight / weights).read_bytes()

"""A run that is killed with SIGKILL at every phase, and resumed each time, is the run that was not: bit for bit.

The real command line. Moments, and how far the run gets before each, are drawn from a seed that a failure prints;
MEGATRON_RL_KILL_SEED sets another one.
"""

from __future__ import annotations

import os
import random
from itertools import pairwise
from pathlib import Path

import pytest

from tests.helpers.kills import Attempt, Kill, kill_and_resume, num_steps
from tests.helpers.processes import assert_nothing_is_left
from tests.helpers.quickstart import lines, train
from tests.helpers.same_run import (
    assert_same_board,
    assert_same_metrics,
    assert_same_model,
    assert_same_rollouts,
    assert_same_transfers,
)

SEED = int(os.environ.get("MEGATRON_RL_KILL_SEED", "1"))
SFT_STEPS, ITERATIONS, STEPS_OF_TWO_RANKS = 20, 11, 12
SFT = (
    "stages.0.data=small/sft.jsonl",
    f"stages.0.steps={SFT_STEPS}",
    "stages.0.global_batch_size=8",
    "stages.0.optimizer.lr=1e-4",
    "stages.0.schedule={kind: cosine, warmup_steps: 2, min_lr: 1e-5}",
)
RL = (
    "stages.1.prompts=small/train.jsonl",
    f"stages.1.iterations={ITERATIONS}",
    "stages.1.prompts_per_iteration=8",
    "stages.1.group_size=4",
    "stages.1.updates_per_rollout=2",
    # the window changes on the way
    "stages.1.curriculum=[{iterations: 4, difficulty: [2, 3]}, {iterations: 7, difficulty: [3, 5]}]",
    # every group trains, so that every iteration changes the weights
    "stages.1.rewards={math_answer: 1.0, format: 0.1}",
    "stages.1.algorithm.drop_zero_advantage=false",
    # what has a state of its own: weights of a reference, a coefficient that moves
    "stages.1.algorithm.kl={coefficient: 0.02}",
    "stages.1.algorithm.entropy={target: 1.0, delta: 0.001}",
    "stages.1.algorithm.correction={kind: token_tis, batch_normalise: true}",
    "stages.1.optimizer.lr=1e-4",
    "stages.1.schedule={kind: linear, warmup_steps: 2}",
    "stages.1.eval={every: 3, sets: {few: small/few.jsonl}, samples: 1, temperature: 1.0}",
)
TWO_RANKS = (
    "--nproc",
    "2",
    f"""stages=[{{
        kind: sft, data: small/sft.jsonl, steps: {STEPS_OF_TWO_RANKS}, global_batch_size: 8,
        tokens_per_microbatch: 4096, max_sample_tokens: 256,
        optimizer: {{lr: 1.0e-4}}, schedule: {{kind: cosine, warmup_steps: 2}}
    }}]""",
)
STARTS = ("start", "load", "data")  # the run has done nothing new when one of these ends it
IN_SFT = (
    *STARTS,
    "train",
    "save",
    "step recorded, save not begun",
    "save: before the state",
    "save: before the rename",
    "save: renamed, not yet latest",
    "save: before an old one goes",
)
IN_RL = ("generate", "reward", "train", "sync", "rollouts half recorded")
# one of these, by the seed: each costs the start of an engine
SOMETIMES_IN_RL = ("engines", "logprob", "eval", "save: renamed, not yet latest")
ON_TWO_RANKS = ("train", "save", "save: before the rename")
AT_THE_END = "export: before the rename"


def plan(moments: tuple[str, ...], stage: str, rng: random.Random) -> list[Kill]:
    """The moments in random order, each after none or one more step, each attempt with checkpoints of its own kind."""
    kills = []
    for moment in rng.sample(moments, len(moments)):
        every_steps, asynchronous = rng.choice((1, 1, 2)), rng.choice(("true", "false"))
        kills.append(
            Kill(
                moment=moment,
                stage="" if moment in STARTS else stage,
                after=0 if moment in (*STARTS, "engines", "eval") else rng.choice((0, 1)),
                options=(f"checkpoint.every_steps={every_steps}", f"checkpoint.asynchronous={asynchronous}"),
            )
        )
    return kills


def undergo(
    place: Path, run_dir: Path, kills: list[Kill], *options: str, steps: dict[int, int]
) -> list[Attempt]:
    """All kills, then the end in peace; prints what it takes to repeat them."""
    print(f"MEGATRON_RL_KILL_SEED={SEED}")
    attempts = []
    for attempt in kill_and_resume(place, run_dir, kills, *options, steps_before=steps):
        print(f"{len(attempts) + 1}. {attempt}")
        attempts.append(attempt)
    done = train(place, run_dir, *options, "--resume", timeout_s=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return attempts


@pytest.fixture(scope="module")
def model(place: Path, beginner: Path) -> str:
    rows = (place / "small" / "train.jsonl").read_text().splitlines(keepends=True)
    (place / "small" / "few.jsonl").write_text("".join(rows[-8:]))
    return f"model.hf_path={beginner}"


@pytest.fixture(scope="module")
def straight(place: Path, model: str) -> Path:
    """The run directory of the run that nothing happened to."""
    run_dir = place / "runs" / "unkilled"
    done = train(place, run_dir, *SFT, *RL, model, timeout_s=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return run_dir


@pytest.fixture(scope="module")
def attempts(place: Path, model: str) -> list[Attempt]:
    """Those that it took to bring the same run to its end."""
    rng = random.Random(SEED)
    first = Kill(moment="train", stage="sft", options=("checkpoint.every_steps=1",))
    last = Kill(moment=AT_THE_END, options=("checkpoint.every_steps=2",))
    in_rl = (*IN_RL, rng.choice(SOMETIMES_IN_RL))
    kills = [first, *plan(IN_SFT, "sft", rng), *plan(in_rl, "rl", rng), last]
    return undergo(place, place / "runs" / "killed", kills, *SFT, *RL, model, steps={0: 0, 1: SFT_STEPS})


@pytest.fixture(scope="module")
def killed(place: Path, attempts: list[Attempt]) -> Path:
    return place / "runs" / "killed"


@pytest.mark.timeout(3600)
def test_the_run_was_killed_often_and_went_on_from_its_checkpoints(attempts: list[Attempt]) -> None:
    assert len(attempts) + len(ON_TWO_RANKS) >= 20
    for before, after in pairwise(attempts):
        assert after.began_at >= before.began_at, (str(before), str(after))
        # a checkpoint every second step, of which the last may not have been published yet
        assert after.began_at >= before.killed_at - 4, (str(before), str(after))
        if after.began_at and after.kill.moment not in STARTS:
            assert f"step_{after.began_at - SFT_STEPS * (after.began_at > SFT_STEPS):06d}" in after.output
    assert attempts[-1].killed_at == SFT_STEPS + ITERATIONS


@pytest.mark.timeout(3600)
def test_a_killed_run_measures_bit_for_bit_what_it_would_have(straight: Path, killed: Path) -> None:
    assert num_steps(killed) == SFT_STEPS + ITERATIONS
    rl = lines(straight)[SFT_STEPS:]
    # else equality would mean little; by a processor's rounding one or two may have all rollouts graded alike
    taught = [
        line
        for line in rl
        if line["policy/updates"] == 2 and line["policy/grad_norm"] > 0 < line["reward/std"]
    ]
    assert len(taught) >= ITERATIONS - 3, [(line["policy/grad_norm"], line["reward/std"]) for line in rl]
    assert_same_metrics(straight, killed)


@pytest.mark.timeout(3600)
def test_a_killed_run_draws_the_same_prompts_and_samples(straight: Path, killed: Path) -> None:
    assert_same_rollouts(straight, killed)
    assert_same_transfers(straight, killed)


@pytest.mark.timeout(3600)
def test_a_killed_run_ends_with_the_same_model_and_curves(straight: Path, killed: Path) -> None:
    assert_same_model(straight, killed)
    assert_same_board(straight, killed)


@pytest.mark.timeout(3600)
def test_kills_leave_nothing_behind(killed: Path, attempts: list[Attempt]) -> None:
    assert_nothing_is_left(killed)
    shared = {path for attempt in attempts for path in attempt.shared_memory}
    assert [path for path in sorted(shared) if os.path.exists(path)] == []


@pytest.mark.timeout(3600)
def test_resuming_a_finished_run_changes_nothing_but_the_report(
    place: Path, model: str, killed: Path
) -> None:
    before = contents(killed)
    done = train(place, killed, *SFT, *RL, model, "--resume")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "nothing is left to train" in done.stdout
    assert "report.html" in done.stdout
    assert contents(killed) == before


def contents(run_dir: Path) -> dict[str, bytes]:
    """Every file but those that tell of each start."""
    files = (path for path in run_dir.rglob("*") if path.is_file())
    named = {path.relative_to(run_dir).as_posix(): path for path in files}
    return {
        name: path.read_bytes()
        for name, path in named.items()
        if name not in ("report.html", "load.json") and not name.startswith("logs/")
    }


@pytest.mark.timeout(1800)
def test_two_ranks_that_are_killed_together_end_with_the_same_model(place: Path, model: str) -> None:
    straight, killed = place / "runs" / "unkilled_2", place / "runs" / "killed_2"
    done = train(place, straight, *TWO_RANKS, model)
    assert done.returncode == 0, done.stderr[-3000:]
    kills = plan(ON_TWO_RANKS, "sft", random.Random(SEED))
    undergo(place, killed, kills, *TWO_RANKS, model, steps={0: 0})
    assert_same_metrics(straight, killed)
    assert_same_model(straight, killed)
    assert_same_board(straight, killed)
    assert_nothing_is_left(killed)

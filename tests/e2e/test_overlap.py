"""Rollouts made while the trainer works: they overlap, are one transfer old, and survive a kill bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.kills import Kill, kill_and_resume
from tests.helpers.processes import assert_nothing_is_left
from tests.helpers.quickstart import ROOT, lines, train
from tests.helpers.same_run import assert_same_metrics, assert_same_model, assert_same_rollouts

GOLDEN = ROOT / "tests" / "golden" / "recipe.yaml"
ITERATIONS = 4
OVERLAP = (
    "stages.0.steps=2",
    f"stages.1.iterations={ITERATIONS}",
    "stages.1.curriculum=[]",
    "stages.1.overlap=one_step",
    "stages.1.algorithm.correction={kind: token_tis}",
    "stages.1.eval={every: 2, sets: {few: small/few.jsonl}}",
    "checkpoint.every_steps=2",
)


@pytest.mark.timeout(900)
def test_rollouts_made_ahead_overlap_with_training_and_survive_a_kill_bit_for_bit(
    place: Path, beginner: Path
) -> None:
    rows = (place / "small" / "train.jsonl").read_text().splitlines(keepends=True)
    (place / "small" / "few.jsonl").write_text("".join(rows[-8:]))
    options = (*OVERLAP, f"model.hf_path={beginner}")
    straight, killed = place / "runs" / "ahead", place / "runs" / "ahead_killed"
    done = train(place, straight, *options, recipe=GOLDEN)
    assert done.returncode == 0, done.stderr[-3000:]

    rl = lines(straight)[2:]
    assert [line["rollout/staleness_max"] for line in rl] == [0, *[1] * (ITERATIONS - 1)]
    assert [line["rollout/staleness_mean"] for line in rl] == [0, *[1] * (ITERATIONS - 1)]
    # two optimizer steps an iteration: the weights of the iteration before
    assert [line["rollout/weight_version"] for line in rl] == [0, 0, 2, 4]
    assert all(line["policy/updates"] == 2 and line["mismatch/k3"] > 0 for line in rl)
    # of the engine's work on the next batch, what fell into the trainer's own
    assert all(line["overlap/hidden_s"] > 0 for line in rl[:-1]) and "overlap/hidden_s" not in rl[-1]
    for line in rl:
        named = sum(v for k, v in line.items() if k.startswith("time/") and k not in _WHOLE)
        assert named == pytest.approx(line["time/iteration_s"], rel=0.01)

    # the batch of iteration 3 was made in iteration 2, and is in the checkpoint of that moment
    kill = Kill(moment="train", stage="rl", after=4, options=("checkpoint.every_steps=1",))
    (attempt,) = kill_and_resume(place, killed, [kill], *options, recipe=GOLDEN, steps_before={0: 0, 1: 2})
    assert attempt.killed_at >= 4
    done = train(place, killed, *options, "--resume", recipe=GOLDEN)
    assert done.returncode == 0, done.stderr[-3000:]
    assert_same_metrics(straight, killed)
    assert_same_rollouts(straight, killed)
    assert_same_model(straight, killed)
    assert_nothing_is_left(killed)


_WHOLE = ("time/iteration_s", "time/eval_s")

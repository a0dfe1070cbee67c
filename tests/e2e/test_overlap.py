"""Rollouts made while the trainer works: they overlap, are one transfer old, and a resumed run has the very same.
With `partial` those that are late go on with newer weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megatron_rl.model.checkpoint_files import LATEST_FILE, find_latest
from tests.helpers.chrome_trace import read_trace
from tests.helpers.processes import assert_nothing_is_left
from tests.helpers.quickstart import ROOT, lines, train
from tests.helpers.same_run import (
    assert_same_metrics,
    assert_same_model,
    assert_same_rollouts,
    assert_same_transfers,
)

GOLDEN = ROOT / "tests" / "golden" / "recipe.yaml"
SFT_STEPS, ITERATIONS, RESUMED_AFTER = 1, 4, 2
PARTIAL_ITERATIONS = 10
_WHOLE = ("time/iteration_s", "time/eval_s")


@pytest.mark.timeout(900)
def test_rollouts_made_ahead_overlap_with_training_and_are_the_same_bit_for_bit_after_a_resume(
    place: Path, beginner: Path
) -> None:
    rows = (place / "small" / "train.jsonl").read_text().splitlines(keepends=True)
    (place / "small" / "few.jsonl").write_text("".join(rows[-8:]))
    options = (
        f"model.hf_path={beginner}",
        f"stages.0.steps={SFT_STEPS}",
        "stages.0.schedule={kind: constant}",
        f"stages.1.iterations={ITERATIONS}",
        "stages.1.curriculum=[]",
        "stages.1.overlap=one_step",
        "stages.1.algorithm.correction={kind: token_tis}",
        "stages.1.eval={every: 3, sets: {few: small/few.jsonl}}",
        "checkpoint={every_steps: 1, keep: 9}",
    )
    straight, resumed = place / "runs" / "ahead", place / "runs" / "ahead_resumed"
    done = train(place, straight, *options, recipe=GOLDEN)
    assert done.returncode == 0, done.stderr[-3000:]

    rl = lines(straight)[SFT_STEPS:]
    assert [line["rollout/staleness_max"] for line in rl] == [0, 1, 1, 1]
    assert [line["rollout/staleness_mean"] for line in rl] == [0, 1, 1, 1]
    # two optimizer steps an iteration: weights of the iteration before
    assert [line["rollout/weight_version"] for line in rl] == [0, 0, 2, 4]
    assert all(line["policy/updates"] == 2 for line in rl)
    # what the trainer does not agree with is no longer rounding alone
    assert rl[0]["mismatch/k3"] < 1e-6 < min(line["mismatch/k3"] for line in rl[1:])
    # of the engine's work on the next batch, what fell into the trainer's own
    assert all(line["overlap/hidden_s"] > 0 for line in rl[:-1]) and "overlap/hidden_s" not in rl[-1]
    for line in rl:
        parts = sum(v for name, v in line.items() if name.startswith("time/") and name not in _WHOLE)
        assert parts == pytest.approx(line["time/iteration_s"], rel=0.01)

    # taken back to a moment at which the rollouts of iteration 3 were there and not trained on
    shutil.copytree(straight, resumed)
    (resumed / "checkpoints" / LATEST_FILE).write_text(f"stage_1_step_{RESUMED_AFTER:06d}\n")
    saved = find_latest(resumed / "checkpoints")
    assert saved is not None and "rollouts_ahead.json" in saved.files
    shutil.rmtree(resumed / "model")
    done = train(place, resumed, *options, "--resume", recipe=GOLDEN)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"rl {RESUMED_AFTER + 1}/{ITERATIONS}" in done.stdout
    assert f"rl {RESUMED_AFTER}/{ITERATIONS}" not in done.stdout
    assert_same_metrics(straight, resumed)
    assert_same_rollouts(straight, resumed)
    assert_same_transfers(straight, resumed)
    assert_same_model(straight, resumed)
    assert_nothing_is_left(resumed)


@pytest.mark.timeout(900)
def test_what_a_round_does_not_wait_for_goes_on_with_newer_weights_to_its_end(place: Path) -> None:
    run_dir = place / "runs" / "partial"
    options = (
        # untrained: lengths from a few tokens to hundreds, so that some are late on any machine; in some rounds none
        # may be, where the trainer is so slow to hear of the first that the last are there
        "model.hf_path=models/tiny",
        "stages.1.sampling.max_response_tokens=400",
        "stages.1.prompts_per_iteration=16",
        "stages.1.group_size=2",
        "stages.0.steps=1",
        "stages.0.schedule={kind: constant}",
        f"stages.1.iterations={PARTIAL_ITERATIONS}",
        "stages.1.curriculum=[]",
        "stages.1.overlap=partial",
        "stages.1.stragglers={groups: 0.5}",
        "stages.1.algorithm.correction={kind: token_tis}",
        f"run.profile={{first_step: 2, steps: {PARTIAL_ITERATIONS}}}",
        "checkpoint=null",
    )
    done = train(place, run_dir, *options, recipe=GOLDEN)
    assert done.returncode == 0, done.stderr[-3000:]

    rl = lines(run_dir)[SFT_STEPS:]
    assert sum(line["stragglers/late_groups"] for line in rl) > 0
    assert sum(line["stragglers/continued_rollouts"] for line in rl) > 0
    # what goes on is not dropped, and two transfers old where its first tokens are
    assert all(line["count/dropped_late"] == 0 for line in rl)
    oldest = [line["rollout/staleness_max"] for line in rl]
    assert oldest[:2] == [0, 1] and set(oldest[2:]) <= {1, 2} and 2 in oldest

    rollouts = [
        one for i in range(PARTIAL_ITERATIONS) for one in lines(run_dir, f"rollouts/iter_{i + 1:06d}.jsonl")
    ]
    continued = [one for one in rollouts if one.get("version_runs")]
    assert continued
    for one in continued:
        counts, versions = zip(*one["version_runs"], strict=True)
        assert sum(counts) == one["num_tokens"] and list(versions) == sorted(set(versions))
    for path in sorted((run_dir / "rollouts").glob("tokens_iter_*.jsonl")):
        for one in lines(run_dir, f"rollouts/{path.name}"):
            assert len(one["rollout_logprobs"]) == len(one["tokens"]) > 0

    lanes = read_trace(run_dir / "profile" / "trace.json.gz")
    (engine,) = (lane for name, lane in lanes.items() if name.startswith("engine"))
    assert "generate" in {span.name for span in engine}
    assert_nothing_is_left(run_dir)

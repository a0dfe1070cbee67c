"""Dynamic sampling, early ends of windows and stages, and re-scoring in one real run, which kills do not change.

The run is killed while it measures pass rates and again after it, and is then, bit for bit, the run that was not.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_rl.model.checkpoint_files import find_latest
from tests.helpers.kills import Attempt, Kill, kill_and_resume
from tests.helpers.processes import assert_nothing_is_left
from tests.helpers.quickstart import lines, train
from tests.helpers.same_run import (
    assert_same_board,
    assert_same_metrics,
    assert_same_model,
    assert_same_rollouts,
    assert_same_transfers,
)

PROMPTS = 40
# a threshold that no reward can rise by: windows end as soon as the rule is asked
PROMOTE = "{on: reward_plateau, window: 1, threshold: 10.0}"
FIRST, SECOND = 2, 4  # iterations that are left of 5 and 7
STAGE = """\
  - kind: rl
    prompts: {prompts}
    rewards: {{math_answer: 1.0}}
    iterations: {iterations}
    prompts_per_iteration: 3
    group_size: 2
    tokens_per_microbatch: 4096
    sampling: {{max_prompt_tokens: 64, max_response_tokens: 128}}
    grader: {{scale: [-1.0, 1.0]}}
    overlong: {{kind: penalty, buffer_tokens: 32}}
    optimizer: {{lr: 1.0e-4}}
"""
RECIPE = f"""\
name: curriculum
model: {{hf_path: beginner, dtype: float32}}
run: {{seed: 1}}
stages:
{STAGE.format(prompts="small/half.jsonl", iterations=5)}\
    dynamic_sampling: {{kind: refill, generate_prompts: 3, max_rounds: 4}}
    promote: {PROMOTE}
{STAGE.format(prompts="small/half_few.jsonl", iterations=7)}\
    dynamic_sampling: {{kind: oversample, generate_prompts: 6}}
    rescore: {{samples: 4, drop_above: 0.9, drop_below: 0.2}}
    curriculum:
      - {{iterations: 5, pass_rate: [0.2, 0.9], promote: {PROMOTE}}}
      - {{iterations: 2, pass_rate: [0.2, 0.6]}}
checkpoint: {{every_steps: 1, keep: 2}}
"""


@pytest.fixture(scope="module")
def recipe(place: Path) -> Path:
    rows = [json.loads(line) for line in (place / "small" / "train.jsonl").read_text().splitlines()]
    # every even number is right, so that a beginner is right half the time, whatever its processor rounds to
    for row in rows:
        row["reward_model"]["ground_truth"] = [str(number) for number in range(-20, 31, 2)]
    for name, count in (("half", len(rows)), ("half_few", PROMPTS)):
        text = "".join(json.dumps(row) + "\n" for row in rows[:count])
        (place / "small" / f"{name}.jsonl").write_text(text)
    path = place / "curriculum.yaml"
    path.write_text(RECIPE)
    return path


@pytest.fixture(scope="module")
def straight(place: Path, beginner: Path, recipe: Path) -> tuple[Path, str]:
    """The run directory of the run that nothing happened to, and what it printed."""
    run_dir = place / "runs" / "curriculum"
    done = train(place, run_dir, f"model.hf_path={beginner}", recipe=recipe)
    assert done.returncode == 0, done.stderr[-3000:]
    return run_dir, done.stdout


@pytest.mark.timeout(900)
def test_stages_and_windows_end_early_and_train_on_mixed_groups_of_what_is_left(
    straight: tuple[Path, str],
) -> None:
    run_dir, output = straight
    steps = lines(run_dir)
    assert [(line["stage"], line["iteration"]) for line in steps] == [
        *(("rl1", i + 1) for i in range(FIRST)), *(("rl2", i + 1) for i in range(SECOND)),
    ]  # fmt: skip
    assert "rl1 iteration 2: the stage ends after 2 of 5 iterations: the mean reward" in output
    assert "rl2 iteration 2: window 1 of 2 ends after 2 of 5 iterations" in output
    assert [line.get("curriculum/window") for line in steps[FIRST:]] == [1.0, 1.0, None, None]
    # more than one round, fewer than there may be: else equality would mean little
    assert any(line["sampling/rounds"] > 1 for line in steps[:FIRST])
    assert all(line["sampling/generated"] == 6 for line in steps[FIRST:])
    assert all(line["sampling/kept"] <= 3 and line["reward/overlong"] <= 0 for line in steps)
    assert sum(line["policy/updates"] for line in steps) >= FIRST + 2


@pytest.mark.timeout(900)
def test_only_prompts_that_re_scoring_kept_are_drawn_from_their_windows(straight: tuple[Path, str]) -> None:
    run_dir, output = straight
    scores = {score["id"]: score for score in lines(run_dir, "rescore/rl2.jsonl")}
    assert len(scores) == PROMPTS and f"re-scored {PROMPTS} prompts" in output
    kept = {name for name, score in scores.items() if not score["dropped"]}
    assert all((score["pass_rate"] < 0.2) == (score["dropped"] == "below") for score in scores.values())
    assert 0 < len(kept) < PROMPTS
    assert lines(run_dir)[FIRST]["rescore/kept"] == len(kept)
    for number in range(FIRST + 1, FIRST + SECOND + 1):
        drawn = {line["prompt_id"] for line in lines(run_dir, f"rollouts/iter_{number:06d}.jsonl")}
        assert drawn <= kept
        if number > FIRST + 2:
            assert all(scores[name]["pass_rate"] <= 0.6 for name in drawn)
    saved = find_latest(run_dir / "checkpoints")
    assert saved is not None and saved.progress["rescored"]["file"] == "rescore/rl2.jsonl"


@pytest.fixture(scope="module")
def attempts(place: Path, beginner: Path, recipe: Path) -> list[Attempt]:
    """Those that the kills ended; afterwards the run is brought to its end."""
    run_dir, model = place / "runs" / "curriculum_killed", f"model.hf_path={beginner}"
    kills = [Kill(moment="rescore", stage="rl2"), Kill(moment="train", stage="rl2", after=1)]
    ended = list(kill_and_resume(place, run_dir, kills, model, recipe=recipe, steps_before={0: 0, 1: FIRST}))
    done = train(place, run_dir, model, "--resume", recipe=recipe)
    assert done.returncode == 0, done.stderr[-3000:]
    # what the checkpoint names is not measured again
    assert "re-scor" not in done.stdout and "re-scored" in ended[1].output
    return ended


@pytest.mark.timeout(900)
def test_a_run_killed_while_re_scoring_and_after_is_the_run_that_was_not(
    place: Path, straight: tuple[Path, str], attempts: list[Attempt]
) -> None:
    want, got = straight[0], place / "runs" / "curriculum_killed"
    assert [(each.began_at, each.killed_at) for each in attempts] == [(0, FIRST), (FIRST, FIRST + 1)]
    assert_same_metrics(want, got)
    assert_same_rollouts(want, got)
    assert_same_transfers(want, got)
    assert_same_model(want, got)
    assert_same_board(want, got)
    name = "rescore/rl2.jsonl"
    assert (got / name).read_bytes() == (want / name).read_bytes()
    assert_nothing_is_left(got)

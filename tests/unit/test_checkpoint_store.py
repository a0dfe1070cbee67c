"""What a checkpoint directory promises: complete or refused by name, published at once, kept as asked."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.errors import CheckpointError
from megatron_rl.model.checkpoint_files import (
    SavedState,
    find_latest,
    inventory,
    publish_checkpoint,
    remove_leftovers,
    retain_newest,
    start_checkpoint,
)
from megatron_rl.model.checkpoint_match import check_same_model, check_same_recipe, flat_recipe, recipe_digest
from megatron_rl.recipe.schema import (
    CheckpointConfig,
    LayoutConfig,
    ModelConfig,
    ProfileConfig,
    Recipe,
    RunConfig,
    WandbConfig,
)
from megatron_rl.recipe.stages import OptimizerConfig, SftStage

STAGE = SftStage(
    kind="sft",
    data="data.jsonl",
    steps=10,
    global_batch_size=8,
    tokens_per_microbatch=64,
    optimizer=OptimizerConfig(lr=1e-3),
)
MODEL = {"vocab_size": 251, "num_layers": 4}
RECIPE = Recipe(name="tiny", model=ModelConfig(hf_path="models/tiny"), stages=(STAGE,))


def publish(root: Path, *, stage: int = 0, step: int, **progress: Any) -> Path:
    """A complete checkpoint with two stand-in tensor files."""
    progress = {"stage": stage, "step": step, **progress}
    directory = start_checkpoint(root, f"stage_{stage}_step_{step:06d}")
    write_tensors(directory)
    saved = state(directory, progress, steps=step)
    return publish_checkpoint(replace(saved, files=inventory(directory)), versions={"torch": "2"})


def state(path: Path, progress: dict[str, Any], *, steps: int = 10, recipe: Recipe = RECIPE) -> SavedState:
    flat = flat_recipe(recipe)
    return SavedState(
        path=path,
        progress=progress,
        optimizer_steps=steps,
        recipe=flat,
        recipe_digest=recipe_digest(flat, stage=progress["stage"]),
        model=MODEL,
        layout={"tp": 1},
        files={},
    )


def write_tensors(directory: Path) -> None:
    for part in ("model", "optimizer"):
        (directory / part).mkdir()
        (directory / part / "__0_0.distcp").write_bytes(b"tensor" * 100)


def latest(root: Path) -> SavedState:
    saved = find_latest(root)
    assert saved is not None
    return saved


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.is_dir())


def test_latest_is_none_before_the_first_checkpoint(tmp_path: Path) -> None:
    assert find_latest(tmp_path / "checkpoints") is None


def test_latest_gives_back_what_was_saved(tmp_path: Path) -> None:
    path = publish(tmp_path, stage=1, step=20, sampler={"cursors": [3, 4], "share": 0.1})
    progress = {"stage": 1, "step": 20, "sampler": {"cursors": [3, 4], "share": 0.1}}
    files = inventory(path)
    del files["state.json"]
    assert latest(tmp_path) == replace(state(path, progress, steps=20), files=files)
    assert path == tmp_path / "stage_1_step_000020"


@pytest.mark.parametrize("damaged", ["state.json", "model/__0_0.distcp", "optimizer/__0_0.distcp"])
@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_a_damaged_checkpoint_is_an_error_naming_the_file(tmp_path: Path, damaged: str, damage: str) -> None:
    file = publish(tmp_path, step=5) / damaged
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(CheckpointError, match=damaged):
        find_latest(tmp_path)


def test_a_state_that_was_changed_is_refused_whatever_was_changed(tmp_path: Path) -> None:
    file = publish(tmp_path, step=5, counts={"samples": 40}) / "state.json"
    whole = file.read_text()
    for was, now in (('"step": 5', '"step": 7'), ('"samples": 40', '"samples": 41'), ('"tp": 1', '"tp": 2')):
        assert whole.count(was) == 1
        file.write_text(whole.replace(was, now))
        with pytest.raises(CheckpointError, match=r"state\.json: was changed after it was saved"):
            find_latest(tmp_path)
    file.write_text(whole)
    assert latest(tmp_path).progress["step"] == 5


def test_a_latest_that_names_nothing_is_an_error_that_lists_what_is_there(tmp_path: Path) -> None:
    publish(tmp_path, step=5)
    (tmp_path / "latest").write_text("stage_0_step_000007\n")
    with pytest.raises(CheckpointError, match=r"latest: names 'stage_0_step_000007'.*stage_0_step_000005"):
        find_latest(tmp_path)
    (tmp_path / "latest").write_text("../elsewhere\n")
    with pytest.raises(CheckpointError, match=r"must name a checkpoint; .*: stage_0_step_000005$"):
        find_latest(tmp_path)


def test_a_state_of_another_format_is_an_error(tmp_path: Path) -> None:
    file = publish(tmp_path, step=5) / "state.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": 99}))
    with pytest.raises(CheckpointError, match=r"state\.json: format is 99"):
        find_latest(tmp_path)


def test_retention_keeps_the_newest_by_stage_and_step(tmp_path: Path) -> None:
    for stage, step in ((0, 9), (0, 10), (0, 100), (1, 5), (1, 20)):
        publish(tmp_path, stage=stage, step=step)
        retain_newest(tmp_path, keep=3)
    assert names(tmp_path) == ["stage_0_step_000100", "stage_1_step_000005", "stage_1_step_000020"]


def test_retention_never_deletes_the_one_that_latest_names(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        publish(tmp_path, step=step)
    # the run is taken back by hand
    (tmp_path / "latest").write_text("stage_0_step_000010\n")
    retain_newest(tmp_path, keep=1)
    assert names(tmp_path) == ["stage_0_step_000010", "stage_0_step_000030"]


def test_a_run_taken_back_replaces_what_it_had_saved_later(tmp_path: Path) -> None:
    for step in (10, 20):
        publish(tmp_path, step=step)
    (tmp_path / "latest").write_text("stage_0_step_000010\n")
    publish(tmp_path, step=20, attempt=2)
    assert latest(tmp_path).progress == {"stage": 0, "step": 20, "attempt": 2}


def test_the_latest_checkpoint_is_never_overwritten(tmp_path: Path) -> None:
    publish(tmp_path, step=10)
    with pytest.raises(CheckpointError, match="stage_0_step_000010: is the latest checkpoint already"):
        publish(tmp_path, step=10, attempt=2)
    assert latest(tmp_path).progress == {"stage": 0, "step": 10}


class KilledWhileWritten(dict[str, str]):
    """Versions that end the process at the moment they are written into the state file."""

    def items(self) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


def save_until_killed(root: Path) -> None:
    directory = start_checkpoint(root, "stage_0_step_000020")
    write_tensors(directory)
    saved = replace(state(directory, {"stage": 0, "step": 20}), files=inventory(directory))
    publish_checkpoint(saved, versions=KilledWhileWritten(torch="2"))


def test_a_process_killed_before_publishing_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    publish(tmp_path, step=10)
    process = multiprocessing.get_context("spawn").Process(target=save_until_killed, args=(tmp_path,))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert names(tmp_path) == [".tmp-stage_0_step_000020", "stage_0_step_000010"]
    assert latest(tmp_path).progress == {"stage": 0, "step": 10}
    # the next save clears it away
    publish(tmp_path, step=30)
    assert names(tmp_path) == ["stage_0_step_000010", "stage_0_step_000030"]


def test_a_process_killed_before_the_first_latest_leaves_its_checkpoint(tmp_path: Path) -> None:
    publish(tmp_path, step=10)
    (tmp_path / "latest").unlink()
    assert latest(tmp_path).progress == {"stage": 0, "step": 10}


def saved_by(recipe: Recipe, *, stage: int = 0) -> SavedState:
    return state(Path(f"run/stage_{stage}_step_000010"), {"stage": stage, "step": 10}, recipe=recipe)


def test_another_recipe_is_an_error_that_lists_every_key() -> None:
    other = replace(
        RECIPE, run=RunConfig(seed=7), stages=(replace(STAGE, optimizer=OptimizerConfig(lr=2e-3)), STAGE)
    )
    with pytest.raises(CheckpointError) as caught:
        check_same_recipe(saved_by(RECIPE, stage=1), flat_recipe(other))
    text = str(caught.value)
    assert "run.seed: was 1, is 7" in text
    assert "stages.0.optimizer.lr: was 0.001, is 0.002" in text
    assert "stages.1.data: was not set, is" in text


def test_a_stage_that_has_not_begun_may_be_mended_added_or_removed() -> None:
    two = replace(RECIPE, stages=(STAGE, STAGE))
    mended = replace(RECIPE, stages=(STAGE, replace(STAGE, steps=99)))
    for now in (two, mended, RECIPE):
        check_same_recipe(saved_by(two), flat_recipe(now))
    with pytest.raises(CheckpointError, match=r"stages\.1\.steps: was 10, is 99"):
        check_same_recipe(saved_by(two, stage=1), flat_recipe(mended))


def test_another_model_is_an_error_that_lists_every_number() -> None:
    check_same_model(saved_by(RECIPE), dict(MODEL))
    with pytest.raises(
        CheckpointError, match=r"another model than model\.hf_path \(vocab_size: was 251, is 250\)"
    ):
        check_same_model(saved_by(RECIPE), MODEL | {"vocab_size": 250})


def test_layout_checkpointing_microbatches_and_what_is_recorded_may_change() -> None:
    moved = replace(
        RECIPE,
        name="elsewhere",
        layout=LayoutConfig(tp=4, pp=2, sp=True),
        run=RunConfig(
            torch_threads=8,
            collective_timeout_s=60.0,
            rollout_tokens=2,
            profile=ProfileConfig(first_step=7),
            wandb=WandbConfig(project="p"),
        ),
        checkpoint=CheckpointConfig(every_steps=5),
        stages=(replace(STAGE, tokens_per_microbatch=4096),),
    )
    check_same_recipe(saved_by(RECIPE), flat_recipe(moved))
    check_same_recipe(saved_by(moved), flat_recipe(RECIPE))


def test_what_an_interrupt_left_half_way_is_removed_and_checkpoints_stay(tmp_path: Path) -> None:
    kept = publish(tmp_path, step=5)
    for name in (".tmp-stage_0_step_000010", ".old-stage_0_step_000001"):
        (tmp_path / name / "model").mkdir(parents=True)
    (tmp_path / ".latest").write_text("stage_0_step_000010\n")
    remove_leftovers(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {kept.name, "latest"}

"""Where a run stands on its one step axis."""

from __future__ import annotations

import json

import pytest

from megatron_rl.errors import DataError
from megatron_rl.recipe.stages import OptimizerConfig, RlStage, SamplingConfig, SftStage
from megatron_rl.train.progress import Progress, stage_label, stage_length

OPTIMIZER = OptimizerConfig(lr=1e-3)
SFT = SftStage(
    kind="sft", data="d", steps=20, global_batch_size=1, tokens_per_microbatch=1, optimizer=OPTIMIZER
)
RL = RlStage(
    kind="rl",
    prompts="p",
    rewards={"math_answer": 1.0},
    iterations=6,
    prompts_per_iteration=1,
    group_size=2,
    sampling=SamplingConfig(max_response_tokens=8),
    optimizer=OPTIMIZER,
)


def test_steps_count_on_over_stages() -> None:
    stages = (SFT, RL, RL)
    assert [stage_length(stage) for stage in stages] == [20, 6, 6]
    assert Progress(stage=0, step=20).global_step(stages) == Progress(stage=1).global_step(stages) == 20
    assert Progress(stage=2, step=3).global_step(stages) == 29


def test_stages_of_one_kind_are_numbered_only_when_there_are_several() -> None:
    assert [stage_label((SFT, RL, RL), i) for i in range(3)] == ["sft", "rl1", "rl2"]


def test_progress_survives_a_round_trip_through_a_checkpoint() -> None:
    progress = Progress(stage=1).advanced(
        4, sampler={"cursors": [1]}, counts={"prompts": 8}, weight_version=16
    )
    assert Progress(**json.loads(json.dumps(progress.to_dict()))) == progress


def test_the_state_of_an_entropy_bonus_goes_with_its_stage() -> None:
    held = {"coefficient": 0.1 + 0.2, "measured": 1 / 3}
    progress = Progress(stage=1).advanced(1, entropy=held).advanced(2)
    assert Progress(**json.loads(json.dumps(progress.to_dict()))).entropy == held
    assert progress.next_stage(2).entropy == {}


def test_skipped_steps_in_a_row_survive_a_checkpoint_and_end_with_a_step_that_is_taken() -> None:
    progress = Progress().advanced(1, skipped_in_a_row=1).advanced(2, skipped_in_a_row=2)
    resumed = Progress(**json.loads(json.dumps(progress.to_dict())))
    assert resumed.skipped_in_a_row == 2
    assert resumed.advanced(3).skipped_in_a_row == 0


def test_counts_add_up_and_go_on_in_the_next_stage() -> None:
    sft = Progress().advanced(1, counts={"samples": 4}).advanced(2, counts={"samples": 3})
    rl = sft.next_stage(1).advanced(1, sampler={"cursors": [1]}, counts={"prompts": 8}, weight_version=2)
    assert rl == Progress(
        stage=1,
        step=1,
        sampler={"cursors": [1]},
        counts={"samples": 7, "prompts": 8},
        weight_version=2,
    )


def test_a_stage_that_has_begun_goes_on_with_the_same_data_alone() -> None:
    begun = Progress().on_data("a", place="stages.0.data: x.jsonl").advanced(3)
    assert begun.on_data("a", place="stages.0.data: x.jsonl") == begun
    with pytest.raises(DataError, match=r"stages\.0\.data: x\.jsonl does not hold .* up to step 3"):
        begun.on_data("b", place="stages.0.data: x.jsonl")
    # the next stage has other data
    assert begun.next_stage(1).on_data("b", place="stages.1.prompts: y.jsonl").data == "b"

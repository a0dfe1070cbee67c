"""What re-scoring makes of graded groups, and that a resumed stage gets it back to the byte."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_rl.data.curriculum import CurriculumSampler
from megatron_rl.data.prompts import PromptSet
from megatron_rl.data.types import Prompt, Verdict
from megatron_rl.errors import CheckpointError, DataError
from megatron_rl.model.checkpoint_files import Recorded, SavedState, write_state
from megatron_rl.recipe.batch import RescoreConfig
from megatron_rl.recipe.schema import ModelConfig, Recipe
from megatron_rl.recipe.stages import CurriculumWindow, OptimizerConfig, RlStage, SamplingConfig
from megatron_rl.train.rescore import (
    PartialScores,
    Rescored,
    read_rescored,
    score_group,
    weights_key,
    write_rescored,
)
from megatron_rl.train.rl_data import RlData, narrowed
from tests.helpers.rollouts import group

C, W = Verdict.CORRECT, Verdict.WRONG
CONFIG = RescoreConfig(samples=4, drop_above=0.75, drop_below=0.25)
GROUPS = [
    group("solved", [C, C, C, C]), group("at the upper limit", [C, C, C, W]), group("at the lower", [C, W, W, W]),
    group("hopeless", [W, W, Verdict.TIMEOUT, Verdict.NO_ANSWER]), group("bad gold", [Verdict.BAD_GOLD] * 4),
    group("one failed", [C, W, C, Verdict.ERROR]),
]  # fmt: skip
RESCORED = Rescored(scores=tuple(score_group(one, CONFIG) for one in GROUPS))


def test_prompts_beyond_the_limits_and_without_a_grade_are_dropped() -> None:
    assert {score.id: score.dropped for score in RESCORED.scores} == {
        "solved": "above", "at the upper limit": "", "at the lower": "", "hopeless": "below", "bad gold": "ungraded",
        "one failed": "",
    }  # fmt: skip
    # what the grader failed on is no wrong answer
    assert RESCORED.rates == {"at the upper limit": 0.75, "at the lower": 0.25, "one failed": 2 / 3}


def test_no_lower_limit_keeps_what_was_never_solved() -> None:
    assert score_group(GROUPS[3], RescoreConfig()).dropped == ""


def test_numbers_and_the_line_for_the_console_say_what_was_dropped() -> None:
    assert RESCORED.metrics()["rescore/kept"] == 3
    assert str(RESCORED) == (
        "re-scored 6 prompts: mean pass rate 0.444, 0.000 truncated; dropped 1 above, 1 below, 1 ungraded; 3 are left"
    )


def test_a_resumed_stage_reads_what_was_measured(tmp_path: Path) -> None:
    record = json.loads(json.dumps(write_rescored(tmp_path, "rl2", RESCORED)))
    assert record["file"] == "rescore/rl2.jsonl"
    assert read_rescored(tmp_path, record) == RESCORED
    # the same again is the same file
    assert write_rescored(tmp_path, "rl2", RESCORED) == record


def test_a_file_that_is_not_the_one_of_the_checkpoint_is_refused(tmp_path: Path) -> None:
    record = write_rescored(tmp_path, "rl", RESCORED)
    write_rescored(tmp_path, "rl", replace(RESCORED, scores=RESCORED.scores[1:]))
    with pytest.raises(
        CheckpointError, match=r"rescore/rl\.jsonl: has sha256 .*, but the checkpoint was saved with"
    ):
        read_rescored(tmp_path, record)
    (tmp_path / record["file"]).unlink()
    with pytest.raises(CheckpointError, match=r"cannot be read .*put back the file"):
        read_rescored(tmp_path, record)


def test_an_ended_measurement_goes_on_behind_the_last_whole_line(tmp_path: Path) -> None:
    first = PartialScores(tmp_path, "rl", "k", CONFIG)
    assert first.scores == ()
    first.add(RESCORED.scores[:2])
    first.add(RESCORED.scores[2:3])
    (file,) = (tmp_path / "rescore").iterdir()
    file.write_bytes(file.read_bytes() + b'{"id": "cut o')
    second = PartialScores(tmp_path, "rl", "k", CONFIG)
    assert second.scores == RESCORED.scores[:3]
    second.add(RESCORED.scores[3:])
    assert PartialScores(tmp_path, "rl", "k", CONFIG).scores == RESCORED.scores
    second.remove()
    assert PartialScores(tmp_path, "rl", "k", CONFIG).scores == ()


def test_scores_of_other_weights_are_not_used(tmp_path: Path) -> None:
    PartialScores(tmp_path, "rl", "k", CONFIG).add(RESCORED.scores)
    other = PartialScores(tmp_path, "rl", "other", CONFIG)
    other.add(RESCORED.scores[:1])
    assert other.scores == () and PartialScores(tmp_path, "rl", "other", CONFIG).scores == RESCORED.scores[:1]


def test_other_limits_drop_other_prompts_of_the_same_measurement(tmp_path: Path) -> None:
    PartialScores(tmp_path, "rl", "k", CONFIG).add(RESCORED.scores)
    wider = RescoreConfig(samples=4, drop_above=1.0)
    scores = PartialScores(tmp_path, "rl", "k", wider).scores
    assert [score.id for score in scores if score.dropped] == ["bad gold"]
    assert [replace(score, dropped="") for score in scores] == [
        replace(s, dropped="") for s in RESCORED.scores
    ]


def test_nothing_is_kept_where_weights_cannot_be_told(tmp_path: Path) -> None:
    partial = PartialScores(tmp_path, "rl", None, CONFIG)
    partial.add(RESCORED.scores)
    partial.remove()
    assert PartialScores(tmp_path, "rl", None, CONFIG).scores == () and list(tmp_path.iterdir()) == []


def write_checkpoint(root: Path, weights: bytes) -> None:
    """The end of stage 0, with a file of these bytes."""
    directory = root / "stage_0_step_000002"
    directory.mkdir(exist_ok=True)
    (directory / "weights").write_bytes(weights)
    files = {"weights": Recorded(len(weights), hashlib.sha256(weights).hexdigest())}
    saved = SavedState(
        path=directory, progress={"stage": 0, "step": 2}, optimizer_steps=2, recipe={}, recipe_digest="", model={},
        layout={}, files=files,
    )  # fmt: skip
    write_state(saved, versions={})


def test_weights_are_told_by_the_checkpoint_before_the_stage(tmp_path: Path) -> None:
    recipe = Recipe(name="r", model=ModelConfig(hf_path="m"), stages=(stage(), stage(), stage()))
    first = weights_key(tmp_path, stage=0, recipe=recipe, data="d")
    assert first is not None and first != weights_key(tmp_path, stage=0, recipe=recipe, data="other")
    # nothing is saved yet
    assert weights_key(tmp_path, stage=1, recipe=recipe, data="d") is None
    keys = []
    for weights in (b"1", b"2"):
        write_checkpoint(tmp_path, weights)
        keys.append(weights_key(tmp_path, stage=1, recipe=recipe, data="d"))
    assert None not in keys and len({first, *keys}) == 3
    # what is done with the rates is not part of them, how they are measured is
    for changes, is_same in (
        ({"rescore": RescoreConfig(samples=4)}, True),
        ({"iterations": 9}, True),
        ({"rescore": RescoreConfig(samples=5)}, False),
        ({"sampling": SamplingConfig(max_response_tokens=9)}, False),
    ):
        other = replace(recipe, stages=(stage(), stage(**changes)))
        assert (weights_key(tmp_path, stage=1, recipe=other, data="d") == keys[-1]) is is_same
    # it is not the end of the stage before that one
    assert weights_key(tmp_path, stage=2, recipe=recipe, data="d") is None


def data(count: int = 8) -> RlData:
    prompts = tuple(
        Prompt(id=f"p{i}", messages=[{"role": "user", "content": "1"}], answer=1, meta={"pass_rate": 0.0})
        for i in range(count)
    )
    return RlData(
        prompts=PromptSet(prompts=prompts, token_ids={p.id: (1, 2) for p in prompts}, dropped={}),
        eval_sets={},
        sampler=CurriculumSampler(prompts, [], 1),
    )


def stage(**changes: object) -> RlStage:
    plain = RlStage(
        kind="rl", prompts="p.jsonl", rewards={"math_answer": 1.0}, iterations=2, prompts_per_iteration=2, group_size=2,
        sampling=SamplingConfig(max_response_tokens=8), optimizer=OptimizerConfig(lr=1e-3), rescore=CONFIG,
    )  # fmt: skip
    return replace(plain, **changes)


def test_a_stage_draws_from_what_is_left_by_the_measured_rates() -> None:
    windows = (
        CurriculumWindow(iterations=1, pass_rate=(0.6, 0.9)), CurriculumWindow(iterations=1, pass_rate=(0.2, 0.5)),
    )  # fmt: skip
    # the rates of the rows do not count any more
    rates = {"p1": 0.75, "p3": 0.25, "p4": 0.7, "p6": 0.5}
    left = narrowed(data(), stage(curriculum=windows), rates, run_seed=1, stage_index=0)
    assert [prompt.id for prompt in left.prompts.prompts] == ["p1", "p3", "p4", "p6"]
    assert {prompt.id for prompt in left.sampler.take(0, 2)} == {"p1", "p4"}
    assert {prompt.id for prompt in left.sampler.take(1, 2)} == {"p3", "p6"}


@pytest.mark.parametrize(
    ("rates", "message"), [({}, "left no prompt"), ({"p1": 0.5}, "draws from 1 prompts, fewer")]
)
def test_too_few_prompts_left_are_an_error_that_says_what_to_widen(
    rates: dict[str, float], message: str
) -> None:
    with pytest.raises(DataError, match=rf"p\.jsonl: .*{message}.*widen"):
        narrowed(data(), stage(), rates, run_seed=1, stage_index=0)

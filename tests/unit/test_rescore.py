"""What re-scoring makes of graded groups, and that a resumed stage gets it back to the byte."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_rl.data.curriculum import CurriculumSampler
from megatron_rl.data.prompts import PromptSet
from megatron_rl.data.types import Prompt, Verdict
from megatron_rl.errors import CheckpointError, DataError
from megatron_rl.recipe.batch import RescoreConfig
from megatron_rl.recipe.stages import CurriculumWindow, OptimizerConfig, RlStage, SamplingConfig
from megatron_rl.train.rescore import Rescored, read_rescored, score_group, write_rescored
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

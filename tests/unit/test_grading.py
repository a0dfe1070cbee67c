"""What a run says of verdicts that training cannot use."""

import json
from dataclasses import replace

from megatron_rl.data.types import Verdict
from megatron_rl.train.grading import BAD_GOLDS_FILE, BadGolds, unanswered_notice
from tests.helpers.rollouts import group

N, T, W, B = Verdict.NO_ANSWER, Verdict.TRUNCATED, Verdict.WRONG, Verdict.BAD_GOLD


def test_a_batch_without_any_answer_is_said_once_with_what_to_look_at():
    groups = [group("a", [N, T]), group("b", [N, N])]
    reason = "no closed box after the reasoning"
    told = [
        replace(each, rollouts=[replace(r, reward=replace(r.reward, reason=reason)) for r in each.rollouts])
        for each in groups
    ]
    notice = unanswered_notice(told)
    assert notice.startswith(
        f"warning: none of 4 responses holds an answer (1 cut off; most often: {reason})"
    )
    assert "\n" not in notice


def test_one_answer_is_enough_to_say_nothing():
    assert unanswered_notice([group("a", [N, T]), group("b", [N, W])]) == ""
    assert unanswered_notice([]) == ""


def test_a_bad_gold_is_listed_once_by_id_also_after_a_restart(tmp_path):
    groups = [group("a", [B, B]), group("b", [W, W])]
    assert BadGolds(tmp_path).note(groups) == 1
    assert BadGolds(tmp_path).note([*groups, group("c", [B, B])]) == 1
    lines = [json.loads(line) for line in (tmp_path / BAD_GOLDS_FILE).read_text().splitlines()]
    assert [line["id"] for line in lines] == ["a", "c"]

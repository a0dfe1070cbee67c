"""Two runs compared, and where the second one is killed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_rl.recipe.load import load_recipe
from megatron_rl.train.phases import Phase
from megatron_rl.verify.kills import Moment, draw_moments, is_due
from megatron_rl.verify.resume import report
from megatron_rl.verify.runs import RunRecord, across_faults, exact_faults, steps_table
from megatron_rl.verify.table import NOT_RUN, PROVEN, REFUTED, cut
from tests.helpers.recipes import write_recipe

SFT = [
    {
        "step": n,
        "stage": "sft",
        "time_s": 0.1 * n,
        "sft/loss": 2.0 / n,
        "sft/grad_norm": 1.0,
        "optim/lr": 1e-3,
    }
    for n in range(1, 4)
]
RL = [
    {
        "step": 4,
        "stage": "rl",
        "iteration": 1,
        "policy/loss": 0.1,
        "policy/grad_norm": 0.2,
        "time/train_s": 1.0,
    }
]
RUN = RunRecord(lines=[*SFT, *RL], rollouts={"iter_000001.jsonl": "abcdef0123"}, model="00ff")


def changed(index: int, **values: object) -> RunRecord:
    lines = [dict(line) for line in RUN.lines]
    lines[index] |= values
    return replace(RUN, lines=lines)


def test_only_wall_time_may_differ() -> None:
    clock = {"time_s": 9.0, "time/train_s": 9.0, "sync/parity_s": 1.0, "throughput/tokens_per_s": 5.0}
    assert exact_faults(RUN, changed(3, **clock)) == []


@pytest.mark.parametrize("name", ["sft/loss", "optim/lr", "sft/grad_norm"])
def test_one_number_of_one_step_is_a_fault_that_names_both(name: str) -> None:
    (fault,) = exact_faults(RUN, changed(1, **{name: 0.25}))
    assert fault.startswith(f"step 2 (sft): {name} ") and fault.endswith("became 0.25")


def test_a_metric_that_is_new_or_gone_is_a_fault() -> None:
    assert "policy/kl" in exact_faults(RUN, changed(3, **{"policy/kl": 1.0}))[0]
    assert "policy/kl" in exact_faults(changed(3, **{"policy/kl": 1.0}), RUN)[0]


def test_a_step_twice_or_missing_is_a_fault() -> None:
    twice = replace(RUN, lines=[*RUN.lines, RUN.lines[-1]])
    for other in (twice, replace(RUN, lines=RUN.lines[:-1])):
        assert "not [1, 2, 3, 4] once each" in exact_faults(RUN, other)[0]


def test_rollouts_and_weights_are_compared_by_their_bytes() -> None:
    (fault,) = exact_faults(RUN, replace(RUN, rollouts={"iter_000001.jsonl": "else"}))
    assert "1 of 1 rollout files differ, the first is iter_000001.jsonl" in fault
    (fault,) = exact_faults(RUN, replace(RUN, model="ff00"))
    assert fault == "the final weights differ: 00ff became ff00"


def test_another_layout_is_exact_before_and_within_the_bounds_after_it_began() -> None:
    sft = replace(RUN, lines=SFT)

    def off(index: int, by: float) -> list[str]:
        lines = [dict(line) for line in SFT]
        lines[index]["sft/loss"] += by
        return across_faults(sft, replace(sft, lines=lines), resumed_after=1)

    assert off(0, 1e-9) and not off(1, 5e-7) and off(1, 5e-6) and not off(2, 5e-6) and off(2, 1e-3)


def test_the_table_has_a_line_per_step_and_is_cut_in_the_middle() -> None:
    lines = steps_table(RUN, changed(1, **{"sft/loss": 0.25}), across=False)
    assert len(lines) == 5 and "values equal" in lines[1] and "1 of 5 values differ" in lines[2]
    assert "abcdef01" in lines[4]
    assert cut([str(n) for n in range(100)], limit=5) == ["0", "1", "  ... 96 lines more ...", "98", "99"]
    assert cut(["a", "b"], limit=2) == ["a", "b"]


def test_the_verdict_is_an_exit_code_and_says_when_rl_proved_nothing(tmp_path, capsys) -> None:
    recipe = load_recipe(write_recipe(tmp_path)).recipe
    common = {"recipe": recipe, "kills": 2, "other": None, "resumed_after": 0}
    assert report(RUN, RUN, **common) == PROVEN
    assert "4 steps and 1 files of rollouts are bit for bit the same after 2 kills" in capsys.readouterr().out
    assert report(RUN, replace(RUN, model="ff"), **common) == REFUTED
    idle = changed(3, **{"policy/grad_norm": 0.0})
    assert report(idle, idle, **common) == NOT_RUN
    assert "no iteration of RL changed the weights" in capsys.readouterr().out


def test_a_record_is_read_from_a_run_directory(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in RUN.lines))
    for name in ("rollouts/iter_000001.jsonl", "model/model.safetensors"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("x")
    record = RunRecord.read(tmp_path)
    assert (
        record.lines == RUN.lines
        and len(record.model) == 64
        and list(record.rollouts) == ["iter_000001.jsonl"]
    )


def test_moments_follow_from_the_seed_in_the_order_of_the_run_and_reach_every_stage(tmp_path: Path) -> None:
    recipe = load_recipe(write_recipe(tmp_path)).recipe
    moments = draw_moments(recipe, kills=6, seed=3)
    assert moments == draw_moments(recipe, kills=6, seed=3) != draw_moments(recipe, kills=6, seed=4)
    # nothing is saved in between
    assert all(m.step % 5 == 0 or m.step == 6 for m in moments if m.phase == "save")
    assert [m.stage for m in moments] == sorted(m.stage for m in moments) and {m.stage for m in moments} == {
        0,
        1,
    }


def phase(stage: str, step: int, name: str) -> Phase:
    return Phase(stage=stage, step=step, phase=name, since=0.0, pid=1, host="")


@pytest.mark.parametrize(
    ("now", "due"),
    [
        (phase("", 0, "load"), False),
        (phase("sft", 9, "save"), False),
        (phase("rl", 2, "train"), False),
        (phase("rl", 3, "generate"), False),
        (phase("rl", 3, "train"), True),
        (phase("rl", 4, "generate"), True),
        (phase("rl", 3, "export"), True),
        (phase("sft", 9, "stop"), False),
    ],
)
def test_a_moment_is_due_in_its_phase_or_once_it_was_missed(now: Phase, due: bool) -> None:
    moment = Moment(stage=1, step=3, phase="train", delay_s=0.0)
    assert is_due(moment, now, ["sft", "rl"]) is due


def test_a_moment_before_the_first_step_needs_no_step() -> None:
    assert is_due(
        Moment(stage=1, step=3, phase="engines", delay_s=0.0), phase("", 0, "engines"), ["sft", "rl"]
    )

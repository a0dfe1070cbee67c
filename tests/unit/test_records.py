"""What a run leaves in its directory, also when it is stopped and continued."""

import json

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_rl.data.types import Completion, Finish, Prompt, RewardResult, Rollout, Verdict
from megatron_rl.errors import DataError, TrainingError
from megatron_rl.evaluation.result import EvalProblem, EvalResult
from megatron_rl.train.board import Board
from megatron_rl.train.records import RunRecords
from tests.helpers.full_disk import files_limited_to


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def log(records, *steps):
    for step in steps:
        records.log_step({"sft/loss": 1.0 / (step + 1)}, stage="sft", iteration=step + 1, step=step)


def sync(records, step, *, version=None, stage="rl", gap=1e-6):
    record = {"weight_version": step if version is None else version, "max": gap}
    records.write_sync(record, stage=stage, iteration=step, step=step)


def syncs(path):
    return json.loads((path / "parity.json").read_text())


def evaluation(iteration):
    problems = (EvalProblem(id="a", num_correct=1, num_samples=4, difficulty=2),)
    return EvalResult(name="heldout", iteration=iteration, samples=4, problems=problems)


def rollout(text, *, finish=Finish.STOP):
    return Rollout(
        prompt=Prompt(id="p1", messages=[{"role": "user", "content": "4+7"}], answer="11", difficulty=2),
        prompt_token_ids=[1],
        sample_index=3,
        completion=Completion(token_ids=[5, 6], logprobs=[-0.1, -0.2], finish=finish, weight_version=12),
        text=text,
        reward=RewardResult(
            score=1.1, parts={"math_answer": 1.0, "format": 1.0}, verdict=Verdict.CORRECT, task_score=1.0
        ),
    )


def test_every_step_is_one_line_readable_at_once(tmp_path):
    records = RunRecords(tmp_path)
    records.log_step({"reward/mean": 0.5}, stage="rl", iteration=1, step=0)
    (line,) = lines(tmp_path / "metrics.jsonl")
    assert line.pop("time_s") >= 0
    assert line == {"stage": "rl", "iteration": 1, "step": 0, "reward/mean": 0.5}
    records.close()
    records.close()


def test_the_step_axis_never_goes_backwards(tmp_path):
    records = RunRecords(tmp_path)
    log(records, 0, 1)
    for step in (1, 0):
        with pytest.raises(TrainingError, match=f"step {step} after step 1"):
            log(records, step)
    records.close()
    continued = RunRecords(tmp_path)
    with pytest.raises(TrainingError, match="step 1 after step 1"):
        log(continued, 1)
    continued.close()


def test_numbers_that_are_not_finite_become_null_and_the_next_line_counts_them(tmp_path):
    records = RunRecords(tmp_path)
    sync(records, 0, gap=float("inf"))
    sync(records, 1, gap=float("nan"))
    metrics = {"a": float("nan"), "b": float("-inf"), "c": 1.0}
    assert records.log_step(metrics, stage="rl", iteration=1, step=0) == 4
    assert records.log_step({"c": 1.0}, stage="rl", iteration=2, step=1) == 0
    records.close()
    bad, good = lines(tmp_path / "metrics.jsonl")
    assert (bad["a"], bad["b"], bad["c"], bad["records/not_finite"]) == (None, None, 1.0, 4)
    assert "records/not_finite" not in good
    assert [record["max"] for record in syncs(tmp_path)] == [None, None]


def test_what_a_killed_process_had_not_finished_is_removed(tmp_path):
    (tmp_path / "rollouts").mkdir()
    half = [tmp_path / ".parity.json.7.tmp", tmp_path / "rollouts" / ".iter_000001.jsonl.7.tmp"]
    for path in half:
        path.write_text("[{")
    RunRecords(tmp_path, last_step=0).close()
    assert [path for path in half if path.exists()] == []


def test_parity_json_is_whole_after_every_transfer(tmp_path):
    records = RunRecords(tmp_path)
    for step in range(3):
        sync(records, step)
        assert [record["step"] for record in syncs(tmp_path)] == list(range(step + 1))
    assert syncs(tmp_path)[2] == {"stage": "rl", "iteration": 2, "step": 2, "weight_version": 2, "max": 1e-6}
    records.close()


def test_a_resumed_run_records_each_transfer_once(tmp_path):
    records = RunRecords(tmp_path)
    sync(records, 2, version=7, stage="rl1")
    for step in (2, 3, 4, 5):
        sync(records, step, version=2 * step, stage="rl2")
    records.close()
    resumed = RunRecords(tmp_path, last_step=4)
    # what the checkpoint holds is transferred again, to new engines
    sync(resumed, 4, version=8, stage="rl2", gap=2e-6)
    sync(resumed, 5, version=10, stage="rl2")
    resumed.close()
    keys = [(record["stage"], record["step"], record["weight_version"]) for record in syncs(tmp_path)]
    assert keys == [("rl1", 2, 7), ("rl2", 2, 4), ("rl2", 3, 6), ("rl2", 4, 8), ("rl2", 5, 10)]
    assert syncs(tmp_path)[3]["max"] == 2e-6


def test_a_transfer_that_cannot_be_recorded_leaves_the_others(tmp_path):
    records = RunRecords(tmp_path)
    sync(records, 0)
    before = (tmp_path / "parity.json").read_bytes()
    with files_limited_to(len(before) + 20), pytest.raises(TrainingError, match=r"parity\.json: cannot be"):
        sync(records, 1)
    assert (tmp_path / "parity.json").read_bytes() == before
    records.close()


def test_a_resumed_run_drops_what_its_checkpoint_does_not_know(tmp_path):
    records = RunRecords(tmp_path)
    log(records, 0, 1, 2)
    records.write_eval(evaluation(3), board=True)
    log(records, 3, 4)
    records.write_eval(evaluation(5), board=True)
    records.close()
    resumed = RunRecords(tmp_path, last_step=2)
    assert resumed.last_step == 2
    log(resumed, 3)
    resumed.close()
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [0, 1, 2, 3]
    assert [line["iteration"] for line in lines(tmp_path / "eval.jsonl")] == [3]


def test_a_resumed_run_drops_rollouts_that_it_will_write_again(tmp_path):
    records = RunRecords(tmp_path)
    for iteration in (1, 2, 3, 4):
        records.write_rollouts(iteration, [rollout("x")])
    records.close()
    RunRecords(tmp_path, last_step=12, last_iteration=2).close()
    names = sorted(path.name for path in (tmp_path / "rollouts").iterdir())
    assert names == ["iter_000001.jsonl", "iter_000002.jsonl"]


def test_tokens_of_rollouts_are_dropped_with_the_rollouts(tmp_path):
    records = RunRecords(tmp_path)
    for iteration in (1, 2):
        records.write_tokens(iteration, [{"tokens": ["a\u2028", "\udc80"], "logprobs": [-0.5, float("nan")]}])
    records.close()
    RunRecords(tmp_path, last_step=12, last_iteration=1).close()
    (path,) = (tmp_path / "rollouts").iterdir()
    assert path.name == "tokens_iter_000001.jsonl"
    assert json.loads(path.read_bytes()) == {"tokens": ["a\u2028", "\udc80"], "logprobs": [-0.5, None]}


def test_every_resume_that_makes_a_step_is_recorded_with_it(tmp_path):
    records = RunRecords(tmp_path)
    log(records, 1, 2, 3)
    records.close()
    assert not (tmp_path / "starts.jsonl").exists()
    for last in (3, 2):
        resumed = RunRecords(tmp_path, last_step=last)
        log(resumed, last + 1, last + 2)
        resumed.close()
    # the second one began before what the first had done
    assert [line["step"] for line in lines(tmp_path / "starts.jsonl")] == [3]


def test_a_stage_that_begins_again_repeats_its_starting_point(tmp_path):
    records = RunRecords(tmp_path)
    log(records, 0, 1, 2)
    records.write_eval(evaluation(0), board=True)
    records.close()
    resumed = RunRecords(tmp_path, last_step=2)
    resumed.write_eval(evaluation(0), board=True)
    log(resumed, 3)
    resumed.close()
    later = RunRecords(tmp_path, last_step=3)
    later.close()
    assert [line["iteration"] for line in lines(tmp_path / "eval.jsonl")] == [0]


@pytest.mark.parametrize("checkpoint", [0, 2])
def test_the_board_of_a_resumed_run_holds_each_step_once(tmp_path, checkpoint):
    records = RunRecords(tmp_path)
    log(records, 1, 2, 3)
    records.close()
    resumed = RunRecords(tmp_path, last_step=checkpoint)
    log(resumed, *range(checkpoint + 1, 5))
    resumed.close()
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [event.step for event in board.Scalars("sft/loss")] == [1, 2, 3, 4]


def test_the_board_shows_lengths_rewards_a_rollout_and_accuracy_by_difficulty(tmp_path):
    records = RunRecords(tmp_path)
    records.write_rollouts(1, [rollout("a</script>\u2028*b*"), rollout("b")])
    records.log_step({"reward/mean": 0.5}, stage="rl", iteration=1, step=1)
    records.log_step({"reward/mean": 0.5}, stage="rl", iteration=2, step=2)
    records.write_eval(evaluation(2))
    records.close()
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    (lengths,) = board.Histograms("rollout/response_tokens")
    assert lengths.step == 1
    assert (lengths.histogram_value.num, list(lengths.histogram_value.bucket)) == (2, [2])
    (shown,) = board.Tensors("rollout/first")
    assert "    a</script>\n    *b*" in shown.tensor_proto.string_val[0].decode()
    assert [event.value for event in board.Scalars("eval/heldout/difficulty 2")] == [0.25]
    assert board.Scalars("eval/heldout/difficulty 2")[0].step == 2


def test_looking_at_a_finished_run_again_writes_nothing(tmp_path):
    records = RunRecords(tmp_path)
    log(records, 1, 2)
    records.close()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    RunRecords(tmp_path, last_step=2, last_iteration=0).close()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_full_disk_is_an_error_naming_the_file_and_leaves_whole_lines(tmp_path, capfd):
    records = RunRecords(tmp_path)
    log(records, 0)
    limit = (tmp_path / "metrics.jsonl").stat().st_size + 10
    with files_limited_to(limit):
        with pytest.raises(TrainingError, match=r"metrics\.jsonl: cannot be written \(File too large\)"):
            log(records, 1)
        with pytest.raises(TrainingError, match=r"iter_000001\.jsonl: cannot be written"):
            records.write_rollouts(1, [rollout("x" * limit)])
        with pytest.raises(TrainingError, match=r"eval\.jsonl: cannot be written"):
            records.write_eval(evaluation(1))
        records.close()
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [0]
    assert list((tmp_path / "rollouts").iterdir()) == []
    assert (tmp_path / "eval.jsonl").read_bytes() == b""
    assert capfd.readouterr().err == ""


def test_an_evaluation_that_a_stage_makes_again_is_on_the_board_once(tmp_path):
    for last_step in (None, 1, 1):
        records = RunRecords(tmp_path, last_step=last_step)
        if last_step is None:
            log(records, 0, 1)
        records.write_eval(evaluation(0), board=True)
        records.close()
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [(event.step, event.value) for event in board.Scalars("eval/heldout/avg_at_k")] == [(1, 0.25)]
    assert [event.step for event in board.Scalars("sft/loss")] == [0, 1]


def test_a_first_evaluation_that_is_made_again_is_on_the_board_once(tmp_path):
    for last_step in (None, 0):
        records = RunRecords(tmp_path, last_step=last_step)
        records.write_eval(evaluation(0), board=True)
        records.close()
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [event.step for event in board.Scalars("eval/heldout/avg_at_k")] == [0]


def test_a_board_on_a_full_disk_raises_where_it_is_written_and_keeps_whole_points(tmp_path, capfd):
    board = Board(tmp_path)
    board.add({"sft/loss": 1.0}, step=1)
    (path,) = tmp_path.iterdir()
    before = path.read_bytes()
    with files_limited_to(len(before) + 10), pytest.raises(OSError, match="File too large"):
        board.add({"sft/loss": 0.5}, step=2)
    board.close()
    assert path.read_bytes() == before
    assert capfd.readouterr().err == ""


def test_time_goes_on_after_a_resume(tmp_path):
    records = RunRecords(tmp_path)
    records.log_step({}, stage="sft", iteration=1, step=0)
    records.close()
    (line,) = lines(tmp_path / "metrics.jsonl")
    (tmp_path / "metrics.jsonl").write_text(json.dumps({**line, "time_s": 1000.0}) + "\n")
    resumed = RunRecords(tmp_path)
    resumed.log_step({}, stage="sft", iteration=2, step=1)
    resumed.close()
    assert lines(tmp_path / "metrics.jsonl")[1]["time_s"] >= 1000.0


def test_a_line_that_was_cut_off_is_dropped(tmp_path):
    records = RunRecords(tmp_path)
    log(records, 0, 1)
    records.close()
    with (tmp_path / "metrics.jsonl").open("a") as stream:
        stream.write('{"stage": "sft", "iterat')
    resumed = RunRecords(tmp_path)
    log(resumed, 2)
    resumed.close()
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [0, 1, 2]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("metrics.jsonl", '{"step": 0, "time_s": 1}\n{"step": \n', r"metrics\.jsonl:2: cannot be read"),
        ("metrics.jsonl", "[1]\n", r"metrics\.jsonl:1: got .* must be a JSON object"),
        (
            "metrics.jsonl",
            '{"stage": "sft"}\n',
            r"metrics\.jsonl: is not as a run writes it \(KeyError: 'step'\)",
        ),
        ("eval.jsonl", '{"step": 1}\n', r"eval\.jsonl: is not as a run writes it \(KeyError: 'iteration'\)"),
        ("parity.json", "[{", r"parity\.json: is not as a run writes it \(JSONDecodeError"),
        ("parity.json", "[1]", r"parity\.json: is not as a run writes it \(TypeError"),
    ],
)
def test_a_record_that_somebody_broke_is_an_error_naming_it(tmp_path, name, content, words):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=words):
        RunRecords(tmp_path, last_step=3)
    assert (tmp_path / name).read_text() == content


def test_records_that_do_not_reach_the_checkpoint_are_told_of(tmp_path):
    records = RunRecords(tmp_path)
    log(records, 1, 2, 3)
    records.close()
    assert RunRecords(tmp_path, last_step=3).missing_up_to(3) == ""
    assert "ends at step 3 and the checkpoint is of step 5" in RunRecords(
        tmp_path, last_step=5
    ).missing_up_to(5)


def test_rollouts_keep_any_text_a_model_can_write(tmp_path):
    records = RunRecords(tmp_path)
    texts = ["\\boxed{11}\n\u2028 é 偶", "\udc80 lone", '"quotes" \x00']
    path = records.write_rollouts(12, [rollout(text, finish=Finish.LENGTH) for text in texts])
    records.close()
    assert path == tmp_path / "rollouts" / "iter_000012.jsonl"
    # split at line breaks alone: U+2028 is no end of a JSON line
    found = [json.loads(line) for line in path.read_bytes().split(b"\n") if line]
    assert [line["completion"] for line in found] == texts
    assert found[0] | {"completion": ""} == {
        "prompt": "4+7", "completion": "", "reward": 1.1, "parts": {"math_answer": 1.0, "format": 1.0},
        "finish": "length", "weight_version": 12, "verdict": "correct", "reason": "", "prompt_id": "p1",
        "sample_index": 3, "difficulty": 2, "num_tokens": 2, "gold": "11",
    }  # fmt: skip


def test_whole_files_leave_nothing_half_written_beside_them(tmp_path):
    records = RunRecords(tmp_path)
    records.write_recipe("name: demo\n")
    records.write_plan('{"transfers": [1, 2]}')
    records.write_rollouts(1, [rollout("x")])
    records.close()
    assert (tmp_path / "recipe.resolved.yaml").read_text() == "name: demo\n"
    assert json.loads((tmp_path / "plan.json").read_text()) == {"transfers": [1, 2]}
    assert not list(tmp_path.rglob("*.tmp"))


def test_the_board_holds_the_same_numbers(tmp_path):
    records = RunRecords(tmp_path)
    log(records, 0, 1)
    records.write_eval(evaluation(0), board=True)
    records.close()
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [(event.step, event.value) for event in board.Scalars("sft/loss")] == [(0, 1.0), (1, 0.5)]
    assert [(event.step, event.value) for event in board.Scalars("eval/heldout/avg_at_k")] == [(1, 0.25)]


def test_a_metric_may_not_take_the_name_of_a_fixed_key(tmp_path):
    records = RunRecords(tmp_path)
    with pytest.raises(TrainingError, match="metric 'step' has the name of a fixed key"):
        records.log_step({"step": 1.0}, stage="sft", iteration=1, step=0)
    records.close()

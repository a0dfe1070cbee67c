"""The final table, from the run directory alone."""

from pathlib import Path

from megatron_rl.evaluation.result import EvalProblem, EvalResult
from megatron_rl.report.page import write_report
from megatron_rl.train.records import RunRecords
from megatron_rl.train.summary import sparkline, summary_text


def evaluation(iteration, num_easy, num_hard):
    problems = tuple(
        EvalProblem(id=f"{difficulty}-{n}", num_correct=num, num_samples=4, difficulty=difficulty)
        for difficulty, num in ((2, num_easy), (7, num_hard))
        for n in range(10)
    )
    return EvalResult(name="heldout", iteration=iteration, samples=4, problems=problems)


def write_run(path: Path):
    records = RunRecords(path)
    for step in range(5):
        metrics = {
            "sft/loss": 2.0 - 0.1 * step,
            "time/train_s": 2.0,
            "time/other_s": 0.5,
            "time/iteration_s": 2.5,
        }
        records.log_step(metrics, stage="sft", iteration=step + 1, step=step)
    records.write_eval(evaluation(0, 2, 0), stage="rl")
    for step in range(5, 15):
        metrics = {
            "reward/mean": 0.2 + 0.05 * (step - 4),
            "time/generate_s": 3.0,
            "policy/loss": float("nan"),
        }
        records.log_step(metrics, stage="rl", iteration=step - 4, step=step)
    records.write_eval(evaluation(10, 4, 1), stage="rl")
    records.write_recipe("name: demo # <&>\n")
    records.close()


def test_summary_shows_before_and_after_per_band_from_the_sft_starting_point(tmp_path):
    write_run(tmp_path)
    rows = [line.split() for line in summary_text(tmp_path).splitlines()]
    assert ["difficulty", "problems", "step", "4", "step", "14", "change"] in rows
    assert ["2", "10", "50.0", "(0.0)", "100.0", "(0.0)", "+50.0"] in rows
    assert ["7", "10", "0.0", "(0.0)", "25.0", "(0.0)", "+25.0"] in rows
    assert ["all", "20", "25.0", "(5.7)", "62.5", "(8.6)", "+37.5"] in rows


def test_summary_shows_the_reward_curve_the_spans_and_the_paths(tmp_path):
    write_run(tmp_path)
    report = write_report(tmp_path)
    text = summary_text(tmp_path)
    assert "▁" in text
    assert "0.250 -> 0.700 over 10 iterations" in text
    assert "generate 30s (71%), train 10s (24%), other 2s (6%)" in text
    assert str(report) in text


def test_sparkline_runs_from_the_smallest_to_the_largest():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([5.0, 5.0]) == "▁▁"
    assert sparkline([]) == ""
    assert len(sparkline(list(range(1000)), width=40)) == 40


def test_rewards_of_different_stages_are_not_one_curve(tmp_path):
    records = RunRecords(tmp_path)
    for step in range(1, 5):
        metrics = {"reward/mean": 0.1 * step if step <= 2 else 0.8}
        records.log_step(metrics, stage="rl1" if step <= 2 else "rl2", iteration=(step - 1) % 2 + 1, step=step)
    records.close()
    lines = [line for line in summary_text(tmp_path).splitlines() if line.startswith("reward")]
    assert [line.split()[1] for line in lines] == ["rl1", "rl2"]
    assert lines[0].endswith("0.100 -> 0.200 over 2 iterations")
    assert lines[1].endswith("0.800 -> 0.800 over 2 iterations")

"""The final table and the report, both from the run directory alone."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from megatron_rl.data.types import Completion, Finish, Prompt, RewardResult, Rollout, Verdict
from megatron_rl.errors import DataError
from megatron_rl.evaluation.result import EvalProblem, EvalResult
from megatron_rl.train.records import RunRecords
from megatron_rl.train.report import write_report
from megatron_rl.train.summary import sparkline, summary_text

VOID = {"meta", "br", "hr", "img", "line", "circle", "rect", "polyline"}


class Page(HTMLParser):
    """Checks that every tag closes where it should, and collects tags, attributes and text."""

    def __init__(self, source):
        super().__init__()
        self.open, self.tags, self.attributes, self.words = [], [], [], []
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes.extend(attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes.extend(attrs)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self):
        return "".join(self.words)


def evaluation(iteration, num_easy, num_hard):
    problems = tuple(
        EvalProblem(id=f"{difficulty}-{n}", num_correct=num, num_samples=4, difficulty=difficulty)
        for difficulty, num in ((2, num_easy), (7, num_hard))
        for n in range(10)
    )
    return EvalResult(name="heldout", iteration=iteration, samples=4, problems=problems)


def rollout(text, index):
    return Rollout(
        prompt=Prompt(id="p", messages=[{"role": "user", "content": "is 1 < 2 & 3?"}], answer="1"),
        prompt_token_ids=[1],
        sample_index=index,
        completion=Completion(token_ids=[1], logprobs=[0.0], finish=Finish.STOP, weight_version=3),
        text=text,
        reward=RewardResult(score=0.0, parts={"math_answer": 0.0}, verdict=Verdict.WRONG, task_score=0.0),
    )


def write_run(path: Path, *, rollouts=()):
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
    if rollouts:
        records.write_rollouts(10, rollouts)
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


def test_report_is_one_well_formed_file_that_loads_nothing(tmp_path):
    write_run(tmp_path, rollouts=[rollout("text", n) for n in range(64)])
    page = Page(write_report(tmp_path).read_text())
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    assert not [
        value for name, value in page.attributes if name in {"src", "href"} or "url(" in (value or "")
    ]
    assert page.tags.count("svg") >= 4
    assert page.tags.count("details") == 20 + 1


def test_report_holds_tables_curves_spans_and_recipe(tmp_path):
    write_run(tmp_path)
    text = Page(write_report(tmp_path).read_text()).text
    for words in ("heldout: avg@4, %", "+37.5", "Reward", "SFT loss", "Time per span", "name: demo # <&>"):
        assert words in text
    assert "Policy loss" not in text, "a metric without one finite value has no chart"


def test_what_a_model_wrote_is_shown_and_never_run(tmp_path):
    hostile = "</pre><script>alert(1)</script><img src=x onerror=alert(2)> &amp; \udc80"
    write_run(tmp_path, rollouts=[rollout(hostile, 0), rollout("a" * 20_000 + "THE END", 1)])
    page = Page(write_report(tmp_path).read_text())
    assert "script" not in page.tags
    assert "<script>alert(1)</script>" in page.text
    assert "&amp;" in page.text
    assert "THE END" in page.text


def test_curves_stay_inside_their_frame(tmp_path):
    write_run(tmp_path)
    source = write_report(tmp_path).read_text()
    lines = re.findall(r'<polyline points="([^"]+)"', source)
    assert lines
    for x, y in (pair.split(",") for line in lines for pair in line.split()):
        assert 0 <= float(x) <= 420
        assert 0 <= float(y) <= 190


def test_a_run_that_has_just_begun_has_a_report(tmp_path):
    RunRecords(tmp_path).close()
    Page(write_report(tmp_path).read_text())
    assert summary_text(tmp_path)


def test_a_directory_without_a_run_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r"no metrics\.jsonl there"):
        write_report(tmp_path)


def test_a_broken_record_is_an_error_that_names_the_line(tmp_path):
    write_run(tmp_path)
    with (tmp_path / "eval.jsonl").open("a") as stream:
        stream.write("{broken\n")
    with pytest.raises(DataError, match=r"eval\.jsonl:3: cannot be read"):
        write_report(tmp_path)


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

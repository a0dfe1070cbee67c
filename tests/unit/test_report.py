"""The page of a run, read as a file: what it holds, that plotly takes its figures, and that nothing in it can run."""

import json

import plotly.graph_objects as go
import pytest

from megatron_rl.cli import main
from megatron_rl.errors import DataError, MegatronRLError
from megatron_rl.report import reader
from megatron_rl.report.heat import difficulty_bands
from megatron_rl.report.page import inert_json, write_report
from megatron_rl.report.series import moving_mean, thin
from megatron_rl.report.source import short_names
from megatron_rl.train.records import RunRecords
from tests.helpers.recorded_run import HOSTILE, RL_ITERATIONS, SFT_STEPS, record_run
from tests.helpers.report_page import Page


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return record_run(tmp_path_factory.mktemp("runs") / "demo")


@pytest.fixture(scope="module")
def page(run):
    return Page(write_report(run))


def test_a_page_loads_nothing_and_lets_only_its_own_scripts_run(page):
    assert not {"link", "img", "iframe", "object", "embed"} & set(page.tags)
    addresses = [value for name, value in page.attributes if name in {"src", "href", "action"}]
    assert all(value.startswith("#") for value in addresses)
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    policy = next(value for _, value in page.attributes if "default-src" in (value or ""))
    assert "default-src 'none'" in policy and policy.count("sha256-") == 3
    assert page.tags.count("script") == 4


def test_what_a_model_wrote_is_json_in_which_no_tag_can_end(page):
    found = [rollout["text"] for rollout in page.data["rollouts"] if "hacked" in rollout["text"]]
    assert set(found) == {f"<think>{HOSTILE}</think>{HOSTILE}"}
    for character in "<>&\u2028\udc80":
        assert character not in page.scripts[0]
    assert inert_json({"a": "</script>"}) == '{"a":"\\u003c/script\\u003e"}'


def test_plotly_accepts_every_figure(page, tmp_path):
    record_run(tmp_path / "other", seed=2)
    both = Page(write_report([tmp_path / "other", record_run(tmp_path / "third")], tmp_path / "both.html"))
    for figures in (page.data["figures"], both.data["figures"], list(page.data["metrics"].values())):
        assert len(figures) >= 18
        for figure in figures:
            go.Figure(figure)
            axis = figure["layout"]["yaxis"]["title"]["text"]
            assert axis, "every axis says its unit"


def test_a_curve_has_its_band_and_breaks_between_stages(page):
    band, curve = page.figure("reward")["data"]
    assert band["fill"] == "toself"
    assert curve["x"].index(None) == 8, "the first RL stage has eight iterations"
    assert [x for x in curve["x"] if x] == [SFT_STEPS + i for i in range(1, RL_ITERATIONS + 1)]
    first = curve["y"][0]
    assert band["y"][0] == pytest.approx(first + 0.3, rel=1e-3)
    evaluated = page.figure("share of right answers")["data"]
    assert [trace["name"] for trace in evaluated] == ["avg@4 band", "avg@4"]


def test_what_happened_is_marked_on_every_curve(page):
    layout = page.figure("reward")["layout"]
    signs = [note["text"] for note in layout["annotations"]]
    # the restart is counted from the start of a stage on, and seen once
    assert [signs.count(sign) for sign in ("rl1", "rl2 ✕", "↻", "✕", "★")] == [1, 1, 1, 1, 1]
    assert len({note["x"] for note in layout["annotations"]}) == len(signs), "none lies on another"
    resumed = next(note for note in layout["annotations"] if note["text"] == "↻")
    assert resumed["x"] == SFT_STEPS + RL_ITERATIONS // 2


def test_the_heat_map_counts_right_answers_by_difficulty_and_iteration(page):
    heat = next(one["data"][0] for one in page.data["figures"] if one["data"][0]["type"] == "heatmap")
    assert heat["y"] == ["2", "3", "5"]
    assert len(heat["x"]) == RL_ITERATIONS
    assert heat["customdata"][0] == [8.0] * RL_ITERATIONS
    # of a run with seed 1, in iteration 1 the rollouts 1, 4, 7 and so on are right: those of difficulty 3
    assert [row[0] for row in heat["z"]] == [0.0, 1.0, 0.0]


def test_the_recipe_says_what_set_each_value(page):
    assert "run.seed" in page.text and "override" in page.text
    assert "stages.1.algorithm.surrogate" in page.text


def test_rollouts_have_gold_reason_and_tokens(page):
    one = next(rollout for rollout in page.data["rollouts"] if rollout["tokens"])
    assert one["gold"] == "2" and one["prompt"] == "2+0=?"
    assert one["tokens"]["tokens"][4] == "</script>"
    assert len(one["tokens"]["logprobs"]) == len(one["tokens"]["tokens"])


def test_numbers_of_overlap_stand_where_their_units_do(tmp_path):
    records = RunRecords(tmp_path)
    late = {"stragglers/late_groups": 3.0, "stragglers/stale_groups": 1.0, "count/dropped_stale": 1.0}
    fresh = {"rollout/staleness_mean": 0.5, "rollout/staleness_max": 1.0, "engine/imbalance": 1.1}
    for step in (1, 2):
        counts = {"count/tokens": 796.0, "count/rollouts": 48.0 * step}
        records.log_step({**late, **fresh, **counts}, stage="rl", iteration=step, step=step)
    records.close()
    page = Page(write_report(tmp_path))
    assert [one["name"] for one in page.figure("transfers")["data"]] == ["mean", "largest"]
    # a ratio that is 1 where engines are even, so no share of anything
    assert [one["y"][:2] for one in page.figure("over their mean")["data"]] == [[1.1, 1.1]]
    assert [one["name"] for one in page.figure("groups per")["data"]] == ["late", "dropped as too old"]
    assert "Busiest engine over the mean" in page.text
    assert "SFT tokens 796" in page.text and "rollouts 96" in page.text


def test_a_run_whose_rollouts_are_all_fresh_has_no_chart_of_staleness(tmp_path):
    records = RunRecords(tmp_path)
    for step in (1, 2):
        fresh = {"rollout/staleness_mean": 0.0, "rollout/staleness_max": 0.0, "mismatch/mean": 1e-6}
        records.log_step(fresh, stage="rl", iteration=step, step=step)
    records.close()
    text = Page(write_report(tmp_path)).text
    assert "Trainer against engine, sampled tokens" in text and "Staleness" not in text


def test_a_response_that_several_weights_sampled_says_which(tmp_path):
    path = record_run(tmp_path) / "rollouts" / f"iter_{RL_ITERATIONS:06d}.jsonl"
    lines = [json.loads(line) for line in path.read_text().split("\n") if line]
    lines[0]["version_runs"] = [[44, 2], [7, 4]]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = [
        one for one in Page(write_report(tmp_path)).data["rollouts"] if one["iteration"] == RL_ITERATIONS
    ]
    assert [one["versions"] for one in found[:2]] == [[[44, 2], [7, 4]], [[None, RL_ITERATIONS]]]


def test_a_comparison_lists_differing_values_alone_and_numbers_per_run(run, tmp_path):
    other = record_run(tmp_path / "other", seed=2, surrogate="grpo")
    path = tmp_path / "both.html"
    assert main(["report", str(run), str(other), "--out", str(path)]) == 0
    page = Page(path)
    overview = page.text.partition("Where the recipes differ")[2].partition("Evaluation")[0]
    assert "run.seed" in overview and "gppo" in overview and "grpo" in overview
    assert "torch_threads" not in overview
    assert page.data["runs"] == ["demo", "other"]
    assert {rollout["run"] for rollout in page.data["rollouts"]} == {0, 1}
    assert "heldout, best, %" in page.text


def test_runs_of_one_name_are_told_apart(tmp_path):
    paths = [tmp_path / "x" / "rl", tmp_path / "y" / "rl", tmp_path / "y" / "rl", tmp_path / "sft"]
    assert short_names(paths) == ["x/rl", "y/rl", "y/rl (2)", "sft"]


def test_a_run_that_has_just_begun_has_a_report(tmp_path):
    RunRecords(tmp_path).close()
    assert Page(write_report(tmp_path)).data["figures"] == []


def test_a_run_that_is_going_on_is_shown_as_far_as_it_has_come(tmp_path):
    record_run(tmp_path)
    for name in ("metrics.jsonl", "eval.jsonl", f"rollouts/iter_{RL_ITERATIONS:06d}.jsonl"):
        path = tmp_path / name
        path.write_bytes(path.read_bytes()[:-30])
    page = Page(write_report(tmp_path))
    assert f"{SFT_STEPS + RL_ITERATIONS - 1} steps" in page.text
    assert len(page.data["rollouts"]) == 24 * RL_ITERATIONS - 1


def test_a_run_of_an_older_version_lacks_fields_and_has_a_report(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"stage": "rl", "iteration": 1, "step": 1, "reward/mean": 0.5}\n'
    )
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "iter_000001.jsonl").write_text(
        '{"prompt": "p", "completion": "c", "reward": 1}\n'
    )
    (tmp_path / "parity.json").write_text('{"version": 1}')
    page = Page(write_report(tmp_path))
    assert page.data["rollouts"][0]["difficulty"] is None
    assert page.figure("reward")["data"][0]["y"] == [0.5]


def test_a_page_of_many_iterations_stays_small_and_keeps_the_peak(tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "MAX_TOKENS", 100)
    records = RunRecords(tmp_path)
    names = [f"some/metric_{index}" for index in range(8)]
    for step in range(1, 1501):
        records.log_step(
            {"reward/mean": 9.0 if step == 1234 else 0.1, **dict.fromkeys(names, 0.5)},
            stage="rl",
            iteration=step,
            step=step,
        )
    records.close()
    page = Page(write_report(tmp_path))
    curve, mean = page.figure("reward")["data"]
    assert len(curve["x"]) <= 600 and max(curve["y"]) == 9.0
    assert len(mean["x"]) <= 200 and max(mean["y"]) == pytest.approx(0.1 + 8.9 / 31, rel=1e-3)
    assert (curve["x"][0], curve["x"][-1]) == (1, 1500)
    assert len(page.scripts[0]) < 1_000_000


def test_no_more_tokens_than_the_bound_of_the_latest_rollouts(tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "MAX_TOKENS", 15)
    rollouts = Page(write_report(record_run(tmp_path))).data["rollouts"]
    assert [one["iteration"] for one in rollouts if one["tokens"]] == [RL_ITERATIONS] * 2


def test_thinning_keeps_ends_and_extremes():
    values = [0.0] * 5000
    values[1711], values[1713] = 5.0, -5.0
    kept = thin(values, 100)
    assert len(kept) <= 100 and {0, 1711, 1713, 4999} <= set(kept)
    assert thin([1.0, 2.0], 100) == [0, 1]


def test_a_moving_mean_has_fewer_values_at_the_ends():
    assert moving_mean([0.0, 3.0, 6.0, 3.0], 3) == [1.5, 3.0, 4.0, 4.5]
    assert moving_mean([], 5) == []


def test_names_of_runs_too_long_for_their_bars_are_cut_and_told_apart(tmp_path):
    runs = [record_run(tmp_path / f"{'long-' * 20}{number}", seed=number) for number in (1, 2)]
    page = Page(write_report(runs, tmp_path / "both.html"))
    axis = page.figure("run")["layout"]["yaxis"]
    assert [len(tick) for tick in axis["ticktext"]] == [24, 24]
    assert [tick[-6:] for tick in axis["ticktext"]] == ["long-1", "long-2"]


def test_many_difficulties_are_bands_of_equal_shares():
    bands = difficulty_bands({float(level) for level in range(40)}, most=10)
    assert list(dict.fromkeys(bands.values()))[:2] == ["0 to 3", "4 to 7"]
    assert len(set(bands.values())) == 10


def test_every_directory_without_a_run_is_named_and_an_output_without_a_place(tmp_path):
    with pytest.raises(MegatronRLError, match=r"(?s)^2 problems\n  \S+/a: no metrics.*\n  \S+/b: no metrics"):
        write_report([tmp_path / "a", tmp_path / "b"])
    with pytest.raises(MegatronRLError, match="is a directory; give the path of a file"):
        write_report(tmp_path / "a", tmp_path)


def test_a_directory_without_a_run_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r"no metrics\.jsonl there"):
        write_report(tmp_path)

"""Records that are torn or not ours, and places where no page may go: the rest is shown, and nothing is lost."""

import copy
import json
import os

import pytest

from megatron_rl.cli import main
from megatron_rl.report.page import write_report
from megatron_rl.train.files import write_atomically
from megatron_rl.train.summary import summary_text
from tests.helpers.recorded_run import RL_ITERATIONS, SFT_STEPS, record_run
from tests.helpers.report_page import Page

ODD = (None, True, "x", [], {}, [1], {"a": 1}, -1, 0, 1e308, 10**400, float("nan"), float("inf"), [None])
TORN = (b"{broken", b"[1]", b"\0" * 99, b"\xff", b"[" * 100_000, b"9" * 5_000)


def mutated(value):
    """`value` with each of its leaves and branches, one at a time, odd or missing."""
    yield from ODD
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in list(items)[:30]:
        for odd in mutated(item):
            other = copy.copy(value)
            other[key] = odd
            yield other
        if isinstance(value, dict):
            yield {name: value[name] for name in value if name != key}


def json_lines(path):
    # no splitlines: it would end a line at what a model wrote
    return [json.loads(line) for line in path.read_text().split("\n") if line]


@pytest.mark.parametrize(
    "name",
    [
        "metrics.jsonl",
        "eval.jsonl",
        "starts.jsonl",
        "parity.json",
        "rollouts/iter_000003.jsonl",
        "rollouts/tokens_iter_000003.jsonl",
    ],
)
def test_no_value_of_a_record_keeps_the_rest_from_being_shown(name, tmp_path):
    path = record_run(tmp_path) / name
    if name == "parity.json":
        lines = json.loads(path.read_text())
        path.write_text(json.dumps([*lines, *mutated(lines[0])]))
    else:
        lines = json_lines(path)
        odd = b"".join(json.dumps(each).encode() + b"\n" for each in mutated(lines[-1]))
        path.write_bytes(path.read_bytes() + odd + b"".join(line + b"\n" for line in TORN))
    page = Page(write_report(tmp_path))
    assert len(page.data["figures"]) >= 18
    assert len(page.data["rollouts"]) > 24 * (RL_ITERATIONS - 1)
    for rollout in page.data["rollouts"]:
        for column in ("rollout_logprobs", "old_logprobs", "logprobs", "clipped"):
            if rollout["tokens"] and rollout["tokens"][column] is not None:
                assert len(rollout["tokens"][column]) == len(rollout["tokens"]["tokens"])
    summary_text(tmp_path)


def test_a_broken_line_is_named_and_left_out(tmp_path, capsys):
    record_run(tmp_path)
    places = []
    for name in ("metrics.jsonl", "eval.jsonl", "starts.jsonl", "rollouts/iter_000003.jsonl"):
        path = tmp_path / name
        lines = path.read_bytes().split(b"\n")
        lines[0] = lines[0][:20]
        path.write_bytes(b"\n".join(lines))
        places.append(f"{path}:1")
    assert main(["report", str(tmp_path)]) == 0
    page, told = Page(tmp_path / "report.html"), capsys.readouterr()
    assert told.out == f"{tmp_path / 'report.html'}\n"
    assert "4 broken records are left out" in told.err and "4 broken records are left out" in page.text
    for place in places:
        assert f"{place}: cannot be read" in told.err and f"{place}: cannot be read" in page.text
    assert f"{SFT_STEPS + RL_ITERATIONS - 1} steps" in page.text


def test_of_many_broken_lines_the_first_are_named_and_all_counted(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text("{broken\n" * 5_000)
    assert main(["report", str(tmp_path)]) == 0
    told = capsys.readouterr().err.splitlines()
    assert told[0] == "5,000 broken records are left out" and told[-1] == "and 4,980 more"
    assert len(told) == 22


def test_many_runs_share_the_bound_of_rollouts(tmp_path):
    run = record_run(tmp_path / "run")
    page = Page(write_report([run] * 50, tmp_path / "all.html"))
    assert 0 < len(page.data["rollouts"]) <= 400


@pytest.mark.parametrize("name", ["metrics.jsonl", "recipe.yaml"])
def test_a_file_that_is_no_page_is_not_replaced(name, tmp_path, capsys):
    run = record_run(tmp_path / "run")
    (run / "recipe.yaml").write_text("name: mine")
    before = (run / name).read_bytes()
    assert main(["report", str(run), "--out", str(run / name)]) == 2
    assert f"error: {run / name}: is there and is no HTML page" in capsys.readouterr().err
    assert (run / name).read_bytes() == before


def test_a_page_and_an_empty_file_are_replaced_and_a_link_stays_one(tmp_path):
    run = record_run(tmp_path / "run")
    (tmp_path / "empty.html").touch()
    (tmp_path / "link.html").symlink_to("empty.html")
    for _ in range(2):
        write_report(run, tmp_path / "link.html")
    assert (tmp_path / "link.html").is_symlink()
    assert len(Page(tmp_path / "empty.html").data["rollouts"]) == 24 * RL_ITERATIONS


def test_a_directory_is_refused_and_what_is_no_file_is_written_to(tmp_path, capsys):
    run = record_run(tmp_path / "run")
    assert main(["report", str(run), "--out", str(tmp_path)]) == 2
    assert f"error: {tmp_path}: is a directory" in capsys.readouterr().err
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_atomically(pipe, b"all of it")
    assert os.read(reader, 99) == b"all of it" and pipe.is_fifo()
    os.close(reader)

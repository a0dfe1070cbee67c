"""Weights & Biases: asked for in the recipe, checked before a run, and never the reason that one fails.

The package is no part of the pinned set; a stand-in takes its place here and writes down what it is told.
"""

import json
import sys
from importlib.util import find_spec

import pytest

from megatron_rl.cli import main
from megatron_rl.recipe.schema import RunConfig, WandbConfig
from megatron_rl.recipe.tracking import tracking_problems
from megatron_rl.train.tracker import Tracker
from tests.helpers.source import ROOT

STAND_IN = """
import json
def login(timeout):
    # it asks, and nobody answers
    assert timeout == 1
    return False
def init(**options):
    (note := Run(options["dir"])).write(options)
    if options["project"] == "no-access":
        raise ConnectionError("no route")
    return note
class Run:
    def __init__(self, place): self.place = place
    def write(self, value):
        with open(self.place + "/told", "a") as stream:
            stream.write(json.dumps(value) + chr(10))
    def log(self, values, step):
        self.write([values, step])
        if step == 13:
            raise OSError("quota")
    def finish(self): self.write("finished")
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "wandb.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    yield
    sys.modules.pop("wandb", None)


def told(place):
    return [json.loads(line) for line in (place / "told").read_text().splitlines()]


def test_numbers_recipe_and_name_of_the_directory_arrive(tmp_path, stand_in):
    said = []
    for _ in range(2):
        tracker = Tracker(WandbConfig(project="p"), tmp_path, {"run.seed": "1"}, say=said.append)
        tracker.log({"reward/mean": 0.5}, step=1)
        tracker.close()
        tracker.close()
    first, values, end, again, *_ = told(tmp_path)
    assert (first["project"], first["mode"], first["config"]) == ("p", "offline", {"run.seed": "1"})
    assert first["name"] == tmp_path.name
    assert (values, end) == ([{"reward/mean": 0.5}, 1], "finished")
    assert again["id"] == first["id"], "a resumed run is the same run there"
    assert said == []


def test_what_goes_wrong_there_is_said_once_and_costs_nothing(tmp_path, stand_in):
    said = []
    tracker = Tracker(WandbConfig(project="p"), tmp_path, {}, say=said.append)
    for step in (12, 13, 14):
        tracker.log({"a": 1.0}, step=step)
    tracker.close()
    assert [line[1] for line in told(tmp_path)[1:]] == [12, 13]
    Tracker(WandbConfig(project="no-access"), tmp_path, {}, say=said.append).log({"a": 1.0}, step=1)
    assert said == [
        "run.wandb: given up for this run (OSError: quota)",
        "run.wandb: given up for this run (ConnectionError: no route)",
    ]


def test_a_question_about_an_account_is_left_unanswered_and_the_cure_said(tmp_path, stand_in):
    said = []
    Tracker(WandbConfig(project="p", mode="online"), tmp_path, {}, say=said.append).log({"a": 1.0}, step=1)
    assert said == [
        "run.wandb: given up for this run (PermissionError: no account); log in first (wandb login), or set mode to "
        "offline"
    ]
    assert not (tmp_path / "told").exists()


def test_check_says_where_the_package_is_missing(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    assert find_spec("wandb") is None
    assert list(tracking_problems(RunConfig())) == []
    (problem,) = tracking_problems(RunConfig(wandb=WandbConfig(project="p")))
    assert problem.path == "run.wandb"
    recipe = str(ROOT / "recipes" / "quickstart.yaml")
    assert main(["check", recipe, "run.wandb.project=mine"]) == 2
    assert "pip install wandb" in capsys.readouterr().err

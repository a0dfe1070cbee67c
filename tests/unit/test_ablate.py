"""What an experiment is, what its runs measured, and what becomes of runs that are there already."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from megatron_rl.errors import MegatronRLError
from tests.helpers.recipes import write_recipe

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENT = """\
recipe: recipe.yaml
measure: eval/heldout/avg_at_k
common: [stages.1.iterations=6]
arms:
  gppo: []
  grpo: [stages.1.algorithm.surrogate=grpo]
"""


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("ablate", ROOT / "tools" / "ablate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # dataclasses look their module up while they are made
    monkeypatch.setitem(sys.modules, "ablate", module)
    # as for a script, whose own directory comes first
    monkeypatch.setattr(sys, "path", [str(ROOT / "tools"), *sys.path])
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_recipe(tmp_path)
    (tmp_path / "experiment.yaml").write_text(EXPERIMENT)
    return tmp_path


def finished(tool: ModuleType, place: Path, arm: str, seed: int, ends: tuple[float, float]) -> None:
    run_dir = place / "out" / f"{arm}-seed{seed}"
    run_dir.mkdir(parents=True)
    experiment = tool.load_experiment(place / "experiment.yaml")
    asked = {
        "recipe": experiment.recipe,
        "overrides": [*experiment.common, *experiment.arms[arm], f"run.seed={seed}"],
        "measure": experiment.measure,
    }
    curve = [(0.0, ends[0]), (6.0, ends[1])]
    (run_dir / tool.DONE).write_text(json.dumps({"asked": asked, "curve": curve}))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("arms:", "arm:", "arm"),
        ("surrogate=grpo", "surrogate=grop", "arms.grpo"),
        ("recipe: recipe.yaml", "recipe: other.yaml", "other.yaml"),
        ("measure: eval/heldout/avg_at_k\n", "", "measure"),
    ],
    ids=["key", "override", "recipe", "measure"],
)
def test_a_wrong_experiment_is_refused_before_anything_runs(
    tool: ModuleType, place: Path, old: str, new: str, said: str
) -> None:
    (place / "experiment.yaml").write_text(EXPERIMENT.replace(old, new))
    with pytest.raises(MegatronRLError, match=said):
        tool.load_experiment(place / "experiment.yaml")


def test_finished_runs_become_a_table_over_seeds(tool: ModuleType, place: Path, capsys) -> None:
    for arm, seed, ends in (
        ("gppo", 1, (0.4, 0.7)), ("gppo", 2, (0.4, 0.5)), ("grpo", 1, (0.4, 0.5)), ("grpo", 2, (0.4, 0.5)),
    ):  # fmt: skip
        finished(tool, place, arm, seed, ends)
    assert tool.main(["experiment.yaml", "--out", "out", "--seeds", "1", "2"]) == 0
    assert "| gppo | 0.700 | 0.500 | 0.600 | 0.100 | +0.200 |" in capsys.readouterr().out
    results = json.loads((place / "out" / "results.json").read_text())
    assert results["arms"]["grpo"]["curves"]["2"] == [[0.0, 0.4], [6.0, 0.5]]
    picture = ElementTree.parse(place / "out" / "curves.svg").getroot()
    drawn = [node.get("stroke") for node in picture if node.tag.endswith("polyline")]
    named = {node.text: node.get("fill") for node in picture if node.tag.endswith("text") and node.get("fill")}
    assert named == dict(zip(("gppo", "grpo"), drawn, strict=True))


def test_a_run_of_other_overrides_is_not_taken_for_a_finished_one(
    tool: ModuleType, place: Path, capsys
) -> None:
    finished(tool, place, "gppo", 1, (0.4, 0.7))
    finished(tool, place, "grpo", 1, (0.4, 0.7))
    changed = ["stages.1.curriculum=[]"]
    (place / "experiment.yaml").write_text(EXPERIMENT.replace("gppo: []", f"gppo: {json.dumps(changed)}"))
    assert tool.main(["experiment.yaml", "--out", "out", "--seeds", "1"]) == 2
    assert "give another --out" in capsys.readouterr().err


def test_what_was_measured_starts_before_the_first_iteration(tool: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "eval.jsonl").write_text('{"set": "heldout", "iteration": 0, "avg_at_k": 0.25}\n')
    measured = ((5, None), (6, 0.5))
    lines = [{"step": step, "eval/heldout/avg_at_k": value} for step, value in measured]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert tool.measured(tmp_path, "eval/heldout/avg_at_k") == [(0.0, 0.25), (6.0, 0.5)]
    with pytest.raises(MegatronRLError, match="measured 0 times"):
        tool.measured(tmp_path, "eval/other/avg_at_k")

"""What the launch scripts refuse, dry or not, before anything runs, and what they do with requests made meanwhile."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megatron_rl.train.stopping import forget_requests
from tests.helpers.launching import ROOT, make_place, run, start

MATH = str(ROOT / "recipes/klear_reasoner_8b/math_rl.yaml")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return make_place(tmp_path)


DRY = (
    ("launch/torchrun.sh",),
    ("launch/slurm_multinode.sh",),
    ("launch/slurm.sbatch", "--engine-nodes", "1"),
)


@pytest.mark.parametrize("command", DRY, ids=lambda command: command[0])
def test_a_dry_run_refuses_what_the_run_would(place, command):
    (place / "wrong").touch()
    done = run(place, *command, "--dry-run", "r.yaml", "a=1")
    assert (done.returncode, done.stderr) == (2, "error: r.yaml: 1 problem\n")
    assert "torch.distributed.run" not in done.stdout


def test_a_dry_run_without_the_requirements_says_that_it_has_not_checked(place):
    (place / "bare").touch()
    done = run(place, "launch/torchrun.sh", "--dry-run", "r.yaml")
    assert done.returncode == 0
    assert done.stderr == "# the recipe was not checked: ModuleNotFoundError: pydantic\n"
    assert "torch.distributed.run" in done.stdout


@pytest.mark.parametrize("command", DRY[:2], ids=lambda command: command[0])
def test_dry_runs_of_a_shipped_recipe_need_no_model_and_know_its_keys(tmp_path, command):
    override = "stages.0.optimizer.lrr=1"
    scripts = str(ROOT / command[0])
    variables = {"MEGATRON_RL_PYTHON": sys.executable, "NPROC_PER_NODE": "4"}
    assert run(tmp_path, scripts, *command[1:], "--dry-run", MATH, **variables).returncode == 0
    done = run(tmp_path, scripts, *command[1:], "--dry-run", MATH, override, **variables)
    assert done.returncode == 2
    assert override.partition("=")[0] in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_checks_the_number_of_ranks_where_it_knows_it(tmp_path):
    command = (str(ROOT / "launch/torchrun.sh"), "--dry-run", MATH, "--nproc-per-node", "3")
    done = run(tmp_path, *command, MEGATRON_RL_PYTHON=sys.executable)
    assert done.returncode == 2
    assert "does not divide the 3 processes" in done.stderr


@pytest.mark.parametrize("made", ["before", "before and again", "after"])
@pytest.mark.parametrize("script", ["torchrun.sh", "slurm_multinode.sh"])
def test_a_request_to_stop_holds_once_the_script_has_started_and_only_then(place, script, made):
    run_dir = place / "runs" / "r-7"
    run_dir.mkdir(parents=True)
    if made != "after":
        (run_dir / "stop").touch()
    (place / "patient").touch()
    process = start(place, f"launch/{script}", "r.yaml", "--run-dir", "runs/r-7", nodes="n1")
    if made != "before":
        (run_dir / "stop").touch()
    forget_requests(run_dir, stale=(place / "stale").read_text())
    assert (run_dir / "stop").exists() is (made != "before")
    (place / "patient").unlink()
    (run_dir / "stop").touch()
    process.communicate(timeout=60)
    assert process.returncode == 75

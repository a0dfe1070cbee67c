"""What the launch scripts refuse, dry or not, before anything runs, and what they do with requests made meanwhile."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl.errors import MegatronRLError
from megatron_rl.train.rank_process import rank_environment
from megatron_rl.train.stopping import forget_requests
from tests.helpers.launching import PYTHON, ROOT, environment, make_place, run, start
from tests.helpers.slurm import make_script

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


def test_a_run_refuses_the_same_before_its_ranks_start(place):
    (place / "wrong").touch()
    done = run(place, "launch/torchrun.sh", "r.yaml", "--run-dir", "r")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "error: r.yaml: 1 problem\n")
    assert not (place / "r").exists()
    assert not (place / "started").exists()


@pytest.mark.parametrize("options", [(), ("--engine-nodes", "1"), ("--container", "img")], ids=" ".join)
@pytest.mark.parametrize("script", ["slurm_multinode.sh", "slurm.sbatch"])
def test_a_placed_run_refuses_the_same_before_any_engine_host_starts(place, script, options):
    (place / "wrong").touch()
    make_script(place / "bin" / "python3", PYTHON)
    done = run(place, f"launch/{script}", *options, "r.yaml", nodes="n1,n2")
    assert (done.returncode, done.stderr) == (2, "error: r.yaml: 1 problem\n")
    # with an image the one step is that which asks there
    steps = (place / "srun.log").read_text().splitlines() if (place / "srun.log").exists() else []
    assert len(steps) == ("--container" in options)
    assert not any("engine.sh" in step for step in steps)
    assert not (place / "runs").exists()


@pytest.mark.parametrize("options", [(), ("--container", "img")], ids=" ".join)
def test_a_placed_run_whose_recipe_is_right_goes_on_after_it_was_checked(place, options):
    (place / "broken").touch()
    make_script(place / "bin" / "python3", PYTHON)
    done = run(place, "launch/slurm_multinode.sh", *options, "--engine-nodes=1", "r.yaml", nodes="n1,n2")
    assert done.returncode == 1, done.stderr
    steps = list(map(shlex.split, (place / "srun.log").read_text().splitlines()))
    *check, engines, trainers = steps
    assert ["--dry-run" in step and "--nodelist=n1" in step for step in check] == [True] * len(options[:1])
    assert "--nodelist=n2" in engines
    assert "--dry-run" not in trainers
    dry = run(
        place, "launch/slurm_multinode.sh", *options, "--engine-nodes=1", "r.yaml", "--dry-run", nodes="n1,n2"
    )
    lines = [line.partition(" &   #")[0] for line in dry.stdout.splitlines() if "srun" in line]
    # what is printed is what ran, in the same order
    assert [shlex.split(line.partition("srun ")[2]) for line in lines] == steps


def test_what_a_dry_run_prints_before_its_steps_can_be_pasted(place):
    run_dir = place / "my runs" / "it's"
    (run_dir / "logs").mkdir(parents=True)
    kept = run_dir / "logs" / "rank_1.log"
    stale = [
        run_dir / "stopped.json",
        *(run_dir / "logs" / f"engine_host_{name}.log" for name in ("n1", "a b")),
    ]
    options = ("--run-dir", "my runs/it's", "--dry-run")
    printed = run(place, "launch/slurm_multinode.sh", *options, "r.yaml", nodes="n1,n2").stdout
    # what was not there when it was printed goes too, as in the run
    for file in (kept, *stale):
        file.touch()
    before, _, _ = printed.partition("bash -c 'umask")
    subprocess.run(["bash", "-euc", before], cwd=place, timeout=60, env=environment(place), check=True)
    assert kept.exists()
    assert [file for file in stale if file.exists()] == []


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


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (
            ["--nnodes", "2", "--master", "n1"],
            "--node-rank: got '', must be 0 to 1, another one on each node",
        ),
        (["--nnodes", "12", "--master", "n1", "--node-rank", "08"], "--node-rank: got '08', must be 0 to 11"),
        (["--master", "n1:65536"], "--master: got the port '65536', must be 1 to 65535"),
        (["--master", "n1:1:2"], "--master: got 'n1:1' before the port, must be a name or an address"),
        (["--master", "fe80::1:29500"], "one of IPv6 in brackets"),
        (["--run-dir", "--dry-run"], "--run-dir: needs a value, got the option --dry-run"),
        (["--run-dir", "r.yaml/runs"], "--run-dir: r.yaml/runs cannot be made; choose another directory"),
    ],
)
def test_options_that_would_go_wrong_later_are_refused_at_once(place, arguments, complaint):
    done = run(place, "launch/torchrun.sh", "r.yaml", *arguments)
    assert done.returncode == 2
    assert complaint in done.stderr
    assert not (place / "runs").exists()


@pytest.mark.parametrize(
    ("master", "address", "port"),
    [
        ("[fe80::1]:7", "fe80::1", "7"),
        ("[fe80::1]", "fe80::1", "29500"),
        ("n1", "n1", "29500"),
        (":7", "127.0.0.1", "7"),
    ],
)
def test_a_master_is_a_name_or_an_address_with_or_without_a_port(place, master, address, port):
    done = run(place, "launch/torchrun.sh", "--dry-run", "r.yaml", "--master", master)
    assert f"--master-addr {address} --master-port {port} " in done.stdout


@pytest.mark.parametrize("script", ["torchrun.sh", "slurm_multinode.sh"])
@pytest.mark.parametrize("name", ["-r", "it's $(touch made) a*", "a\nb", "%N", "\\"], ids=repr)
def test_any_run_directory_is_used_as_it_is_named_or_refused(place, script, name):
    (place / "broken").touch()
    (place / "-r.yaml").write_text((place / "r.yaml").read_text())
    done = run(
        place, f"launch/{script}", "./-r.yaml", "--run-dir", name, nodes="n1,n2" if "slurm" in script else ""
    )
    assert not (place / "made").exists()
    if "slurm" in script and name not in ("-r", "it's $(touch made) a*"):
        assert done.returncode == 2
        assert "must be without %, \\ and line breaks" in done.stderr
        assert not (place / name).exists()
        return
    assert done.returncode == 1, done.stderr
    assert (place / name / "logs").is_dir()
    known = {
        "bin",
        "launch",
        ".venv",
        "srun.log",
        "scontrol.log",
        "hosts.log",
        "started",
        "stale",
        "broken",
        name,
    }
    assert {path.name for path in place.iterdir() if path.suffix != ".yaml"} - known == {
        path.name for path in place.glob("*.*.*")
    }


@pytest.mark.parametrize("way", ["missing", "fails", "says nothing"])
def test_nodes_that_slurm_does_not_name_are_an_error(place, way):
    scontrol = place / "bin" / "scontrol"
    scontrol.unlink()
    if way != "missing":
        make_script(scontrol, f"#!/usr/bin/env bash\nexit {int(way == 'fails')}\n")
    done = run(place, "launch/slurm_multinode.sh", "r.yaml", nodes="n1,n2")
    assert done.returncode == 2
    assert done.stderr.endswith("error: scontrol named no nodes\n")
    assert not (place / "runs").exists()


def test_a_job_that_cannot_be_requeued_says_so_and_keeps_its_exit_code(place):
    make_script(place / "bin" / "scontrol", "#!/usr/bin/env bash\n[[ $1 == show ]] && echo n1\n")
    process = start(place, "launch/slurm.sbatch", "r.yaml", nodes="n1")
    process.send_signal(signal.SIGUSR1)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 75
    assert "error: not requeued; submit it again" in said


@pytest.mark.parametrize(
    ("text", "is_rl"),
    [
        ("stages: [{kind: rl}]", True),
        ('{"stages": [{"kind": "rl"}]}', True),
        ("stages:\n  - kind : 'rl'", True),
        ("stages:\n  - kind: sft   # then kind: rl", False),
        ("# kind: rl\nstages: [{kind: sft}]", False),
        ("stages: [{kind: rlhf}]", False),
    ],
)
def test_engines_are_placed_for_recipes_with_rollouts_however_they_are_written(place, text, is_rl):
    (place / "r.yaml").write_text(text)
    done = run(place, "launch/slurm_multinode.sh", "r.yaml", "--dry-run", nodes="n1,n2")
    assert done.returncode == 0
    assert ("launch/engine.sh" in done.stdout) is is_rl


def test_two_jobs_in_one_run_directory_keep_their_engines_apart(place):
    first, second = (
        run(
            place,
            "launch/slurm_multinode.sh",
            "r.yaml",
            "--run-dir",
            "r",
            "--dry-run",
            nodes="n1,n2",
            SLURM_JOB_ID=job,
        )
        for job in ("7", "8")
    )
    for name in ("engine_secret", "engines_stop"):
        assert f"{name}-7" in first.stdout and f"{name}-8" in second.stdout
        assert f"{name}-7" not in second.stdout


@pytest.mark.parametrize(
    "said",
    [
        "RANK=x WORLD_SIZE=2 MASTER_ADDR=n1 MASTER_PORT=1",
        "RANK=0 WORLD_SIZE=x MASTER_ADDR=n1 MASTER_PORT=1",
        "RANK=2 WORLD_SIZE=2 MASTER_ADDR=n1 MASTER_PORT=1",
        "RANK=-1 WORLD_SIZE=2 MASTER_ADDR=n1 MASTER_PORT=1",
        "RANK=0 WORLD_SIZE=0",
        "RANK=0 WORLD_SIZE=1 LOCAL_RANK=x",
        "RANK=0 WORLD_SIZE=2 MASTER_PORT=1",
        "RANK=0 WORLD_SIZE=2 MASTER_ADDR= MASTER_PORT=1",
        "RANK=0 WORLD_SIZE=2 MASTER_ADDR=n1",
    ],
)
def test_ranks_that_nobody_started_in_order_are_named(monkeypatch, said):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for variable in said.split():
        monkeypatch.setenv(*variable.split("="))
    with pytest.raises(
        MegatronRLError, match="in the environment, must be numbers with RANK below WORLD_SIZE"
    ):
        rank_environment()


@pytest.mark.parametrize("said", ["RANK=0", "WORLD_SIZE=2", "LOCAL_RANK=1"])
def test_a_process_of_a_job_without_ranks_starts_its_own(monkeypatch, said):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(*said.split("="))
    assert rank_environment() is None

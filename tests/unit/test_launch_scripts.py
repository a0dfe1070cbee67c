"""The launch scripts: what they start, how they pass on a request to stop, and what is left when they end.

The Python that runs us, srun and scontrol are stand-ins: each writes down what it was given. The stand-in for srun runs
its command once per node, as slurm does; everything else is the scripts themselves.
"""

from __future__ import annotations

import re
import shlex
import signal
import stat
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron_rl.recipe.overrides import parse_override
from tests.helpers.launching import ROOT, VARIABLES, environment, make_place, run, start, wait_until


def starts_on(place: Path, node: int) -> list[str]:
    """Of each start of torchrun there what followed its first option, one word a line."""
    log = place / f"arguments.torch.distributed.run.{node}"
    return log.read_text().split("--nnodes\n")[1:] if log.exists() else []


def words_after(words: Sequence[str], mark: str) -> list[str]:
    return list(words[words.index(mark) + 1 :])


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return make_place(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=lambda n: n.name)
def test_torchrun_turns_a_signal_into_the_stop_file_and_the_stop_into_75(place, number):
    process = start(place, "launch/torchrun.sh", "r.yaml", "a=1", "--run-dir", "runs/r")
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (75, "")
    assert err == "stopped as asked to, see runs/r/stopped.json; the same --run-dir goes on from there\n"
    arguments = (place / "arguments.torch.distributed.run.").read_text().split("\n")
    assert arguments[-6:-1] == ["train", "r.yaml", "--run-dir", "runs/r", "a=1"]


def test_torchrun_ends_at_once_on_a_second_signal(place):
    (place / "deaf").touch()
    process = start(place, "launch/torchrun.sh", "r.yaml", "--run-dir", "runs/r")
    process.send_signal(signal.SIGTERM)
    wait_until((place / "runs" / "r" / "stop").exists)
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (143, "ended at once\n")


def test_torchrun_keeps_the_exit_code_of_a_run_that_failed_and_says_where_to_read(place):
    (place / "broken").touch()
    # what an earlier stop left says nothing of this start
    (place / "runs" / "r").mkdir(parents=True)
    (place / "runs" / "r" / "stopped.json").touch()
    done = run(place, "launch/torchrun.sh", "r.yaml", "--run-dir", "runs/r")
    assert (done.returncode, done.stderr) == (1, "exit code 1; what each rank said: runs/r/logs/rank_*.log\n")


def test_arguments_and_variables_say_the_same_and_arguments_win(place):
    options = ["--nnodes", "2", "--node-rank=1", "--master", "n1:7", "--nproc-per-node", "4", "--run-dir", "runs/a b"]
    variables = dict(zip(VARIABLES, ("2", "1", "n1", "7", "4", "runs/a b"), strict=True))
    by_options = run(place, "launch/torchrun.sh", *options, "r.yaml", "a=1", "--dry-run")
    by_variables = run(place, "launch/torchrun.sh", "r.yaml", "--dry-run", "a=1", **variables)
    both = run(place, "launch/torchrun.sh", "r.yaml", *options, "--dry-run", "a=1", **dict.fromkeys(variables, "9"))
    assert by_options.returncode == 0, by_options.stderr
    assert by_options.stdout == by_variables.stdout == both.stdout
    words = shlex.split(by_options.stdout)
    for option, value in (
        ("--nnodes", "2"), ("--node-rank", "1"), ("--master-addr", "n1"), ("--master-port", "7"),
        ("--nproc-per-node", "4"), ("--run-dir", "runs/a b"),
    ):  # fmt: skip
        assert words_after(words, option)[0] == value


def test_the_run_directory_has_a_default_that_several_nodes_agree_on(place):
    one = shlex.split(run(place, "launch/torchrun.sh", "r.yaml", "--dry-run").stdout)
    assert re.fullmatch(r"runs/r-\d{8}-\d{6}", words_after(one, "--run-dir")[0])
    several = run(place, "launch/torchrun.sh", "r.yaml", "--dry-run", "--nnodes=2", "--node-rank=1", "--master=n1")
    assert words_after(shlex.split(several.stdout), "--run-dir")[0] == "runs/r"


def test_a_run_directory_that_was_used_is_continued(place):
    (place / "runs" / "r").mkdir(parents=True)
    command = ("launch/torchrun.sh", "r.yaml", "--dry-run", "--run-dir", "runs/r")
    assert "--resume" not in run(place, *command).stdout
    (place / "runs" / "r" / "recipe.resolved.yaml").touch()
    assert "--run-dir runs/r --resume" in run(place, *command).stdout


def test_what_a_dry_run_of_torchrun_prints_is_what_runs_to_the_last_word(tmp_path):
    place = make_place(tmp_path / "a place with 'spaces'")
    (place / "broken").touch()
    command = ("launch/torchrun.sh", "r.yaml", "--run-dir", "runs/my run", "name='a b'")
    printed = run(place, *command, "--dry-run").stdout
    assert not (place / "runs").exists()
    run(place, *command)
    log = place / "arguments.torch.distributed.run."
    started = log.read_text()
    log.unlink()
    subprocess.run(["bash", "-c", printed], cwd=place, timeout=60, env=environment(place))
    assert log.read_text() == started
    assert "name='a b'" in started.split("\n")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "no recipe"),
        (["none.yaml"], "none.yaml: no such recipe file"),
        (["r.yaml", "runs/r"], "got 'runs/r' after the recipe, must be path=value; a run directory is --run-dir DIR"),
        (["r.yaml", "--nodes", "2"], "--nodes: no such option"),
        (["r.yaml", "--run-dir"], "--run-dir: needs a value"),
        (["r.yaml", "--nnodes", "2:4"], "--nnodes: got '2:4', must be a number"),
        (["r.yaml", "--nnodes", "2"], "--master: needed with several nodes"),
        (["r.yaml", "--nnodes", "2", "--master", "n1", "--node-rank", "2"], "--node-rank: got '2', must be 0 to 1"),
        (["r.yaml", "--master", "n1:http"], "--master: got the port 'http'"),
        (["r.yaml", "--nproc-per-node", "all"], "--nproc-per-node: got 'all'"),
    ],
)  # fmt: skip
def test_bad_arguments_of_torchrun_are_named_before_anything_starts(place, arguments, complaint):
    done = run(place, "launch/torchrun.sh", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert complaint in done.stderr
    assert not (place / "runs").exists()


@pytest.mark.parametrize("code", [75, 1], ids=["after its step", "with its step given up"])
def test_a_slurm_job_that_was_warned_stops_and_requeues_itself(place, code):
    if code == 1:
        (place / "slow").touch()
    process = start(place, str(ROOT / "launch" / "slurm.sbatch"), "r.yaml", nodes="n1")
    process.send_signal(signal.SIGUSR1)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert (place / "scontrol.log").read_text().splitlines()[-1] == "requeue 7"


def test_a_slurm_job_that_is_told_to_end_saves_and_is_not_requeued(place):
    process = start(place, "launch/slurm.sbatch", "--engine-nodes", "1", "r.yaml", nodes="n1,n2")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    assert (place / "runs" / "r-7" / "stop").exists()
    assert (place / "hosts.log").read_text() == "closed in order\n"
    assert "requeue" not in (place / "scontrol.log").read_text()


def test_a_slurm_job_that_failed_or_was_stopped_by_hand_is_not_requeued(place):
    process = start(place, "launch/slurm.sbatch", "r.yaml", nodes="n1")
    (place / "runs" / "r-7" / "stop").touch()
    process.communicate(timeout=60)
    assert process.returncode == 75
    (place / "broken").touch()
    assert run(place, "launch/slurm.sbatch", "r.yaml", nodes="n1").returncode == 1
    assert "requeue" not in (place / "scontrol.log").read_text()


def test_a_requeued_job_continues_its_run_with_a_fresh_secret_and_its_new_nodes(place):
    secrets: list[str] = []
    for nodes in ("n1,n2,n3", "n4,n5,n6"):
        process = start(place, "launch/slurm.sbatch", "--engine-nodes", "1", "r.yaml", nodes=nodes)
        wait_until(lambda: all(len(starts_on(place, node)) > len(secrets) for node in (0, 1)))
        secrets.append((place / "runs" / "r-7" / "logs" / "engine_secret-7").read_text())
        (place / "runs" / "r-7" / "recipe.resolved.yaml").touch()
        process.send_signal(signal.SIGUSR1)
        assert process.wait(60) == 75
        process.communicate()
        (place / "started").unlink()
        (place / "runs" / "r-7" / "stop").unlink()
    assert secrets[0] != secrets[1]
    starts = starts_on(place, 0)
    assert ["--resume\n" in text for text in starts] == [False, True]
    assert ["[n3:10007]" in text for text in starts] == [True, False]
    assert "stages.*.engine.hosts=[n6:10007]\n" in starts[1]
    # what one ends has to be gone before the next begins
    assert (place / "hosts.log").read_text().splitlines() == ["closed in order"] * 2


def test_separate_engines_are_on_nodes_of_their_own_with_a_secret_that_others_cannot_read(place):
    options = ("--engine-nodes", "2", "--run-dir", "runs/it's mine")
    process = start(place, "launch/slurm_multinode.sh", "r.yaml", "b=2", *options, nodes="n1,n2,n3,n4,n5")
    run_dir = place / "runs" / "it's mine"
    secret = run_dir / "logs" / "engine_secret-7"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert re.fullmatch(r"[0-9a-f]{64}", secret.read_text())
    engines, trainers = map(shlex.split, (place / "srun.log").read_text().splitlines())
    assert "--nodelist=n4,n5" in engines
    assert "--nodelist=n1,n2,n3" in trainers
    assert "--overlap" not in engines + trainers
    # a step without it would have one core
    assert "--cpus-per-task=64" in engines
    assert "--cpus-per-task=64" in trainers
    assert words_after(engines, "--secret-file")[0] == "runs/it's mine/logs/engine_secret-7"
    assert words_after(trainers, "--master")[0] == "n1:20007"
    # the user's come last, and so have the last word
    hosts, secret_file, colocated, own = words_after(trainers, "r.yaml")
    assert parse_override(hosts).value == ["n4:10007", "n5:10007"]
    assert parse_override(secret_file).value == "runs/it's mine/logs/engine_secret-7"
    assert colocated == "stages.*.engine.colocated=false"
    assert own == "b=2"
    wait_until(lambda: all(starts_on(place, node) for node in range(3)))
    for node in range(3):
        assert f"--node-rank\n{node}\n" in starts_on(place, node)[0]
    (run_dir / "stop").touch()
    assert process.wait(60) == 75
    process.communicate()
    assert (place / "hosts.log").read_text() == "closed in order\n" * 2


def test_colocated_engines_share_the_nodes_of_the_trainers(place):
    done = run(place, "launch/slurm_multinode.sh", "r.yaml", "--dry-run", nodes="n1,n2")
    engines, trainers = (shlex.split(line) for line in done.stdout.splitlines() if line.startswith("srun "))
    for words in (engines, trainers):
        assert {"--nodelist=n1,n2", "--overlap"} <= set(words)
    assert "stages.*.engine.hosts=[n1:10007,n2:10007]" in trainers
    assert "stages.*.engine.colocated=true" in trainers


@pytest.mark.parametrize(("recipe", "nodes"), [("r.yaml", "n1"), ("sft.yaml", "n1,n2")])
def test_one_node_and_recipes_without_rollouts_need_no_engine_hosts(place, recipe, nodes):
    done = run(place, "launch/slurm_multinode.sh", recipe, "--dry-run", nodes=nodes)
    (trainers,) = (line for line in done.stdout.splitlines() if line.startswith("srun "))
    assert "launch/engine.sh" not in done.stdout
    assert "engine.hosts" not in trainers
    assert "--overlap" not in trainers


@pytest.mark.parametrize("way", ["fails", "is told twice", "never starts"])
def test_engine_hosts_end_with_the_trainers_on_every_way_out(place, way):
    (place / {"fails": "broken", "is told twice": "deaf", "never starts": "no_engines"}[way]).touch()
    command = ("launch/slurm_multinode.sh", "r.yaml", "--engine-nodes", "1")
    if way == "is told twice":
        process = start(place, *command, nodes="n1,n2")
        process.send_signal(signal.SIGTERM)
        wait_until((place / "runs" / "r-7" / "stop").exists)
        time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        code = process.returncode
    else:
        done = run(place, *command, nodes="n1,n2")
        code = done.returncode
    assert code == {"fails": 1, "is told twice": 137, "never starts": 2}[way]
    if way == "never starts":
        assert "an engine host did not start; see runs/r-7/logs/engine_host_*.log" in done.stderr
        assert "port is taken" in (place / "runs" / "r-7" / "logs" / "engine_host_n2.log").read_text()
        assert not (place / "started").exists()
    else:
        assert (place / "hosts.log").read_text() == "closed in order\n"


def test_a_container_is_given_to_both_steps_with_what_it_has_to_see(place):
    options = ("--engine-nodes=1", "--container", "reg#img:1", "--mounts", "/data:/data", "--dry-run")
    done = run(place, "launch/slurm_multinode.sh", "r.yaml", *options, nodes="n1,n2")
    steps = [shlex.split(line) for line in done.stdout.splitlines() if line.startswith("srun ")]
    assert len(steps) == 2
    for words in steps:
        assert "--container-image=reg#img:1" in words
        assert f"--container-mounts={place}:{place},/data:/data" in words
    assert "export MEGATRON_RL_PYTHON=python3" in done.stdout.splitlines()


def test_a_dry_run_needs_no_slurm_and_leaves_nothing(place):
    (place / "bin" / "srun").unlink()
    (place / "bin" / "scontrol").unlink()
    before = sorted(place.rglob("*"))
    done = run(place, "launch/slurm.sbatch", "--dry-run", "--nodes", "4", "--engine-nodes", "1", "r.yaml", "a=1")
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(place.rglob("*")) == before
    assert done.stdout.startswith("# sbatch --nodes 4 launch/slurm.sbatch --engine-nodes 1 r.yaml a=1\n")
    assert "--nodelist=node1,node2,node3" in done.stdout
    assert "-m torch.distributed.run --nnodes 3" in done.stdout
    # as in the job that sbatch would make
    assert "--cpus-per-task=64" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["r.yaml"], "not in a slurm allocation"),
        (["r.yaml", "--dry-run", "--engine-nodes", "2"], "--engine-nodes: got '2', must be 0 to 1 of 2 nodes"),
        (["r.yaml", "--dry-run", "--engine-nodes", "one"], "--engine-nodes: got 'one'"),
        (["sft.yaml", "--dry-run", "--engine-nodes", "1"], "sft.yaml has no stage of kind: rl"),
        (["r.yaml", "--dry-run", "--nodes", "0"], "--nodes: got '0'"),
        (["r.yaml", "--dry-run", "--engines", "1"], "--engines: no such option"),
        (["--dry-run"], "no recipe"),
    ],
)  # fmt: skip
def test_bad_arguments_of_a_placement_are_named_before_anything_starts(place, arguments, complaint):
    done = run(place, "launch/slurm_multinode.sh", *arguments)
    assert done.returncode == 2
    assert complaint in done.stderr
    assert not (place / "runs").exists()


def test_a_job_script_that_is_not_submitted_says_how(place):
    done = run(place, "launch/slurm.sbatch", "r.yaml")
    assert done.returncode == 2
    assert "submit it: sbatch --nodes N launch/slurm.sbatch RECIPE" in done.stderr


@pytest.mark.parametrize("name", ["torchrun.sh", "slurm_multinode.sh", "slurm.sbatch"])
def test_help_is_the_head_of_the_script(place, name):
    done = run(place, f"launch/{name}", "--help")
    assert done.returncode == 0 and "set -euo" not in done.stdout and "#SBATCH" not in done.stdout
    assert f"launch/{name} [option ...] RECIPE [path=value ...]" in done.stdout
    assert "--dry-run" in done.stdout

"""Engines on other hosts with real vLLM: `megatron-rl engine` there, the trainer here, weights over the network.

A host is a loopback address of its own here, or a network namespace: one has a cable that can be cut, three a switch.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.rollout.wire import DEAD_AFTER_S
from tests.helpers.engine import hf_logprobs, write_qwen2
from tests.helpers.engine_hosts import ROOT, Host, engine_host, two_machines
from tests.helpers.machines import Machine, machines
from tests.helpers.models import make_tiny_hf
from tests.helpers.processes import wait_for
from tests.helpers.quickstart import RECIPE, lines, run_environment, train
from tests.helpers.remote_trainer import PROMPT
from tests.helpers.same_run import assert_same_rollouts
from tests.helpers.slurm import job_variables, make_slurm

BOUND = 1e-4  # float32 against float32, other kernels


class Trainer:
    """tests.helpers.remote_trainer, running."""

    def __init__(self, process: subprocess.Popen[str], errors: Path) -> None:
        self.process, self._errors = process, errors
        self.started = self.answer()

    def begin(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self._errors.read_text()[-3000:]
        answer: dict[str, Any] = json.loads(line)
        return answer

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    def do(self, command: str) -> dict[str, Any]:
        self.begin(command)
        return self.answer()


@contextmanager
def trainer(
    place: Path, models: Sequence[Path], *, inside: Sequence[str] = (), **settings: Any
) -> Iterator[Trainer]:
    old, new = map(str, models)
    settings = {
        "old": old,
        "new": new,
        "logs": str(place / "logs"),
        "secret_file": None,
        "timeout_s": 60.0,
    } | settings
    errors = place / "trainer.txt"
    with open(errors, "wb") as log:
        process = subprocess.Popen(
            [*inside, sys.executable, "-m", "tests.helpers.remote_trainer", json.dumps(settings)], cwd=ROOT,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
        )  # fmt: skip
    try:
        yield Trainer(process, errors)
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("models")
    return write_qwen2(root / "old", seed=1, tied=True), write_qwen2(root / "new", seed=2, tied=True)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    with engine_host(tmp_path_factory.mktemp("host"), "127.0.0.2:0") as running:
        yield running


def assert_runs_on(model: Path, answer: dict[str, Any], version: int) -> None:
    for completion in answer["result"]:
        assert completion["weight_version"] == version
        expected = hf_logprobs(model, [*PROMPT, *completion["token_ids"]])[len(PROMPT) - 1 :]
        assert max(abs(a - b) for a, b in zip(expected, completion["logprobs"], strict=True)) < BOUND


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def assert_ended(host: Host, pids: Sequence[int], *, timeout_s: float) -> None:
    """Nothing of the run is left there, and the host waits for the next."""
    wait_for(lambda: not any(map(is_running, pids)), f"the end of {pids}", timeout_s=timeout_s)
    wait_for(lambda: host.output.read_text().rstrip().endswith("waiting for the next"), "the end of the run")


@pytest.fixture(scope="module")
def options(beginner: Path) -> list[str]:
    """A few steps of both kinds, of a model that is sometimes right."""
    return [
        f"model.hf_path={beginner}", "stages.0.data=small/sft.jsonl", "stages.0.steps=2",
        "stages.0.global_batch_size=8", "stages.0.optimizer.lr=1e-5", "stages.0.schedule={kind: constant}",
        "stages.1.prompts=small/train.jsonl", "stages.1.curriculum=[]", "stages.1.iterations=2",
        "stages.1.prompts_per_iteration=16", "stages.1.updates_per_rollout=1", "stages.1.schedule={kind: constant}",
        "stages.1.eval=null", "checkpoint=null",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def remote_run(host: Host, place: Path, options: list[str]) -> Path:
    """Directory of a run of one process with an engine on another host."""
    run_dir = place / "runs" / "remote"
    done = train(place, run_dir, *options, f"stages.1.engine.hosts=[{host.at}]", "stages.1.engine.sleep=true")
    assert done.returncode == 0, done.stderr[-3000:]
    return run_dir


@pytest.mark.timeout(900)
def test_a_run_trains_with_an_engine_on_another_host(host: Host, remote_run: Path) -> None:
    first, second = (line for line in lines(remote_run) if "rollout/weight_version" in line)
    assert (first["rollout/weight_version"], second["rollout/weight_version"]) == (0, 1)
    # the second samples with weights that a step has changed
    assert first["policy/grad_norm"] > 0
    assert max(first["mismatch/max"], second["mismatch/max"]) < BOUND
    (note,) = (remote_run / "logs" / "engine_0.log").read_text().splitlines()
    assert f"engine replica 0 on {host.at}" in note
    assert host.says(r"engine replica 0 on \S+ \(pid \d+\) ended: the trainer closed it")
    assert_ended(host, [], timeout_s=30.0)


@pytest.mark.timeout(900)
def test_two_machines_of_two_ranks_and_an_engine_on_a_third_train_as_one_process(
    place: Path, options: list[str], remote_run: Path, tmp_path: Path
) -> None:
    with machines(3) as hosts:
        run_dir = run_on(hosts, place, *options, "layout.tp=2", logs=tmp_path)
    logs = run_dir / "logs"
    assert all((logs / f"rank_{rank}.log").exists() for rank in range(4))
    began, *_, closed, run_ended, stopped = (
        (logs / f"engine_host_{hosts[2].address}.log").read_text().splitlines()[1:]
    )
    assert re.search(r"run .* began", began)
    assert re.search(r"engine replica 0 on \S+ \(pid \d+\) ended: the trainer closed it", closed)
    assert run_ended.endswith("waiting for the next")
    # in order, by the script, once the trainers had ended
    assert stopped.endswith("stopped")
    assert_same_rollouts(remote_run, run_dir, same_layout=False)
    for one, four in zip(lines(remote_run), lines(run_dir), strict=True):
        assert four["step"] == one["step"]
        assert four.get("mismatch/max", 0.0) < BOUND
        # the bounds of every layout against one process: losses to 1e-6, norms of gradients to 1e-5
        for name in ("sft/loss", "policy/loss", "sft/grad_norm", "policy/grad_norm"):
            bound = 1e-6 if name.endswith("loss") else 1e-5
            if name in one:
                assert four[name] == pytest.approx(one[name], rel=bound, abs=bound), name


def run_on(hosts: Sequence[Machine], place: Path, *overrides: str, logs: Path) -> Path:
    """Directory of a run as slurm_multinode.sh places it: torchrun.sh with two ranks on each host but the last."""
    nodes = [host.address for host in hosts]
    make_slurm(logs / "bin", {host.address: host.inside for host in hosts})
    environment = run_environment() | job_variables(nodes, submitted_in=place) | {
        "PATH": f"{logs / 'bin'}:{os.environ['PATH']}", "NPROC_PER_NODE": "2", "MEGATRON_RL_PYTHON": sys.executable,
    }  # fmt: skip
    run_dir, script = logs / "a run", str(ROOT / "launch" / "slurm_multinode.sh")
    with (logs / "said.txt").open("wb") as said:
        job = subprocess.Popen(
            ["bash", script, "--engine-nodes=1", "--run-dir", str(run_dir), str(RECIPE), *overrides],
            cwd=place, env=environment, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        assert job.wait(400) == 0, (logs / "said.txt").read_text()[-3000:]
    finally:
        if job.poll() is None:
            # the second ends every task at once
            for _ in range(2):
                job.terminate()
                time.sleep(1)
            job.wait(120)
    return run_dir


@pytest.mark.timeout(600)
def test_one_replica_that_fails_or_dies_in_an_update_stops_all(
    host: Host, models: tuple[Path, Path], tmp_path: Path
) -> None:
    with trainer(tmp_path, models, hosts=[host.at], replicas=2) as running:
        pids = running.started["pids"]
        assert_runs_on(models[0], running.do("generate"), -1)
        assert "result" in running.do("push 1")
        assert_runs_on(models[1], running.do("generate"), 1)
        # replica 0 got every byte, and must not go on alone
        failed = running.do("confuse 2")["error"]
        assert f"engine replica 1 on {host.at} (pid {pids[1]})" in failed
        assert "trainer rank 0 sent version 2, expected 99" in failed
        assert "engine replica 0" not in failed
        assert "weights are stale (update to version" in running.do("generate")["error"]
        assert "result" in running.do("push 3")
        assert_runs_on(models[1], running.do("generate"), 3)
        # in the middle of an update: it has heard of it and takes no bytes
        os.kill(pids[1], signal.SIGSTOP)
        running.begin("push 4")
        time.sleep(0.5)
        os.kill(pids[1], signal.SIGKILL)
        died = running.answer()
        assert f"engine replica 1 on {host.at} (pid {pids[1]}): died (signal SIGKILL)" in died["error"]
        assert died["seconds"] < 15
        assert "error" in running.do("generate")
        # nor does the next one wait for a replica that will not join
        again = running.do("push 5")
        assert f"engine replica 1 on {host.at} (pid {pids[1]}): died (signal SIGKILL)" in again["error"]
        assert again["seconds"] < 15
        running.process.kill()
        assert_ended(host, pids, timeout_s=30.0)


@pytest.mark.timeout(600)
def test_a_cut_network_ends_a_push_in_time_at_both_ends(tmp_path: Path) -> None:
    # 13 MB: buckets enough, and more than the sockets on both sides hold, so that the trainer is still sending
    models = [
        make_tiny_hf(tmp_path / f"{seed}", seed=seed, num_layers=2, heads=2, kv_heads=1, ffn=8192)
        for seed in (1, 2)
    ]
    (tmp_path / "secret").write_text("seventeen letters")
    with two_machines() as cable:
        here, there = cable.inside
        secret = ("--secret-file", str(tmp_path / "secret"))
        with (
            engine_host(tmp_path / "host", f"{cable.addresses[1]}:7100", *secret, inside=there) as host,
            trainer(
                tmp_path, models, inside=here, hosts=[host.at], replicas=1, secret_file=secret[1]
            ) as running,
        ):
            assert running.started["nodes"][0].split()[-1] != os.readlink("/proc/self/ns/net")
            assert "result" in running.do("push 1")
            assert_runs_on(models[1], running.do("generate"), 1)
            cable.slow_down()
            before = cable.sent()
            running.begin("push 2")
            wait_for(lambda: cable.sent() > before + 1_000_000, "the middle of a push")
            cable.cut()
            lost = running.answer()
            assert f"engine replica 0 on {host.at}" in lost["error"]
            assert "lost while receive" in lost["error"]
            assert lost["seconds"] < DEAD_AFTER_S + 10
            assert_ended(host, running.started["pids"], timeout_s=DEAD_AFTER_S + 10)
            # what still waits inside gloo does not keep the trainer
            running.end()
            assert running.process.wait(30) == 0

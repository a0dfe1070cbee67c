"""The launch scripts in a place of their own, with stand-ins for what they start: Python, srun and scontrol."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

from tests.helpers.slurm import job_variables, make_script, make_slurm

ROOT = Path(__file__).parents[2]
SCRIPTS = (
    "torchrun.sh", "engine.sh", "common.sh", "stopping.sh", "slurm.sbatch", "slurm_multinode.sh", "slurm_steps.sh",
)  # fmt: skip
# what torchrun.sh takes from the environment
VARIABLES = ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "NPROC_PER_NODE", "RUN_DIR")

# a trainer goes on until it is asked to stop, torchrun itself then fails with 1; an engine host serves until SIGTERM
PYTHON = """#!/usr/bin/env bash
if [[ $3 == check ]]; then
    [[ ! -e wrong ]] || { echo 'error: r.yaml: 1 problem' >&2; exit 2; }
    [[ ! -e bare ]] || { printf 'Traceback\nModuleNotFoundError: pydantic\n' >&2; exit 1; }
    exit 0
fi
printf '%s\\n' "$@" >>"arguments.$2.$SLURM_NODEID"
if [[ $3 == engine ]]; then
    trap 'echo closed in order >>hosts.log; exit 0' TERM
    [[ -e no_engines ]] && { echo 'port is taken' >&2; exit 2; }
    touch "engine.$SLURM_NODEID.started"
    echo 'listening on 0.0.0.0:1'
    while :; do sleep 0.02; done
fi
trap 'echo ended at once; exit 143' TERM
run_dir=${@:$(($(printf '%s\\n' "$@" | grep -nx -- --run-dir | cut -d: -f1) + 1)):1}
printf %s "$MEGATRON_RL_STALE_STOP" >stale
touch started
while [[ -e patient ]]; do sleep 0.02; done
[[ -e broken ]] && exit 1
while [[ ! -e $run_dir/stop ]]; do sleep 0.02; done
while [[ -e deaf ]]; do sleep 0.02; done
[[ -e slow ]] && exit 1
echo '{}' >"$run_dir/stopped.json"
exit 1
"""


def make_place(place: Path) -> Path:
    """A repository with the scripts and stand-ins for what they start, and a recipe."""
    place.mkdir(parents=True, exist_ok=True)
    for name in SCRIPTS:
        make_script(place / "launch" / name, (ROOT / "launch" / name).read_text())
    make_script(place / ".venv" / "bin" / "python", PYTHON)
    make_slurm(place / "bin")
    (place / "r.yaml").write_text("stages:\n  - kind: sft\n  - kind: rl\n")
    (place / "sft.yaml").write_text("stages:\n  - kind: sft\n")
    return place


def environment(place: Path, nodes: str = "", **more: str) -> dict[str, str]:
    """Without what the machine of the test says of slurm and ranks; `nodes` makes it a job."""
    others = [*VARIABLES, "PYTHONPATH", "MEGATRON_RL_PYTHON"]
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM_", "NCCL_")) and name not in others
    }
    job = job_variables(nodes.split(","), submitted_in=place)
    always = {"PATH": f"{place / 'bin'}:{os.environ['PATH']}", "NPROC_PER_NODE": "2"}
    return kept | always | (job if nodes else {}) | more


def start(place: Path, *command: str, nodes: str = "", wait_for: str = "started") -> subprocess.Popen[str]:
    process = subprocess.Popen(
        ["bash", *command], cwd=place, env=environment(place, nodes), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    wait_until(lambda: (place / wait_for).exists() or process.poll() is not None)
    assert (place / wait_for).exists(), process.communicate()
    return process


def wait_until(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def run(place: Path, *command: str, nodes: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", *command], cwd=place, env=environment(place, nodes, **variables), text=True, capture_output=True,
        timeout=60,
    )  # fmt: skip

"""The launch scripts turn a signal into the stop file, and what a stopped run leaves into exit code and requeue.

torchrun, srun and scontrol are stand-ins: what they start is what these scripts give them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# as a run does: it goes on until it is asked to stop; torchrun itself then fails with 1
RUN = """#!/usr/bin/env bash
trap 'echo ended at once; exit 143' TERM
printf '%s\\n' "$@" >arguments
touch started
while [[ ! -e {run_dir}/stop ]]; do sleep 0.02; done
[[ -e deaf ]] && while :; do sleep 0.02; done
[[ -e broken ]] || echo '{{}}' >{run_dir}/stopped.json
exit 1
"""


def make_script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def start(tmp_path: Path, script: str, *arguments: str, run_dir: str) -> subprocess.Popen[str]:
    make_script(tmp_path / ".venv" / "bin" / "python", RUN.format(run_dir=run_dir))
    make_script(tmp_path / "launch" / "torchrun.sh", (ROOT / "launch" / "torchrun.sh").read_text())
    make_script(tmp_path / "bin" / "srun", '#!/usr/bin/env bash\nshift\nSLURM_NODEID=0 exec "$@"\n')
    make_script(tmp_path / "bin" / "scontrol", '#!/usr/bin/env bash\necho "$@" >>scontrol.log\necho node1\n')
    environment = {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "node1",
    }  # fmt: skip
    process = subprocess.Popen(
        ["bash", script, *arguments],
        cwd=tmp_path, env=os.environ | environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    deadline = time.monotonic() + 30
    while not (tmp_path / "started").exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=lambda n: n.name)
def test_torchrun_turns_a_signal_into_the_stop_file_and_the_stop_into_75(tmp_path, number):
    process = start(tmp_path, "launch/torchrun.sh", "r.yaml", "runs/r", "a=1", run_dir="runs/r")
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (75, "", "")
    arguments = (tmp_path / "arguments").read_text().split("\n")
    assert arguments[-6:-1] == ["train", "r.yaml", "--run-dir", "runs/r", "a=1"]


def test_torchrun_ends_at_once_on_a_second_signal(tmp_path):
    (tmp_path / "deaf").touch()
    process = start(tmp_path, "launch/torchrun.sh", "r.yaml", "runs/r", run_dir="runs/r")
    process.send_signal(signal.SIGTERM)
    while not (tmp_path / "runs" / "r" / "stop").exists():
        time.sleep(0.02)
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=30)
    assert (process.returncode, out) == (143, "ended at once\n")


def test_torchrun_keeps_the_exit_code_of_a_run_that_failed(tmp_path):
    (tmp_path / "broken").touch()
    # what an earlier stop left says nothing of this start
    (tmp_path / "runs" / "r").mkdir(parents=True)
    (tmp_path / "runs" / "r" / "stopped.json").touch()
    process = start(tmp_path, "launch/torchrun.sh", "r.yaml", "runs/r", run_dir="runs/r")
    (tmp_path / "runs" / "r" / "stop").touch()
    process.communicate(timeout=30)
    assert process.returncode == 1


def test_a_slurm_job_that_was_warned_stops_and_requeues_itself(tmp_path):
    process = start(tmp_path, str(ROOT / "launch" / "slurm.sbatch"), "r.yaml", run_dir="runs/r-7")
    process.send_signal(signal.SIGUSR1)
    process.communicate(timeout=30)
    assert process.returncode == 75
    assert (tmp_path / "scontrol.log").read_text().splitlines()[-1] == "requeue 7"


def test_a_slurm_job_that_failed_or_was_stopped_by_hand_is_not_requeued(tmp_path):
    process = start(tmp_path, str(ROOT / "launch" / "slurm.sbatch"), "r.yaml", run_dir="runs/r-7")
    (tmp_path / "runs" / "r-7" / "stop").touch()
    process.communicate(timeout=30)
    assert process.returncode == 75
    assert "requeue" not in (tmp_path / "scontrol.log").read_text()

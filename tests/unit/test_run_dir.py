"""One run at a time writes to a run directory, and one that was killed holds it no longer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl.errors import MegatronRLError
from megatron_rl.train import run_dir
from megatron_rl.train.run_dir import check_unused, make_run_dir, take_run_dir

ROOT = Path(__file__).parents[2]
HOLD = """
import subprocess, sys, time
from pathlib import Path
from megatron_rl.train.run_dir import take_run_dir
lock = take_run_dir(Path(sys.argv[1]))
# what a run starts must not hold the directory after its end
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], pass_fds=[lock.fileno()])
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(run_dir, "_END_S", 0.5)
    make_run_dir(tmp_path / "run")
    return tmp_path / "run"


def test_a_second_run_is_refused_by_name_until_the_first_has_ended_however(place: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(place)]
    holder = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    child = int(holder.stdout.readline())
    try:
        for ask in (check_unused, take_run_dir):
            with pytest.raises(
                MegatronRLError, match=rf"run: is in use by process {holder.pid} on .* since 20"
            ):
                ask(place)
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
        check_unused(place)
        lock = take_run_dir(place)
        assert lock is not None
        lock.close()
    finally:
        os.kill(child, signal.SIGKILL)
        holder.kill()
        holder.stdout.close()

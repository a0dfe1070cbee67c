"""One run at a time writes to a run directory, one that was killed holds it no longer, and none is begun over."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl.errors import CheckpointError, MegatronRLError
from megatron_rl.recipe.load import load_recipe
from megatron_rl.train import run_dir
from megatron_rl.train.run_data import check_never_saved
from megatron_rl.train.run_dir import check_unused, make_run_dir, take_run_dir
from tests.helpers.recipes import write_recipe

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


@pytest.mark.parametrize(
    ("last", "is_lost"), [(0, False), (5, False), (10, False), (11, True), (20, True), (23, True)]
)
def test_a_run_whose_checkpoints_are_gone_is_not_begun_anew_over_its_records(
    tmp_path: Path, last: int, is_lost: bool
) -> None:
    # 20 steps of SFT before RL, a checkpoint every 5
    recipe = load_recipe(write_recipe(tmp_path)).recipe
    lines = (json.dumps({"step": step}) + "\n" for step in range(1, last + 1))
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    if is_lost:
        with pytest.raises(CheckpointError, match=rf"has {last} steps in metrics\.jsonl but no checkpoint"):
            check_never_saved(tmp_path, recipe)
    else:
        check_never_saved(tmp_path, recipe)

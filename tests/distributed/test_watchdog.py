"""Two ranks under the launcher watch each other: who is at work is left alone, who is waited for in vain is named."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]

RANK = """
import os, sys, time
from datetime import timedelta
from pathlib import Path
from megatron_rl.platform.process import run_process
from megatron_rl.train.rank_process import RankProcess, report_failure

def main():
    process = RankProcess(Path("."), stop_grace_s=20.0)
    import torch.distributed as dist
    from megatron_rl.errors import LostPeerError
    from megatron_rl.parallel.collectives import all_gather_object
    from megatron_rl.train.watchdog import Watchdog
    rank, port = process.place.rank, int(os.environ["MASTER_PORT"])
    # the time-out of the group is no time to import in
    Path(f"imported_{rank}").touch()
    while not Path(f"imported_{1 - rank}").exists():
        time.sleep(0.02)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2, timeout=timedelta(seconds=TIMEOUT_S)
    )
    all_gather_object(rank)
    try:
        with Watchdog(process, address="127.0.0.1", port=port, silence_timeout_s=2.0):
            BODY
    except LostPeerError as error:
        report_failure(str(error), exit_code=1, is_consequence=True)
        return 1
    process.close()
    return 0

run_process(main)
"""

PARENT = """
import sys
from pathlib import Path
from megatron_rl.train.launcher import launch_local
sys.exit(launch_local([sys.executable, "rank.py"], nproc=2, log_dir=Path("logs"), stop_grace_s=20.0))
"""


def run(directory: Path, body: str, *, timeout_s: float) -> tuple[int, str]:
    body = textwrap.indent(textwrap.dedent(body), " " * 12).strip()
    (directory / "rank.py").write_text(RANK.replace("TIMEOUT_S", str(timeout_s)).replace("BODY", body))
    (directory / "parent.py").write_text(PARENT)
    done = subprocess.run(
        [sys.executable, "parent.py"],
        cwd=directory, env=os.environ | {"PYTHONPATH": str(ROOT)}, text=True, capture_output=True, timeout=200,
    )  # fmt: skip
    return done.returncode, done.stderr


def test_a_rank_that_holds_its_interpreter_for_a_long_computation_is_left_alone(tmp_path):
    body = """
    if rank == 1:
        count, took_s = 5_000_000, 0.0
        while took_s < 5.0:
            # how fast the processor is may change from one call to the next
            count *= 2
            began = time.monotonic()
            sum(range(count))  # one call in C, which no other thread of this process can interrupt
            took_s = time.monotonic() - began
    assert all_gather_object(rank) == [0, 1]
    """
    assert run(tmp_path, body, timeout_s=180) == (0, "")
    assert not list(tmp_path.glob("logs/stacks_*"))


def test_a_rank_that_is_waited_for_in_vain_is_named_with_its_phase_and_leaves_its_stacks(tmp_path):
    body = """
    process.phases.begin_step("sft", 2, "save")
    if rank == 1:
        time.sleep(600)
    time.sleep(0.5)
    process.phases.begin_step("sft", 3, "train")
    all_gather_object(rank)
    """
    code, errors = run(tmp_path, body, timeout_s=4)
    assert code == 1
    assert re.search(
        r"^error: rank 0 of 2 failed first \(exit code 1\)\n  all_gather_object on rank 0 of 2 failed: (.|\n)*"
        r"  rank 0 is in sft step 3, phase train for \d+\.\d s; "
        r"rank 1 \(pid \d+ on \S+\) is behind: sft step 2, phase save for \d+\.\d s\n"
        r"  stacks of all threads: logs/stacks_rank_\*\.txt",
        errors,
    ), errors
    assert "rank.py" in (tmp_path / "logs" / "stacks_rank_1.txt").read_text()
    assert "all_gather_object" in (tmp_path / "logs" / "stacks_rank_0.txt").read_text()

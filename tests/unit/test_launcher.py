"""Local ranks start together and end together: one error, no orphan, whatever ends first."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# every rank leaves its process id in the current directory, then runs the body of the test
PRELUDE = """
import os, signal, subprocess, sys, time
from pathlib import Path
from megatron_rl.train.launcher import enter_rank, rank_environment, report_failure
me = rank_environment()
Path(f"pid_{me.rank}").write_text(str(os.getpid()))
def others_started():
    while len(list(Path(".").glob("pid_*"))) < me.world_size:
        time.sleep(0.02)
"""

PARENT = """
import sys
from pathlib import Path
from megatron_rl.train.launcher import launch_local
sys.exit(launch_local([sys.executable, "rank.py"], nproc=int(sys.argv[1]), log_dir=Path("logs")))
"""


def start(directory: Path, body: str, *, nproc: int = 2) -> subprocess.Popen[str]:
    """A launcher process of its own, so that it can be signalled like a user's."""
    (directory / "rank.py").write_text(PRELUDE + textwrap.dedent(body))
    (directory / "parent.py").write_text(PARENT)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "parent.py", str(nproc)],
        cwd=directory, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def finish(process: subprocess.Popen[str], *, timeout_s: float = 60.0) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=timeout_s)
    finally:
        process.kill()
    return process.returncode, out, err


def wait_for(condition, *, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    """Zombies have ended: whoever adopted them has only not noticed yet."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def pids(directory: Path) -> list[int]:
    return [int(path.read_text()) for path in sorted(directory.glob("pid_*")) if path.read_text()]


def test_ranks_get_their_variables_and_rank_0_has_the_terminal(tmp_path):
    body = """
    print("rank", me.rank, me.local_rank, me.world_size)
    print(os.environ["MASTER_ADDR"], os.environ["OMP_NUM_THREADS"], os.environ["MASTER_PORT"])
    """
    code, out, err = finish(start(tmp_path, body, nproc=3))
    assert (code, err) == (0, "")
    rank_0, address = out.splitlines()
    assert rank_0 == "rank 0 0 3"
    assert address.startswith("127.0.0.1 1 ")
    assert (tmp_path / "logs/rank_1.log").read_text() == f"rank 1 1 3\n{address}\n"
    assert not (tmp_path / "logs/rank_0.log").exists()


def test_a_user_error_of_every_rank_is_printed_once(tmp_path):
    body = """
    report_failure("recipe.yaml: 1 problem\\n  layout.tp: got 3", exit_code=2)
    sys.exit(2)
    """
    code, _, err = finish(start(tmp_path, body, nproc=3))
    assert code == 2
    assert err.count("layout.tp: got 3") == 1
    assert "failed first (exit code 2)\n  recipe.yaml: 1 problem\n    layout.tp: got 3" in err


def test_the_first_failing_rank_is_named_and_the_others_end(tmp_path):
    body = """
    others_started()
    if me.rank == 1:
        print("the last words", file=sys.stderr)
        sys.exit(7)
    time.sleep(600)
    """
    code, _, err = finish(start(tmp_path, body, nproc=3))
    assert code == 7
    assert err.startswith(
        "error: rank 1 of 3 failed first (exit code 7)\n  the last words\nlog: logs/rank_1.log"
    )
    assert not any(map(is_running, pids(tmp_path)))


def test_a_rank_that_lost_its_peer_is_not_blamed(tmp_path):
    body = """
    others_started()
    if me.rank == 1:
        report_failure("the cause", exit_code=2)
        time.sleep(0.5)   # slow to end
        sys.exit(2)
    sys.exit("connection closed by peer")
    """
    code, _, err = finish(start(tmp_path, body))
    assert code == 2
    assert "rank 1 of 2 failed first" in err and "  the cause" in err


def test_a_rank_that_crashed_is_blamed_before_one_that_lost_it(tmp_path):
    body = """
    others_started()
    if me.rank == 1:
        report_failure("out of memory", exit_code=1)
        sys.exit(1)
    time.sleep(0.3)       # the connection closes when the other has ended
    report_failure("all_gather failed: another rank stopped", exit_code=1)
    sys.exit(1)
    """
    code, _, err = finish(start(tmp_path, body))
    assert code == 1
    assert "rank 1 of 2 failed first" in err and "  out of memory" in err


def test_a_killed_rank_is_named_with_its_signal(tmp_path):
    body = """
    enter_rank()
    others_started()
    if me.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
    """
    code, _, err = finish(start(tmp_path, body))
    assert code == 128 + signal.SIGKILL
    assert "rank 1 of 2 failed first (killed by SIGKILL)" in err


def test_a_rank_that_ignores_sigterm_and_its_children_are_killed(tmp_path):
    body = """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(f"pid_child_{me.rank}").write_text(str(child.pid))
    while len(list(Path(".").glob("pid_child_*"))) < 2:
        time.sleep(0.02)
    if me.rank == 0:
        sys.exit(3)
    time.sleep(600)
    """
    code, _, err = finish(start(tmp_path, body))
    assert code == 3
    assert "rank 0 of 2 failed first (exit code 3)\n  its output stands above" in err
    assert len(pids(tmp_path)) == 4
    wait_for(lambda: not any(map(is_running, pids(tmp_path))))


def test_ctrl_c_reaches_every_rank_once_and_they_may_clean_up(tmp_path):
    body = """
    enter_rank()
    Path(f"ready_{me.rank}").touch()
    try:
        time.sleep(600)
    except KeyboardInterrupt:
        Path(f"cleaned_{me.rank}").touch()
        sys.exit(130)
    """
    process = start(tmp_path, body)
    wait_for(lambda: len(list(tmp_path.glob("ready_*"))) == 2)
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process)
    assert code == 130
    assert err == "interrupted: all 2 ranks have ended\n"
    assert len(list(tmp_path.glob("cleaned_*"))) == 2
    assert not any(map(is_running, pids(tmp_path)))


def test_a_second_ctrl_c_kills(tmp_path):
    body = """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path(f"ready_{me.rank}").touch()
    time.sleep(600)
    """
    process = start(tmp_path, body)
    wait_for(lambda: len(list(tmp_path.glob("ready_*"))) == 2)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    code, _, _ = finish(process, timeout_s=10.0)
    assert code == 130
    assert not any(map(is_running, pids(tmp_path)))


def test_sigterm_lets_ranks_clean_up(tmp_path):
    body = """
    enter_rank()
    Path(f"ready_{me.rank}").touch()
    try:
        time.sleep(600)
    finally:
        Path(f"cleaned_{me.rank}").touch()
    """
    process = start(tmp_path, body)
    wait_for(lambda: len(list(tmp_path.glob("ready_*"))) == 2)
    process.send_signal(signal.SIGTERM)
    code, _, err = finish(process)
    assert (code, err) == (143, "terminated: all 2 ranks have ended\n")
    assert len(list(tmp_path.glob("cleaned_*"))) == 2


@pytest.mark.parametrize("deaf", [False, True], ids=["ends on SIGTERM", "ignores SIGTERM"])
def test_ranks_end_when_the_launcher_is_killed(tmp_path, deaf):
    body = f"""
    enter_rank()
    if {deaf}:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path(f"ready_{{me.rank}}").touch()
    time.sleep(600)
    """
    process = start(tmp_path, body)
    wait_for(lambda: len(list(tmp_path.glob("ready_*"))) == 2)
    process.kill()
    process.wait()
    wait_for(lambda: not any(map(is_running, pids(tmp_path))))


def test_a_helper_that_outlives_its_rank_is_not_left_behind(tmp_path):
    body = """
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(f"pid_child_{me.rank}").write_text(str(child.pid))
    """
    code, _, err = finish(start(tmp_path, body))
    assert (code, err) == (0, "")
    assert len(pids(tmp_path)) == 4
    wait_for(lambda: not any(map(is_running, pids(tmp_path))))


def test_a_log_of_an_earlier_run_is_kept_but_not_quoted(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/rank_1.log").write_text("an old error\n")
    code, _, err = finish(start(tmp_path, "sys.exit(5 if me.rank else 0)"))
    assert code == 5
    assert "it printed nothing" in err and "an old error" not in err
    assert (tmp_path / "logs/rank_1.log").read_text() == "an old error\n"

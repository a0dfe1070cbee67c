"""Local ranks start together and end together: one error, no orphan, whatever ends first."""

from __future__ import annotations

import os
import re
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
from megatron_rl.train.rank_process import RankProcess, rank_environment, report_failure
from megatron_rl.train.stopping import STOPPED, Stopped
me = rank_environment()
def enter_rank(stop_grace_s=20.0):
    return RankProcess(Path("."), stop_grace_s=stop_grace_s)
Path(f"pid_{me.rank}").write_text(str(os.getpid()))
def others_started():
    while len(list(Path(".").glob("pid_*"))) < me.world_size:
        time.sleep(0.02)
"""

PARENT = """
import sys
from pathlib import Path
from megatron_rl.train.launcher import launch_local
grace_s = float(sys.argv[2]) if len(sys.argv) > 2 else None
command = [sys.executable, "rank.py"]
sys.exit(launch_local(command, nproc=int(sys.argv[1]), log_dir=Path("logs"), stop_grace_s=grace_s))
"""


def start(
    directory: Path, body: str, *, nproc: int = 2, grace_s: float | None = None
) -> subprocess.Popen[str]:
    """A launcher process of its own, so that it can be signalled like a user's."""
    (directory / "rank.py").write_text(PRELUDE + textwrap.dedent(body))
    (directory / "parent.py").write_text(PARENT)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "parent.py", str(nproc), *([] if grace_s is None else [str(grace_s)])],
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


def test_the_port_where_ranks_meet_is_kept_for_them_while_they_start(tmp_path):
    body = """
    import socket
    port = int(os.environ["MASTER_PORT"])
    with socket.socket() as other:
        try:
            other.bind(("127.0.0.1", port))
            print("anybody gets it")
        except OSError as error:
            print(error.strerror)
    with socket.create_server(("127.0.0.1", port)):
        socket.create_connection(("127.0.0.1", port)).close()
        print("listens")
    """
    assert finish(start(tmp_path, body, nproc=1)) == (0, "Address already in use\nlistens\n", "")


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
        Path("reported").touch()
        time.sleep(0.5)   # slow to end
        sys.exit(2)
    while not Path("reported").exists():
        time.sleep(0.02)
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
        Path("reported").touch()
        sys.exit(1)
    # the connection closes when the other has ended
    while not Path("reported").exists():
        time.sleep(0.02)
    report_failure("all_gather failed: another rank stopped", exit_code=1)
    sys.exit(1)
    """
    code, _, err = finish(start(tmp_path, body))
    assert code == 1
    assert "rank 1 of 2 failed first" in err and "  out of memory" in err


def test_a_killed_rank_is_named_with_its_signal_and_its_phase(tmp_path):
    body = """
    process = enter_rank()
    others_started()
    if me.rank == 1:
        process.phases.begin_step("rl", 3, "reward")
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
    """
    code, _, err = finish(start(tmp_path, body))
    assert code == 128 + signal.SIGKILL
    assert re.match(
        r"error: rank 1 of 2 failed first \(killed by SIGKILL in rl step 3, phase reward for \d\.\d s\)", err
    ), err


def test_a_rank_that_ignores_sigterm_and_its_children_are_killed(tmp_path):
    body = """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
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
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGINT, lambda *_: Path(f"heard_{me.rank}").touch())
    Path(f"ready_{me.rank}").touch()
    while True:
        time.sleep(600)
    """
    process = start(tmp_path, body)
    wait_for(lambda: len(list(tmp_path.glob("ready_*"))) == 2)
    process.send_signal(signal.SIGINT)
    # one signal that comes before the first was looked at would be one with it
    wait_for(lambda: len(list(tmp_path.glob("heard_*"))) == 2)
    process.send_signal(signal.SIGINT)
    # less than a single Ctrl-C gives them
    code, _, _ = finish(process, timeout_s=12.0)
    assert code == 130
    assert not any(map(is_running, pids(tmp_path)))


# a rank of a loop whose steps take a moment, which saves and stops when it was asked to
LOOP = """
process = enter_rank()
process.phases.begin_step("sft", 1, "train")
Path(f"ready_{me.rank}").touch()
while not process.stop.reason:
    time.sleep(0.05)
Path(f"saved_{me.rank}").touch()
process.close()
sys.exit(STOPPED)
"""


def started(directory: Path, body: str, *, grace_s: float | None = 60.0) -> subprocess.Popen[str]:
    process = start(directory, body, grace_s=grace_s)
    wait_for(lambda: len(list(directory.glob("ready_*"))) == 2)
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=lambda n: n.name)
def test_a_request_to_stop_is_passed_on_and_has_an_exit_code_of_its_own(tmp_path, number):
    process = started(tmp_path, LOOP)
    process.send_signal(number)
    code, _, err = finish(process)
    assert (code, err) == (75, "stopped: all 2 ranks have ended\n")
    assert len(list(tmp_path.glob("saved_*"))) == 2
    # nothing was written to them
    assert not list(tmp_path.glob("logs/stacks_*"))


def test_a_request_to_one_rank_stops_all(tmp_path):
    process = started(tmp_path, LOOP)
    os.kill(pids(tmp_path)[1], signal.SIGTERM)
    code, _, err = finish(process)
    assert (code, err) == (75, "stopped: all 2 ranks have ended\n")
    assert len(list(tmp_path.glob("saved_*"))) == 2


def test_a_rank_in_which_nothing_has_begun_stops_where_it_stands(tmp_path):
    body = """
    process = enter_rank()
    Path(f"ready_{me.rank}").touch()
    try:
        time.sleep(600)
    except Stopped as stopped:
        assert str(stopped).startswith("on SIGTERM before the first step (phase start for "), stopped
        raise
    """
    process = started(tmp_path, body)
    process.send_signal(signal.SIGTERM)
    assert finish(process)[::2] == (75, "stopped: all 2 ranks have ended\n")


@pytest.mark.parametrize("catches", ["except BaseException: pass", "except BaseException: raise ImportError"])
def test_imports_that_catch_what_they_do_not_know_keep_no_rank_from_stopping(tmp_path, catches):
    body = f"""
    def leave(process, stopped):
        Path(f"left_{{me.rank}}").write_text(str(stopped))
        os._exit(stopped.exit_code)
    process = RankProcess(Path("."), stop_grace_s=20.0, leave=leave)
    Path(f"ready_{{me.rank}}").touch()
    while True:
        try: time.sleep(600)
        {catches}
    """
    process = started(tmp_path, body)
    process.send_signal(signal.SIGTERM)
    assert finish(process)[::2] == (75, "stopped: all 2 ranks have ended\n")
    assert (tmp_path / "left_1").read_text().startswith("on SIGTERM before the first step (phase start for ")


BUSY = """
process = enter_rank()
process.phases.begin_step("rl", 3, "generate")
Path(f"ready_{me.rank}").touch()
try:
    time.sleep(600)
finally:
    Path(f"cleaned_{me.rank}").touch()
"""


def test_a_step_that_does_not_end_within_the_grace_is_ended(tmp_path):
    process = started(tmp_path, BUSY, grace_s=2.0)
    process.send_signal(signal.SIGTERM)
    code, _, err = finish(process)
    assert code == 143
    assert re.fullmatch(
        r"terminated: all 2 ranks have ended; run\.stop_grace_s was over before the next step border "
        r"\(rl step 3, phase generate for \d\.\d s\); --resume continues from the last checkpoint\n",
        err,
    ), err
    assert len(list(tmp_path.glob("cleaned_*"))) == 2


def test_a_second_request_ends_at_once(tmp_path):
    process = started(tmp_path, BUSY)
    process.send_signal(signal.SIGUSR1)
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    # less than the first one gives them
    code, _, err = finish(process, timeout_s=15.0)
    assert code == 143
    assert "a second signal came before the next step border" in err
    assert len(list(tmp_path.glob("cleaned_*"))) == 2


def test_without_checkpoints_a_request_ends_at_once_and_says_so(tmp_path):
    process = started(tmp_path, BUSY.replace("enter_rank()", "enter_rank(None)"), grace_s=None)
    process.send_signal(signal.SIGTERM)
    code, _, err = finish(process)
    assert code == 143
    assert err == (
        "terminated: all 2 ranks have ended; without `checkpoint:` in the recipe nothing is saved to resume from\n"
    )
    assert len(list(tmp_path.glob("cleaned_*"))) == 2


def test_a_rank_that_fails_while_it_stops_is_an_error(tmp_path):
    body = LOOP.replace(
        "process.close()",
        """
if me.rank == 1:
    report_failure("no room for the checkpoint", exit_code=2)
    sys.exit(2)
time.sleep(600)
""",
    )
    process = started(tmp_path, body)
    process.send_signal(signal.SIGTERM)
    code, _, err = finish(process)
    assert code == 2
    assert err.startswith("error: rank 1 of 2 failed first (exit code 2)\n  no room for the checkpoint")


def test_sigusr2_writes_the_stacks_of_all_threads_and_the_rank_goes_on(tmp_path):
    process = started(tmp_path, LOOP)
    os.kill(pids(tmp_path)[1], signal.SIGUSR2)
    stacks = tmp_path / "logs" / "stacks_rank_1.txt"
    wait_for(lambda: "rank.py" in stacks.read_text() and "in _watch" in stacks.read_text())
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == 75
    assert not (tmp_path / "logs" / "stacks_rank_0.txt").exists()


@pytest.mark.parametrize("deaf", [False, True], ids=["ends on SIGTERM", "ignores SIGTERM"])
def test_ranks_end_when_the_launcher_is_killed(tmp_path, deaf):
    body = f"""
    enter_rank()
    if {deaf}:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    Path(f"ready_{{me.rank}}").touch()
    time.sleep(600)
    """
    process = start(tmp_path, body)
    wait_for(lambda: len(list(tmp_path.glob("ready_*"))) == 2)
    process.kill()
    process.wait()
    wait_for(lambda: not any(map(is_running, pids(tmp_path))))


def test_a_stopped_rank_ends_when_the_launcher_is_killed(tmp_path):
    process = start(tmp_path, "enter_rank(); Path(f'ready_{me.rank}').touch(); time.sleep(600)")
    wait_for(lambda: len(list(tmp_path.glob("ready_*"))) == 2)
    for pid in pids(tmp_path):
        os.kill(pid, signal.SIGSTOP)
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

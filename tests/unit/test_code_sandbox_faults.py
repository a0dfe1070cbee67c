"""What is lost while programs run: supervisors, trainers, slots. Nothing is graded wrongly and nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from megatron_rl.errors import RewardError
from megatron_rl.recipe.sandbox import SandboxConfig
from megatron_rl.rewards.code_tests import CodeTests
from megatron_rl.rewards.protocol import RewardInput
from megatron_rl.rewards.sandbox.client import Sandbox, Settings
from megatron_rl.rewards.sandbox.jobs import Job, JobKind, Limits, Status
from megatron_rl.rewards.sandbox.processes import processes_of
from tests.helpers.readable import make_reachable

FIRST_UID = 62000  # a range of our own
UIDS = set(range(FIRST_UID, FIRST_UID + 384))
SLOW = b"import time\ntime.sleep(1)\nprint(7)"


def settings(**more) -> Settings:
    return Settings(slots=2, first_uid=FIRST_UID, **more)


def jobs(count: int, program: bytes = SLOW) -> list[Job]:
    limits = Limits(wall_s=20.0)
    return [Job(id=i, kind=JobKind.STDIN, program=program, payload=b"", limits=limits) for i in range(count)]


def wait_until(condition, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stream:
            return stream.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def alive() -> list[int]:
    """Processes of our uids. Zombies of a supervisor that was killed wait for the machine's init."""
    return [pid for pid in processes_of(UIDS) if is_running(pid)]


def nothing_is_left() -> bool:
    """No process, but perhaps a sandbox that died with its supervisor in its own start: the next claim ends it."""
    if alive():
        sandbox = Sandbox(Settings(slots=16, first_uid=FIRST_UID))
        sandbox.start()
        sandbox.close()
    return not alive()


@pytest.mark.parametrize(("number", "silence_s"), [(signal.SIGKILL, 30.0), (signal.SIGSTOP, 1.0)])
def test_a_lost_supervisor_is_replaced_and_its_jobs_are_done_again(number, silence_s):
    sandbox = Sandbox(settings(silence_s=silence_s))
    # Python has to start in it too, on a busy machine
    limits = Limits(wall_s=6.0)
    work = [Job(id=i, kind=JobKind.STDIN, program=SLOW, payload=b"", limits=limits) for i in range(4)]
    sandbox.start()
    outcomes = []
    thread = threading.Thread(target=lambda: outcomes.extend(sandbox.run(work)))
    thread.start()
    wait_until(lambda: len(alive()) >= 4)
    os.kill(sandbox.pid, number)
    thread.join(60)
    assert [(o.id, o.status, o.output) for o in outcomes] == [(i, Status.FINISHED, b"7\n") for i in range(4)]
    assert sandbox.num_restarts == 1
    sandbox.close()
    wait_until(nothing_is_left)


def test_a_job_that_takes_every_supervisor_with_it_is_given_up():
    sandbox = Sandbox(settings())
    done = threading.Event()

    def kill_each() -> None:
        last = None
        while not done.is_set():
            if sandbox.pid not in (None, last) and alive():
                last = sandbox.pid
                os.kill(last, signal.SIGKILL)
            time.sleep(0.01)

    thread = threading.Thread(target=kill_each)
    thread.start()
    (outcome,) = sandbox.run(jobs(1, b"import time\ntime.sleep(9)"))
    done.set()
    thread.join()
    assert outcome.status is Status.SANDBOX_ERROR
    assert sandbox.num_restarts >= 3
    sandbox.close()
    wait_until(nothing_is_left)


def test_a_killed_trainer_takes_supervisor_and_programs_with_it():
    # imports no torch: a trainer does, but here it would only take time
    text = (
        "from megatron_rl.rewards.sandbox.client import Sandbox, Settings\n"
        "from megatron_rl.rewards.sandbox.jobs import Job, JobKind\n"
        f"s = Sandbox(Settings(first_uid={FIRST_UID}))\ns.start()\nprint(s.pid, flush=True)\n"
        "s.run([Job(id=0, kind=JobKind.STDIN, program=b'import time; time.sleep(99)', payload=b'')] * 2)"
    )
    trainer = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True)
    supervisor = int(trainer.stdout.readline())
    wait_until(lambda: len(alive()) >= 4)
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    wait_until(lambda: not alive())
    wait_until(lambda: not is_running(supervisor))


@pytest.mark.skipif(os.geteuid() != 0, reason="slots have a uid of their own only where we are root")
def test_a_slot_whose_uid_does_not_get_empty_takes_another():
    sandbox = Sandbox(Settings(slots=1, first_uid=FIRST_UID, vacate_s=0.3))
    (uid,) = sandbox.start()["uids"]
    # they ended, and nobody but us can take them away: neither from its uid nor from the one that comes next
    zombies = [subprocess.Popen(["true"], user=u, group=u, extra_groups=[]) for u in (uid, uid + 1)]
    wait_until(lambda: not any(is_running(z.pid) for z in zombies))
    uids = {int(o.output) for o in sandbox.run(jobs(2, b"import os\nprint(os.getuid())"))}
    assert len(uids) == 2 and uid in uids and uids <= UIDS - {uid + 1}
    for zombie in zombies:
        zombie.wait()
    sandbox.close()


def test_closing_ends_a_batch_that_runs():
    sandbox = Sandbox(settings())
    sandbox.start()
    caught = []

    def grade() -> None:
        try:
            sandbox.run(jobs(4, b"import time\ntime.sleep(99)"))
        except RewardError as error:
            caught.append(str(error))

    thread = threading.Thread(target=grade)
    thread.start()
    wait_until(lambda: len(alive()) >= 4)
    sandbox.close()
    thread.join(20)
    assert caught == ["sandbox: closed while it was grading"]
    assert alive() == []
    with pytest.raises(RewardError, match="used after close"):
        sandbox.run(jobs(1))


def test_two_supervisors_share_the_range_of_uids():
    first, second = Sandbox(settings()), Sandbox(settings())
    assert not set(first.start()["uids"]) & set(second.start()["uids"])
    first.close()
    second.close()


def test_without_bubblewrap_no_program_runs(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(
        RewardError, match=r"bubblewrap \(bwrap\) is not installed, .* sandbox.allow_weak: true"
    ):
        CodeTests(SandboxConfig(first_uid=FIRST_UID))


@pytest.mark.skipif(os.geteuid() != 0, reason="running without bubblewrap is refused where we are not root")
def test_programs_run_without_bubblewrap_where_somebody_asks_for_it_by_name(monkeypatch, tmp_path):
    make_reachable(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("PATH", "/usr/bin/../bin/nowhere")
    reward = CodeTests(SandboxConfig(first_uid=FIRST_UID, allow_weak=True))
    assert "NO namespaces" in reward.notice
    assert "WEAK: a program" in reward.notice and "reaches the network" in reward.notice
    programs = [
        "print(int(input()) + 1)",
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(60)\nprint(5)",
        "import time\ntime.sleep(60)",
        "import os\nos.kill(-1, 9)",
        "raise ValueError",
    ]
    tests = {"inputs": ["4"], "outputs": ["5"], "limits": {"wall_s": 1.5}}
    grades = reward.grade([RewardInput(answer=tests, text=f"```\n{p}\n```") for p in programs])
    assert [grade.score for grade in grades] == [1, 1, 0, 0, 0]
    reward.close()
    assert alive() == []
    assert list(tmp_path.iterdir()) == []


def test_an_interpreter_that_is_none_is_named():
    with pytest.raises(RewardError, match=r"sandbox.python: no interpreter at /nowhere/python"):
        CodeTests(SandboxConfig(first_uid=FIRST_UID, python="/nowhere/python"))
    with pytest.raises(RewardError, match=r"does not run as a Python interpreter"):
        CodeTests(SandboxConfig(first_uid=FIRST_UID, python="/bin/true"))

"""When a rank counts as silent, and what is said of it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time

from megatron_rl.train.phases import Phase, others_are
from megatron_rl.train.process_state import ProcessState, process_state
from megatron_rl.train.watchdog import Silence, is_busy, silence_message


def phase(name: str, *, step: int = 3, since: float | None = None, pid: int = 17) -> Phase:
    since = time.time() - 5.0 if since is None else since
    return Phase(stage="rl", step=step, phase=name, since=since, pid=pid, host="node1")


def test_silence_is_counted_from_the_last_beat():
    silence = Silence()
    assert [silence.observe(b"1", now=float(now)) for now in range(4)] == [0.0, 1.0, 2.0, 3.0]
    assert silence.observe(b"2", now=4.0) == 0.0
    assert silence.observe(b"2", now=5.5) == 1.5


def test_a_rank_that_was_never_heard_of_is_silent_too():
    silence = Silence()
    assert [silence.observe(None, now=float(now)) for now in range(3)] == [0.0, 1.0, 2.0]


def test_time_in_which_the_watcher_itself_stood_still_is_no_silence():
    silence = Silence()
    silence.observe(b"1", now=0.0)
    assert silence.observe(b"1", now=1.0) == 1.0
    # the machine was suspended for an hour, and all ranks with it
    assert silence.observe(b"1", now=3601.0) <= 3.0


def test_a_process_at_work_is_busy_and_a_stopped_one_is_not():
    def state(letter: str, cpu_s: float) -> ProcessState:
        return ProcessState(letter=letter, cpu_s=cpu_s)

    assert is_busy(state("R", 10.0), 10.0, 60.0)
    assert is_busy(state("S", 11.0), 10.0, 60.0)
    assert not is_busy(state("S", 10.1), 10.0, 60.0)
    assert not is_busy(state("D", 10.0), 10.0, 60.0)
    assert not is_busy(state("T", 60.0), 10.0, 60.0)
    assert not is_busy(None, 0.0, 60.0)


def test_the_kernel_says_whether_a_process_runs_was_stopped_or_is_gone():
    assert process_state(os.getpid()).letter == "R"
    assert process_state(os.getpid()).cpu_s > 0.0
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        sleeper.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + 10.0
        while not process_state(sleeper.pid).is_stopped:
            assert time.monotonic() < deadline
        assert str(process_state(sleeper.pid)) == "stopped (state T): by SIGSTOP or Ctrl-Z"
    finally:
        sleeper.kill()
        sleeper.wait()
    assert str(process_state(sleeper.pid)) == "gone"


def test_the_message_names_rank_process_stage_step_phase_and_state():
    stopped = ProcessState(letter="T", cpu_s=1.0)
    assert re.fullmatch(
        r"rank 5 \(pid 17 on node1\) has been silent for 61 s \(run\.silence_timeout_s = 60\): rl step 3, phase "
        r"generate for \d\.\d s; its process is stopped \(state T\): by SIGSTOP or Ctrl-Z",
        silence_message(5, phase("generate"), stopped, 61.2, timeout_s=60.0),
    )
    assert silence_message(5, phase("generate"), None, 61.2, timeout_s=60.0).endswith(" s")
    assert "never been heard of" in silence_message(5, None, None, 61.2, timeout_s=60.0)


def test_ranks_elsewhere_are_named_and_those_behind_are_told_from_those_ahead():
    now = time.time()
    # seconds that pass until they are told do not matter
    mine = phase("train", step=4, since=now - 1000)
    phases = {
        0: mine,
        1: phase("train", step=4, since=now - 999),
        2: phase("save", step=3, since=now - 6000, pid=21),
        3: phase("sync", step=4, since=now - 1),
        4: None,
    }
    first, behind, elsewhere, unknown = others_are(0, phases).split("; ")
    assert re.match(r"rank 0 is in rl step 4, phase train for 10\d\d\.\d s", first)
    assert re.match(r"rank 2 \(pid 21 on node1\) is behind: rl step 3, phase save for 60\d\d\.\d s", behind)
    assert elsewhere.startswith("rank 3 (pid 17 on node1) is elsewhere: rl step 4, phase sync")
    assert unknown == "nothing is known of rank 4"
    assert others_are(0, {0: mine, 1: mine}).endswith(", and so are all others")

"""An engine process that stops or dies is an error in time, told from its own part of the log. Without vLLM."""

import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from megatron_rl.errors import EngineError, LostEngineError
from megatron_rl.rollout.engine_process import EngineProcess
from tests.helpers.processes import stop

ROOT = Path(__file__).parents[2]


@pytest.fixture
def start(tmp_path):
    """start(): a process that waits for its first message; all append to one log."""
    started = []

    def one():
        process = EngineProcess(3, tmp_path / "logs" / "engine_3.log")
        started.append(process)
        wait_for_log(process, f"--- engine process {process.pid} started 20")
        return process

    yield one
    for process in started:
        process.close()


def wait_for_log(process, text):
    deadline = time.monotonic() + 60
    while text not in process.log_path.read_text():
        assert time.monotonic() < deadline, process.log_path.read_text()
        time.sleep(0.02)


def test_a_stopped_engine_that_takes_no_bytes_is_an_error_in_time_and_can_be_closed(start):
    process = start()
    stop(process.pid)
    message = [{"prompt_token_ids": [1234] * 1_000_000}]
    expected = (
        rf"engine replica 3 \(pid {process.pid}\): did not answer within 0\.3 s while generate; "
        rf"its process {process.pid} is stopped \(state T\); log"
    )
    for _ in range(2):  # half a message went out: the second must not follow it
        with pytest.raises(LostEngineError, match=expected):
            process.ask("generate", timeout_s=0.3, requests=message)
    process.close()
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


def test_a_silent_process_is_killed_and_named_and_one_that_beats_is_not(start):
    process = start()
    # what `start` does once the model is loaded
    watching = threading.Thread(target=process._watch, args=([process.pid], 3.0))
    watching.start()
    watching.join(4.0)
    assert watching.is_alive() and process.lost is None
    stop(process.pid)
    expected = (
        rf"engine replica 3 \(pid {process.pid}\): process {process.pid} stopped \(state T\) for 3 s "
        r"\(engine\.heartbeat_timeout_s\) while generate, so it was killed; log"
    )
    with pytest.raises(LostEngineError, match=expected) as error:
        process.ask("generate", timeout_s=60)
    watching.join(60.0)
    assert not watching.is_alive() and process.lost == str(error.value)


def test_a_message_that_cannot_be_sent_leaves_the_engine_usable(start, monkeypatch):
    process = start()
    with monkeypatch.context() as patch:
        patch.setattr("megatron_rl.rollout.wire.MAX_MESSAGE_BYTES", 100)
        with pytest.raises(EngineError, match="at most 100 are allowed"):
            process.ask("generate", timeout_s=5, requests=["x" * 100])
    # it still reads: this is no start message, and it says so
    with pytest.raises(EngineError, match=r"failed: KeyError: 'threads'"):
        process.start({"devices": None}, timeout_s=60)


def test_the_log_keeps_earlier_starts_and_an_error_shows_only_its_own(start):
    first = start()
    first.close()
    second = start()
    os.kill(second.pid, signal.SIGKILL)
    with pytest.raises(EngineError, match=r"died \(signal SIGKILL\)") as error:
        second.ask("generate", timeout_s=30)
    assert f"engine process {second.pid} started" in str(error.value)
    assert f"engine process {first.pid} started" not in str(error.value)
    assert f"engine process {first.pid} started" in second.log_path.read_text()


def test_an_engine_that_is_not_ready_yet_is_not_waited_for(start):
    process = start()
    process.close()
    assert process._process.returncode == -signal.SIGKILL


def test_a_stopped_engine_ends_with_an_owner_that_was_killed_and_leaves_no_file(tmp_path):
    code = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from megatron_rl.rollout.engine_process import EngineProcess\n"
        "print(EngineProcess(0, Path(sys.argv[1])).pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    log, scratch = tmp_path / "engine.log", tmp_path / "scratch"
    scratch.mkdir()
    owner = subprocess.Popen(
        [sys.executable, "-c", code, str(log)],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(scratch)},
    )
    assert owner.stdout is not None
    engine = int(owner.stdout.readline())
    # readable once the engine is gone
    descriptor = os.pidfd_open(engine)
    deadline = time.monotonic() + 60
    while f"--- engine process {engine} started" not in log.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    stop(engine)
    owner.kill()
    owner.wait()
    owner.stdout.close()
    ended, _, _ = select.select([descriptor], [], [], 30)
    os.close(descriptor)
    assert ended
    assert list(scratch.iterdir()) == []

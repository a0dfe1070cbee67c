"""The end of a process: its exit code, its output, and threads of torch that outlive its work."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# a thread comes back from torch while the interpreter is taken apart, and not before
LINGERING = """
import sys, threading, time
from datetime import timedelta
from megatron_rl.platform.process import run_process

class Slow:
    # kept: the module's own name may be gone by then
    def __del__(self, sleep=time.sleep):
        self.store.set("late", "")
        sleep(2.0)

def main():
    from torch.distributed import TCPStore
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    # one connection may not be used while another thread waits on it
    slow.store = TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
    threading.Thread(target=store.wait, args=(["late"], timedelta(seconds=60)), daemon=True).start()
    time.sleep(0.5)
    return 75

slow = Slow()
"""


def run(code: str, *, stdout: int | None = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT, env=environment, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=120,
    )  # fmt: skip


def test_the_exit_code_outlives_threads_of_torch() -> None:
    assert run(LINGERING + "sys.exit(main())").returncode == -6, "nothing is left to protect from"
    done = run(LINGERING + "run_process(main)")
    assert (done.returncode, done.stderr) == (75, "")


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("return 0", 0),
        ("return 2", 2),
        ("sys.exit()", 0),
        ("sys.exit(143)", 143),
        ("sys.exit('no')", 1),
        ("raise KeyboardInterrupt", 130),
        ("raise ValueError('a fault')", 1),
    ],
)
def test_the_process_ends_as_its_main_does_with_all_that_was_printed(body: str, code: int) -> None:
    start = "import atexit, sys\nfrom megatron_rl.platform.process import run_process\n"
    start += "def main():\n    print('printed')\n    atexit.register(print, 'registered')\n"
    done = run(f"{start}    {body}\nrun_process(main)")
    assert (done.returncode, done.stdout) == (code, "printed\nregistered\n")
    assert ("ValueError: a fault" in done.stderr) == ("ValueError" in body)
    assert done.stderr.startswith("no") == ("'no'" in body)


def test_threads_that_are_no_daemons_are_waited_for() -> None:
    code = """
import threading, time
from megatron_rl.platform.process import run_process
def work():
    time.sleep(0.3)
    print("done")
def main():
    threading.Thread(target=work).start()
    return 0
run_process(main)
"""
    assert run(code).stdout == "done\n"


def test_output_that_could_not_be_written_is_no_success() -> None:
    code = """
from megatron_rl.platform.process import run_process
def main():
    print("x", end="")  # written when the process ends
    return 0
run_process(main)
"""
    with Path("/dev/full").open("w") as full:
        assert run(code, stdout=full.fileno()).returncode == 120

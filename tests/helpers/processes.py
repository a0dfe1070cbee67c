"""All processes of one run, whatever group or session they made for themselves; and waiting for them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_MARK = "MEGATRON_RL_TEST_RUN"


def mark_of(run_dir: Path) -> dict[str, str]:
    """The variable that every process of the run inherits."""
    return {_MARK: str(run_dir)}


def processes_of(run_dir: Path, program: str = "") -> list[int]:
    """Process ids, those whose command line contains `program`; what has ended and was not reaped is left out."""
    mark = f"{_MARK}={run_dir}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if program in command:
                    found.append(int(entry.name))
    return sorted(found)


def wait_for(condition: Callable[[], bool], what: str, *, timeout_s: float = 200.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: did not happen within {timeout_s:g} s"
        time.sleep(0.05)


def stop(pid: int) -> None:
    """SIGSTOP; returns once the process stands still, which on a busy machine is not at once."""
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: state_of(pid) in "TZX", f"process {pid} standing still", timeout_s=60.0)


def state_of(pid: int) -> str:
    """The letter that the kernel has for its state; X for one that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def ended(process: subprocess.Popen[str], *, timeout_s: float = 120.0) -> tuple[int, str, str]:
    """Exit code and output; a run that does not end by itself is killed, and that is a failure."""
    try:
        output, errors = process.communicate(timeout=timeout_s)
    finally:
        # ours: it leads a session of its own
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, output, errors


def assert_nothing_is_left(run_dir: Path) -> None:
    """No process of the run, no file that was being written, no line without its end."""
    wait_for(lambda: not processes_of(run_dir), f"the end of every process of {run_dir}", timeout_s=20.0)
    # torch's checkpoints have an index of this name
    hidden = [path for path in run_dir.rglob(".*") if path.name != ".metadata"]
    left = hidden + list(run_dir.rglob("*.tmp"))
    assert not left, left
    for path in run_dir.rglob("*.jsonl"):
        content = path.read_bytes()
        assert content == b"" or content.endswith(b"\n"), path

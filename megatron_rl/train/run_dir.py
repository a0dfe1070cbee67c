"""Which directory a run writes to, and that no other run does so meanwhile."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import tempfile
import time
from pathlib import Path
from typing import IO

from megatron_rl.errors import MegatronRLError

RUNS = Path("runs")
LOGS = "logs"
LOCK_FILE = "in_use"  # in the logs
_END_S = 10.0  # that the processes of a killed run may take to end
_POLL_S = 0.2
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def choose_run_dir(wanted: Path | None, *, name: str, resume: bool) -> Path:
    """`wanted`, or a fresh `runs/NAME-YYYYmmdd-HHMMSS`. Creates nothing.

    Raises MegatronRLError for a directory that another run has used, unless `resume`; with `resume` the
    directory must be there. What a start leaves that failed before its first step does not count as used.
    """
    if resume:
        if wanted is None:
            raise MegatronRLError("--resume: needs --run-dir DIR, the directory of the run to continue")
        if not wanted.is_dir():
            raise MegatronRLError(f"--run-dir {wanted}: no such directory; leave out --resume")
        return wanted
    if wanted is None:
        return _fresh(name)
    if wanted.exists() and not wanted.is_dir():
        raise MegatronRLError(f"--run-dir {wanted}: is a file, must be a directory or not exist yet")
    if wanted.is_dir() and not all(map(_is_of_a_start, wanted.iterdir())):
        raise MegatronRLError(
            f"--run-dir {wanted}: holds an earlier run; add --resume to continue it, or choose another"
        )
    return wanted


def make_run_dir(run_dir: Path) -> None:
    """Make the directory and its logs, before anything slow starts. Raises MegatronRLError where it cannot be."""
    try:
        (run_dir / LOGS).mkdir(parents=True, exist_ok=True)
        # asks the file system itself: permissions, read-only mounts and full disks all show here
        with tempfile.TemporaryFile(dir=run_dir / LOGS) as probe:
            probe.write(b"\0")
    except OSError as error:
        raise MegatronRLError(
            f"--run-dir {run_dir}: cannot be written ({error.strerror or error}); choose another directory"
        ) from None


def take_run_dir(run_dir: Path) -> IO[str] | None:
    """Hold the directory for this process until the file is closed or the process ends, however that ends.

    A run that is just ending is waited for. Raises MegatronRLError naming the process that holds it for longer. None
    where the file system has no locks.
    """
    path = run_dir / LOGS / LOCK_FILE
    # a lock of the process, not of the file: no child that inherits the descriptor holds it on
    file = path.open("a+", encoding="utf-8")
    deadline = time.monotonic() + _END_S
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError as error:
            if error.errno in _NO_LOCKS:
                file.close()
                return None
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
            if time.monotonic() > deadline:
                file.seek(0)
                holder = file.read().strip() or "another process"
                file.close()
                raise MegatronRLError(
                    f"--run-dir {run_dir}: is in use by {holder}; wait for that run or stop it, or choose another "
                    f"directory; remove {path} if its machine is gone and the file server has not noticed"
                ) from None
        time.sleep(_POLL_S)
    file.truncate(0)
    file.write(
        f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S %z')}"
    )
    file.flush()
    return file


def check_unused(run_dir: Path) -> None:
    """Raises MegatronRLError while another run holds the directory; leaves it to whoever takes it next."""
    if (lock := take_run_dir(run_dir)) is not None:
        lock.close()


def _is_of_a_start(entry: Path) -> bool:
    """Whether a run makes `entry` before its first step, and has written no step into it."""
    if entry.name == "metrics.jsonl":
        return entry.stat().st_size == 0
    return entry.name in (LOGS, "recipe.resolved.yaml", "tensorboard", "wandb", "stop", "stopped.json", "engine_secret")


def _fresh(name: str) -> Path:
    base = RUNS / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    # two runs of one second
    number, path = 1, base
    while path.exists():
        number += 1
        path = base.with_name(f"{base.name}-{number}")
    return path

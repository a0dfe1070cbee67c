"""Run a function on several gloo processes: bounded in time, with the log and the traceback of each rank."""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from megatron_rl.train.launcher import held_port
from tests.helpers.forked import forkserver, inherit

_GRACE_S = 10.0  # other ranks get this long to fail by themselves once one has
_LOG_CHARS = 3000  # of the end of a log that are shown


class DistributedFailure(AssertionError):
    """A rank raised, died or did not finish; says which, with its traceback and the end of its log."""


def run_distributed(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120.0
) -> list[Any]:
    """Call `fn(rank, world_size, *args)` in `world_size` new processes and return what each rank returned.

    `fn` stands at module level; arguments and results are picklable. RANK, WORLD_SIZE, LOCAL_RANK,
    MASTER_ADDR and MASTER_PORT are set, one thread per process. Ends only the processes that it started.
    """
    context = forkserver()
    with tempfile.TemporaryDirectory(prefix="ranks_") as scratch, held_port() as port:
        processes = [
            context.Process(
                target=_entry, args=(dict(os.environ), fn, rank, world_size, port, scratch, args), daemon=True
            )
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        try:
            is_late = _wait(processes, deadline=time.monotonic() + timeout_s)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
        return _collect(Path(scratch), processes, f"not finished after {timeout_s:g} s" if is_late else "")


def _entry(
    environment: dict[str, str],
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    port: int,
    scratch: str,
    args: tuple[Any, ...],
) -> None:
    inherit(environment)
    log = os.open(f"{scratch}/{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
    )
    import torch

    torch.set_num_threads(1)
    try:
        result = fn(rank, world_size, *args)
        outcome = pickle.dumps((True, result))
    except BaseException:
        outcome = pickle.dumps((False, (time.time(), traceback.format_exc())))
    partial = Path(scratch, f"{rank}.partial")
    partial.write_bytes(outcome)
    partial.rename(Path(scratch, f"{rank}.result"))
    sys.stdout.flush()
    sys.stderr.flush()
    if not pickle.loads(outcome)[0]:
        # peers may be gone: waiting for their sockets would hide the failure
        os._exit(1)


def _wait(processes: list[BaseProcess], *, deadline: float) -> bool:
    """True when the deadline passed; returns early, after a grace period, once a rank has failed."""
    while any(process.is_alive() for process in processes):
        if time.monotonic() > deadline:
            return True
        if any(process.exitcode for process in processes):
            deadline = min(deadline, time.monotonic() + _GRACE_S)
            _join_all(processes, deadline)
            return False
        time.sleep(0.02)
    return False


def _join_all(processes: list[BaseProcess], deadline: float) -> None:
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))


def _collect(scratch: Path, processes: list[BaseProcess], lateness: str) -> list[Any]:
    results: dict[int, Any] = {}
    raised: list[tuple[float, int, str]] = []
    for rank in range(len(processes)):
        path = scratch / f"{rank}.result"
        if path.is_file():
            # written by our own child a moment ago
            is_ok, payload = pickle.loads(path.read_bytes())
            if is_ok:
                results[rank] = payload
            else:
                raised.append((payload[0], rank, payload[1]))
    if len(results) == len(processes):
        return [results[rank] for rank in range(len(processes))]
    if raised:
        # the first to fail is the cause; the rest mostly lost their peer
        _, rank, trace = min(raised)
        log = _log_tail(scratch, rank)
        raise DistributedFailure(f"rank {rank} of {len(processes)} raised:\n{trace}{log}")
    rank = min(set(range(len(processes))) - results.keys())
    reason = lateness or f"died with exit code {processes[rank].exitcode}"
    raise DistributedFailure(f"rank {rank} of {len(processes)}: {reason}{_log_tail(scratch, rank)}")


def _log_tail(scratch: Path, rank: int) -> str:
    path = scratch / f"{rank}.log"
    text = path.read_text(errors="replace") if path.is_file() else ""
    return f"\n--- end of the log of rank {rank} ---\n{text[-_LOG_CHARS:]}"

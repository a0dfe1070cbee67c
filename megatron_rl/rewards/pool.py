"""A small pool of long-lived checking processes with a hard deadline for each item.

The parent keeps the clock: a worker that overruns is killed and replaced, whatever it is doing. When a worker
dies, or overruns without having computed, its item is tried once more on a fresh one. Usable from any thread; no
signal handlers, no fork.
"""

from __future__ import annotations

import json
import os
import queue
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import megatron_rl
from megatron_rl.data.types import Verdict
from megatron_rl.errors import RewardError
from megatron_rl.rewards.worker import MAX_FRAME_BYTES, frame_length, write_frame

_START_TIMEOUT_S = 120.0
_ITEMS_PER_WORKER = 2000  # a symbolic library's caches grow; a fresh process is cheap
_WEDGED_FRAC = 0.1  # of the time an answer may take; a worker that computed for less was kept from it
_MIN_LOOK_S, _LOOK_FRAC = (
    0.5,
    0.2,
)  # the short look of a bounded batch: seconds at least, and share of timeout_s
_UNJUDGED = "the time of the batch was over before it was judged"
_WORKER_MODULE = "megatron_rl.rewards.worker"


@dataclass(frozen=True, slots=True)
class PoolVerdict:
    """What the pool says about one (gold, answer) pair."""

    verdict: Verdict
    reason: str
    seconds: float


class WorkerPool:
    """`workers` processes that compare (gold, answer) pairs, each within `timeout_s` seconds of wall time."""

    def __init__(
        self, *, workers: int, timeout_s: float, memory_gib: float = 2.0, module: str = _WORKER_MODULE
    ) -> None:
        """`memory_gib` bounds the address space of each process."""
        if workers < 1 or timeout_s <= 0:
            raise RewardError(f"pool: workers = {workers}, timeout_s = {timeout_s}; both must be above 0")
        self._memory_bytes = int(memory_gib * (1 << 30))
        self._timeout_s = timeout_s
        self._module = module
        self._closed = False
        self._num_restarts = 0
        self._lock = threading.Lock()
        self._all: set[_Worker] = set()
        self._slots: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        self._threads = ThreadPoolExecutor(max_workers=workers, thread_name_prefix="reward")
        self._num_workers = workers
        for _ in range(workers):
            # an empty slot starts its process when it is first needed
            self._slots.put(None)

    def check_many(
        self, pairs: Sequence[tuple[str, str]], *, within_s: float | None = None
    ) -> list[PoolVerdict]:
        """One verdict per (gold, answer), in order, after at most `within_s` seconds.

        With that bound every pair first gets a short look, so that a few that take for ever do not keep the
        others from being judged; then those come again with all of `timeout_s`. Past the bound a pair that used
        up its short look is a TIMEOUT, one that did not get it an ERROR: nothing is known of it.
        Raises RewardError if a worker cannot start at all.
        """
        if not pairs:
            return []
        if self._closed:
            raise RewardError("pool: used after close")
        if within_s is None:
            return list(self._threads.map(lambda pair: self.check(*pair), pairs))
        end = time.monotonic() + within_s
        look_s = min(self._timeout_s, max(_MIN_LOOK_S, _LOOK_FRAC * self._timeout_s))
        look = partial(self._check_until, end=end, look_s=look_s, timeout_s=look_s)
        verdicts = list(self._threads.map(look, pairs))
        late = [index for index, one in enumerate(verdicts) if one.verdict is Verdict.TIMEOUT]
        if look_s < self._timeout_s and late and time.monotonic() < end:
            whole = partial(self._check_until, end=end, look_s=look_s, timeout_s=self._timeout_s)
            again = self._threads.map(whole, [pairs[index] for index in late])
            for index, one in zip(late, again, strict=True):
                # a second try that came too late leaves what the first one showed
                verdicts[index] = verdicts[index] if one.verdict is Verdict.ERROR else one
        return verdicts

    def _check_until(
        self, pair: tuple[str, str], *, end: float, look_s: float, timeout_s: float
    ) -> PoolVerdict:
        left_s = end - time.monotonic()
        if left_s <= 0:
            return PoolVerdict(Verdict.ERROR, _UNJUDGED, 0.0)
        found = self.check(*pair, timeout_s=min(timeout_s, left_s), end=end)
        if found.verdict is Verdict.TIMEOUT and found.seconds < 0.9 * look_s:
            return PoolVerdict(Verdict.ERROR, _UNJUDGED, found.seconds)
        return found

    def check(
        self, gold: str, answer: str, *, timeout_s: float | None = None, end: float | None = None
    ) -> PoolVerdict:
        """The verdict on one pair. Waiting for a free worker does not count against the deadline, but `end` holds."""
        timeout_s = timeout_s or self._timeout_s
        slot = self._slots.get()
        started, reason = time.monotonic(), ""
        try:
            for attempt in (1, 2):
                try:
                    slot = self._ready_worker(slot, end=end)
                except TimeoutError:
                    slot = None
                    return PoolVerdict(Verdict.ERROR, _UNJUDGED, 0.0)
                started = time.monotonic()
                try:
                    reply = slot.ask(gold, answer, timeout_s=timeout_s)
                except TimeoutError:
                    # the worker, whatever it is doing, ends here
                    is_wedged = slot.is_wedged(timeout_s)
                    self._discard(slot, lost=is_wedged)
                    slot = None
                    if not is_wedged or attempt == 2 or (end is not None and time.monotonic() >= end):
                        seconds = time.monotonic() - started
                        return PoolVerdict(Verdict.TIMEOUT, f"killed after {timeout_s:.3g} s", seconds)
                except _WorkerDied as death:
                    self._discard(slot, lost=True)
                    slot = None
                    reason = f"worker died: {death} (attempt {attempt} of 2)"
                else:
                    seconds = time.monotonic() - started
                    return PoolVerdict(Verdict(reply["verdict"]), str(reply["reason"]), seconds)
            return PoolVerdict(Verdict.ERROR, reason, time.monotonic() - started)
        finally:
            self._slots.put(slot)

    def close(self) -> None:
        """Kill and reap every worker, release every descriptor; safe to call twice and during a `check`."""
        with self._lock:
            self._closed = True
            workers, self._all = list(self._all), set()
        for worker in workers:
            worker.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for worker in workers:
            worker.release()

    def pids(self) -> list[int]:
        """Processes that are alive now."""
        with self._lock:
            return [worker.pid for worker in self._all]

    @property
    def num_restarts(self) -> int:
        """Workers that died or hung without computing, and were replaced."""
        with self._lock:
            return self._num_restarts

    def _ready_worker(self, slot: _Worker | None, *, end: float | None = None) -> _Worker:
        """A worker that waits for a request. Raises TimeoutError if there is none by `end`."""
        if slot is not None and slot.num_items >= _ITEMS_PER_WORKER:
            self._discard(slot)
            slot = None
        if slot is not None:
            return slot
        with self._lock:
            if self._closed:
                raise RewardError("pool: closed while it was grading")
            worker = _Worker(self._module, memory_bytes=self._memory_bytes)
            self._all.add(worker)
        try:
            worker.wait_ready(end)
        except TimeoutError:
            self._discard(worker)
            raise
        except _WorkerDied as death:
            tail = worker.stderr_tail()
            self._discard(worker)
            raise RewardError(
                f"rewards: the checking process did not start ({death}); "
                f"run `{sys.executable} -m {self._module}` by hand; its last words: {tail or 'none'}"
            ) from None
        return worker

    def _discard(self, worker: _Worker, *, lost: bool = False) -> None:
        with self._lock:
            self._all.discard(worker)
            self._num_restarts += lost
        worker.kill()
        worker.release()


class _WorkerDied(Exception):
    """The other end of the pipe is gone."""


class _Worker:
    """One process and its pipes. Used by one thread at a time; `kill` may come from any."""

    def __init__(self, module: str, *, memory_bytes: int) -> None:
        self.num_items = 0
        # a file, not a pipe: nobody reads it while the worker runs, and a full pipe would block it
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        # the folder that holds the package as working directory: `-m` finds it from wherever we were started
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, str(memory_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            cwd=Path(megatron_rl.__file__).resolve().parent.parent,
            bufsize=0,
        )
        self.pid = self._process.pid
        self._cpu_before_s = 0.0

    def is_wedged(self, seconds: float) -> bool:
        """Whether it computed for next to nothing of the `seconds` that the present item took."""
        return _cpu_s(self.pid) - self._cpu_before_s < _WEDGED_FRAC * seconds

    def wait_ready(self, end: float | None) -> None:
        """Raises TimeoutError past `end`, _WorkerDied if it does not start."""
        latest = time.monotonic() + _START_TIMEOUT_S
        try:
            self._read(latest if end is None else min(latest, end))
        except TimeoutError:
            if end is not None and end < latest:
                raise
            raise _WorkerDied(f"not ready after {_START_TIMEOUT_S:g} s") from None

    def ask(self, gold: str, answer: str, *, timeout_s: float) -> dict[str, Any]:
        """Raises TimeoutError past the deadline, _WorkerDied if the process ended."""
        self.num_items += 1
        self._cpu_before_s = _cpu_s(self.pid)
        deadline = time.monotonic() + timeout_s
        assert self._process.stdin is not None
        try:
            write_frame(self._process.stdin, {"gold": gold, "answer": answer, "cpu_s": 2 * timeout_s + 1})
        except (BrokenPipeError, ValueError):
            raise _WorkerDied(self._end()) from None
        return self._read(deadline)

    def _read(self, deadline: float) -> dict[str, Any]:
        length = frame_length(self._read_bytes(4, deadline))
        if length > MAX_FRAME_BYTES:
            raise _WorkerDied(f"answered with a frame of {length} bytes")
        reply = json.loads(self._read_bytes(length, deadline))
        assert isinstance(reply, dict)
        return reply

    def _read_bytes(self, count: int, deadline: float) -> bytes:
        stream = self._process.stdout
        assert stream is not None
        data = b""
        while len(data) < count:
            left_s = deadline - time.monotonic()
            try:
                # not select(): descriptors beyond 1,024 are common in a trainer
                poll = select.poll()
                poll.register(stream, select.POLLIN)
                if left_s <= 0 or not poll.poll(left_s * 1000):
                    raise TimeoutError
                chunk = os.read(stream.fileno(), count - len(data))
            except ValueError:
                raise _WorkerDied("its pipe was closed by us") from None
            if not chunk:
                raise _WorkerDied(self._end())
            data += chunk
        return data

    def _end(self) -> str:
        try:
            return f"exit code {self._process.wait(timeout=5)}"
        except subprocess.TimeoutExpired:
            return "closed its pipe"

    def kill(self) -> None:
        self._process.kill()

    def release(self) -> None:
        """Reap the process and close our ends; only after `kill`."""
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._stderr):
            if stream is not None:
                stream.close()

    def stderr_tail(self) -> str:
        self._process.kill()
        self._process.wait()
        self._stderr.seek(0)
        return self._stderr.read()[-2000:].decode("utf-8", "replace").strip()


def _cpu_s(pid: int) -> float:
    """CPU seconds of a process so far; 0 for one that is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0.0
    # the name stands in parentheses and may hold anything; user and system time come 12th and 13th after it
    user, system = stat.rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

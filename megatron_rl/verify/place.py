"""Where a proof works: a directory that goes away with it, and a time by which it has ended."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from megatron_rl.errors import MegatronRLError

_BEGAN = time.monotonic()


def say(text: str) -> None:
    """One progress line, with the seconds since this process began."""
    print(f"{time.monotonic() - _BEGAN:6.1f} s  {text}", flush=True)


@contextmanager
def open_place(keep: Path | None) -> Iterator[Path]:
    """The new directory `keep`, or one that is removed afterwards. Raises MegatronRLError if `keep` exists."""
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="megatron_rl_verify_") as scratch:
            yield Path(scratch).resolve()
        return
    if keep.exists():
        raise MegatronRLError(f"--keep: {keep} exists already; remove it, or name another directory")
    keep.mkdir(parents=True)
    yield keep.resolve()


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Ends what is inside, and what that has started, as SIGTERM would; then raises MegatronRLError."""
    is_late = threading.Event()

    def end() -> None:
        is_late.set()
        os.kill(os.getpid(), signal.SIGTERM)

    def leave(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    before = signal.signal(signal.SIGTERM, leave)
    timer.start()
    try:
        yield
    except SystemExit:
        if not is_late.is_set():
            raise
    finally:
        timer.cancel()
        signal.signal(signal.SIGTERM, before)
    if is_late.is_set():
        raise MegatronRLError(
            f"--timeout-s: not finished after {seconds:g} s; raise it if this machine is slow"
        )

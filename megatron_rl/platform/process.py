"""The end of a process, in order even while threads of torch still run.

Needs no library beyond Python's own.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from typing import NoReturn

_INTERRUPTED = 130
# what Python ends with where its last output could not be written
_OUTPUT_LOST = 120


def run_process(main: Callable[[], int]) -> NoReturn:
    """Run `main` as all that this process does, and end it with the exit code that `main` returns or raises.

    The process waits for its other threads and for what is registered with `atexit`, as ever, but the interpreter is
    not taken apart: a thread of gloo that then gives back its last tensor would end the process by SIGABRT, after all
    its work was done, and its exit code would be lost.
    """
    code = 1

    def leave() -> None:
        os._exit(_flushed(code))

    # the first to be registered is the last to be called
    atexit.register(leave)
    try:
        code = main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise
    except KeyboardInterrupt:
        code = _INTERRUPTED
        raise
    sys.exit(code)


def end_process(code: int) -> NoReturn:
    """End at once: nothing that waits further up, or with `atexit`, runs any more."""
    os._exit(_flushed(code))


def _flushed(code: int) -> int:
    """The exit code after what is left to be written was written."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except BrokenPipeError:
            # who read it has had enough
            pass
        except (OSError, ValueError):
            code = code or _OUTPUT_LOST
    return code

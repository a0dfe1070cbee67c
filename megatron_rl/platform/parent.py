"""What the kernel does to a process whose parent has ended, however that ended. On Linux; elsewhere nothing.

Needs no library beyond Python's own.
"""

from __future__ import annotations

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Be killed once the thread that started this process has ended: not even a stopped process outlives it."""
    _ask_for(signal.SIGKILL)


def wake_with_parent() -> None:
    """Go on, if stopped, once the parent has ended: a stopped process cannot notice that and end itself.

    Means nothing to one that runs, so that it does no harm when only the thread that started it has ended.
    """
    _ask_for(signal.SIGCONT)


def _ask_for(number: signal.Signals) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)

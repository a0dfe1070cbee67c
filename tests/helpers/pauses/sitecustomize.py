"""Python imports this at its start where the directory is on PYTHONPATH: it holds a process still at one moment.

MEGATRON_RL_TEST_PAUSE is `EVENT|PATTERN|COUNT|FILE`: before the operation that follows COUNT others whose audit event
is EVENT and whose path, of a rename the new one, matches PATTERN, FILE is created and the thread waits to be killed.
"""

import os
import sys
import time
from pathlib import PurePath
from typing import Any


def pause_at(event: str, pattern: str, count: int, file: str) -> None:
    left, is_paused = count, False

    def is_meant(path: Any) -> bool:
        # the last components, so that a pattern for a directory leaves out what is in it
        return isinstance(path, str | os.PathLike) and PurePath(path).match(pattern)

    def hook(name: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left, is_paused
        if name != event or is_paused or not is_meant(arguments[name == "os.rename"]):
            return
        left -= 1
        if left < 0:
            # what follows is an audited operation too
            is_paused = True
            with open(file, "w"):
                pass
            time.sleep(600)

    sys.addaudithook(hook)


if "MEGATRON_RL_TEST_PAUSE" in os.environ:
    _event, _pattern, _count, _file = os.environ["MEGATRON_RL_TEST_PAUSE"].split("|")
    pause_at(_event, _pattern, int(_count), _file)

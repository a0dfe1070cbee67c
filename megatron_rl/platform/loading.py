"""Loading the heavy libraries: without their idle warnings, and without looking through what they make for garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from megatron_rl.platform.quiet import silence_library_warnings


@contextmanager
def loading_libraries() -> Iterator[None]:
    """Import torch, megatron-core and what stands on them inside the block.

    Imports make half a million objects that stay; going through them again and again takes a fifth of the time.
    """
    silence_library_warnings()
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()

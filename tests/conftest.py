"""Triton kernels run in Triton's interpreter here: that is decided once, before anything imports triton."""

import gc
import os
from collections.abc import Iterator

import pytest

os.environ["TRITON_INTERPRET"] = "1"
import triton

# processes that tests start decide for themselves
del os.environ["TRITON_INTERPRET"]
triton.knobs.propagate_env = False
triton.knobs.runtime.interpret = True


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collection makes millions of objects that stay; neither it nor a test looks through them for garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()

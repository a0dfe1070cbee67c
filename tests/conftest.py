"""Triton kernels run in Triton's interpreter here: that is decided once, before anything imports triton."""

import gc
import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

os.environ["TRITON_INTERPRET"] = "1"
import triton

# processes that tests start decide for themselves
del os.environ["TRITON_INTERPRET"]
triton.knobs.propagate_env = False
triton.knobs.runtime.interpret = True

# the same examples in every run, however slow the machine; --hypothesis-profile random looks for others
_ANY_SPEED = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("same", derandomize=True, **_ANY_SPEED)
settings.register_profile("random", derandomize=False, **_ANY_SPEED)
settings.load_profile("same")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collection makes millions of objects that stay; neither it nor a test looks through them for garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()

"""Triton kernels run in Triton's interpreter here: that is decided once, before anything imports triton."""

import os

os.environ["TRITON_INTERPRET"] = "1"
import triton

# processes that tests start decide for themselves
del os.environ["TRITON_INTERPRET"]
triton.knobs.propagate_env = False
triton.knobs.runtime.interpret = True

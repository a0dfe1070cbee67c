"""Everything heavy that ranks of tests import, loaded once in the process that they are forked from."""

from __future__ import annotations

# first: how Triton's kernels run is decided when it is imported
import tests.conftest
from megatron_rl.platform.device import import_megatron
from megatron_rl.platform.quiet import silence_library_warnings

silence_library_warnings()
import_megatron()

import megatron_rl.train.run  # noqa: E402, F401
import tests.helpers.transfer  # noqa: E402, F401

"""Everything heavy that ranks of tests import, loaded once in the process that they are forked from."""

from __future__ import annotations

# first: how Triton's kernels run is decided when it is imported
import tests.conftest
from megatron_rl.platform.loading import loading_libraries

with loading_libraries():
    from megatron_rl.platform.device import import_megatron

    import_megatron()
    import megatron_rl.train.run  # noqa: F401
    import tests.helpers.transfer  # noqa: F401

"""`python -m megatron_rl`: the same as the `megatron-rl` command."""

import sys

from megatron_rl.cli import main

sys.exit(main())

"""`python -m megatron_rl`: the same as the `megatron-rl` command."""

from megatron_rl.cli import run

run()

"""Whether this machine has what a recipe's tracking asks for."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from megatron_rl.recipe.problems import Problem
from megatron_rl.recipe.schema import RunConfig


def tracking_problems(run: RunConfig) -> Iterator[Problem]:
    """A problem where Weights & Biases is asked for and its package, which the project does without, is not here."""
    if run.wandb is not None and find_spec("wandb") is None:
        yield Problem(
            "run.wandb",
            "asks for Weights & Biases, and the package wandb is not installed; install it, such as: "
            ".venv/bin/python -m pip install wandb, or set run.wandb to null",
        )

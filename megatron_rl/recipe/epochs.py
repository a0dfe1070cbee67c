"""Optimizer steps of SFT stages that say how often they pass over their data instead."""

from __future__ import annotations

import math
from dataclasses import replace
from os.path import exists

from megatron_rl.data.rows import count_rows
from megatron_rl.errors import DataError
from megatron_rl.recipe.problems import Problem
from megatron_rl.recipe.schema import Recipe
from megatron_rl.recipe.stages import SftStage, Stage


def steps_of_epochs(epochs: float, *, num_rows: int, global_batch_size: int) -> int:
    """Steps that draw every row at least `epochs` times: the last one is filled from the next pass."""
    return max(1, math.ceil(epochs * num_rows / global_batch_size))


def with_steps(recipe: Recipe) -> tuple[Recipe, list[Problem]]:
    """`steps` of every SFT stage that has `epochs` instead, by the rows of its file; and what contradicts.

    A file that is not there leaves them at 0: its absence is a problem of its own.
    """
    problems: list[Problem] = []
    stages = tuple(_resolved(stage, f"stages.{i}", problems) for i, stage in enumerate(recipe.stages))
    return replace(recipe, stages=stages), problems


def _resolved(stage: Stage, path: str, problems: list[Problem]) -> Stage:
    if not isinstance(stage, SftStage):
        return stage
    if stage.epochs is None:
        if not stage.steps:
            problems.append(
                Problem(f"{path}.steps", "missing, must be a whole number of at least 1; or give epochs")
            )
        return stage
    if not exists(stage.data):
        return stage
    try:
        rows = count_rows(stage.data)
    except DataError as error:
        problems.append(Problem(f"{path}.data", str(error)))
        return stage
    steps = steps_of_epochs(stage.epochs, num_rows=rows, global_batch_size=stage.global_batch_size)
    if stage.steps not in (0, steps):
        problems.append(
            Problem(
                f"{path}.steps",
                f"got {stage.steps}, but epochs = {stage.epochs:g} of the {rows} rows of {stage.data} are {steps} "
                f"steps of {stage.global_batch_size}; give one of the two",
            )
        )
    return replace(stage, steps=steps)

"""Memory, time and suggestions of one checked recipe on one machine type: put together, as rows and as plain data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from megatron_rl.errors import MegatronRLError
from megatron_rl.estimate.candidates import possible_worlds, trainer_choices, with_engines_that_split
from megatron_rl.estimate.hardware import Hardware
from megatron_rl.estimate.memory import stage_memory, takes_turns
from megatron_rl.estimate.memory_problems import memory_problems
from megatron_rl.estimate.memory_text import memory_data, memory_rows
from megatron_rl.estimate.memory_types import StageMemory
from megatron_rl.estimate.stage_time import Assumed, StageTime, stage_times
from megatron_rl.estimate.suggest import Suggestions, suggest
from megatron_rl.estimate.suggest_text import suggestion_data, suggestion_rows
from megatron_rl.estimate.text import Row, time_data, time_rows
from megatron_rl.model.spec import ModelSpec
from megatron_rl.recipe.load import LoadedRecipe
from megatron_rl.recipe.problems import Problem
from megatron_rl.recipe.resolve import Resolved, check_recipe
from megatron_rl.recipe.schema import Recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Of a recipe as it stands; `suggestions` None where none were asked for."""

    recipe: Recipe
    hardware: Hardware
    assumed: Assumed
    memory: tuple[StageMemory, ...]
    problems: tuple[Problem, ...]  # of memory
    times: tuple[StageTime, ...]
    suggestions: Suggestions | None
    num_gpus: int

    @property
    def own_gpus(self) -> int:
        """Of the trainer, and of engines that have GPUs of their own."""
        return max(time.step.num_gpus for time in self.times)

    @property
    def total_s(self) -> float:
        """All steps whose number is known; where none is, one step of each stage, as suggestions count."""
        if any(time.steps for time in self.times):
            return sum(time.step.step_s * time.steps for time in self.times)
        return sum(time.step.step_s for time in self.times)


def build_estimate(
    loaded: LoadedRecipe, resolved: Resolved, hardware: Hardware, assumed: Assumed, *, suggests: bool
) -> Estimate:
    """Everything about a recipe that `check_recipe` accepted."""
    recipe, world_size = loaded.recipe, resolved.layout.world_size
    found = None
    if suggests:
        found = suggest(recipe, resolved.spec, hardware, assumed, num_gpus=world_size)
    return Estimate(
        recipe=recipe,
        hardware=hardware,
        assumed=assumed,
        memory=tuple(
            stage_memory(
                stage,
                recipe.model,
                resolved.spec,
                resolved.layout,
                sleeps=takes_turns(stage),
                gpus_per_node=hardware.gpus_per_node,
            )
            for stage in recipe.stages
        ),
        problems=tuple(
            memory_problems(
                recipe,
                resolved.spec,
                resolved.layout,
                memory_gib=hardware.memory_gib,
                gpus_per_node=hardware.gpus_per_node,
            )
        ),
        times=stage_times(loaded, resolved, hardware, assumed),
        suggestions=found,
        num_gpus=world_size,
    )


def other_layout(
    loaded: LoadedRecipe, spec: ModelSpec | None, hardware: Hardware, *, world_size: int, planned: bool
) -> Resolved | None:
    """The recipe in the first layout that passes every check; None if its problems are not those of its layout."""
    recipe = loaded.recipe
    try:
        spec = spec or ModelSpec.from_hf(recipe.model.hf_path, max_positions=recipe.model.max_positions)
        recipe = with_engines_that_split(recipe, spec, gpus_per_node=hardware.gpus_per_node)
        choices = trainer_choices(recipe, spec, world_size=world_size, gpus_per_node=hardware.gpus_per_node)
        choice = next(choices, None)
        if choice is None:
            return None
        changed = replace(loaded, recipe=choice.apply(recipe))
        return check_recipe(changed, world_size=world_size, model_spec=spec, planned=planned)
    except MegatronRLError:
        return None


def nearest_worlds(
    loaded: LoadedRecipe, spec: ModelSpec | None, hardware: Hardware, *, world_size: int
) -> list[int]:
    """The next fewer and the next more GPUs, up to twice as many, that some layout of the trainer is for; none where
    one is for `world_size`, or the model is not known."""
    recipe = loaded.recipe
    try:
        spec = spec or ModelSpec.from_hf(recipe.model.hf_path, max_positions=recipe.model.max_positions)
    except MegatronRLError:
        return []

    def has_layout(num_gpus: int) -> bool:
        choices = trainer_choices(recipe, spec, world_size=num_gpus, gpus_per_node=hardware.gpus_per_node)
        return next(choices, None) is not None

    if has_layout(world_size):
        return []
    worlds = possible_worlds(recipe, spec, gpus_per_node=hardware.gpus_per_node)
    fewer = next(filter(has_layout, (n for n in reversed(worlds) if n < world_size)), None)
    more = next(filter(has_layout, (n for n in worlds if world_size < n <= 2 * world_size)), None)
    return [num_gpus for num_gpus in (fewer, more) if num_gpus is not None]


def estimate_rows(found: Estimate) -> list[Row]:
    """What `check` prints below the numbers of the recipe."""
    rows: list[Row] = [("", ""), ("memory", f"estimated for {found.hardware.name}, not measured")]
    for i, (stage, memory, time) in enumerate(
        zip(found.recipe.stages, found.memory, found.times, strict=True)
    ):
        mean = int(time.mean_tokens + time.prompt_tokens)
        own = memory_rows(memory, stage, memory_gib=found.hardware.memory_gib, mean_tokens=mean)
        rows += [(f"stages.{i}", stage.kind), *((f"  {what}", how_much) for what, how_much in own)]
    rows += [(f"  {problem.path}", problem.text) for problem in found.problems]
    rows += time_rows(found.times, found.hardware, found.assumed, dtype=found.recipe.model.dtype)
    if found.suggestions is not None:
        rows += suggestion_rows(
            found.suggestions,
            found.recipe,
            own_s=found.total_s,
            own_gpus=found.own_gpus,
            fits=not found.problems,
            num_gpus=found.num_gpus,
        )
    return rows


def estimate_data(found: Estimate) -> dict[str, Any]:
    """The same in plain JSON types."""
    data: dict[str, Any] = {
        "hardware": found.hardware.name,
        "memory": [
            memory_data(memory, stage, memory_gib=found.hardware.memory_gib)
            for stage, memory in zip(found.recipe.stages, found.memory, strict=True)
        ],
        "memory_problems": {problem.path: problem.text for problem in found.problems},
        "time": time_data(found.times, found.assumed),
    }
    if found.suggestions is not None:
        data["suggestions"] = suggestion_data(
            found.suggestions, found.recipe, own_s=found.total_s, own_gpus=found.own_gpus
        )
    return data

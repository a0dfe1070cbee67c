"""Which steps of a run are profiled: they count on over its stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron_rl.recipe.problems import Problem
from megatron_rl.recipe.schema import ProfileConfig, Recipe
from megatron_rl.recipe.stages import SftStage, Stage


def steps_before(stages: Sequence[Stage], index: int) -> int:
    """Optimizer steps (SFT) and iterations (RL) that the stages before number `index` have in the recipe."""
    return sum(stage.steps if isinstance(stage, SftStage) else stage.iterations for stage in stages[:index])


def passed_window(profile: ProfileConfig | None, done: int) -> str | None:
    """What to say where every step of the window was made before a run went on after `done` steps."""
    if profile is None or profile.first_step + profile.steps - 1 > done:
        return None
    last = profile.first_step + profile.steps - 1
    return (
        f"run.profile: steps {profile.first_step} to {last} were made before, the run goes on after step {done}; "
        f"nothing is profiled, unless first_step is {done + 1} or more"
    )


def profile_problems(recipe: Recipe) -> Iterator[Problem]:
    """A window behind the end of the run shows nothing."""
    profile, total = recipe.run.profile, steps_before(recipe.stages, len(recipe.stages))
    # epochs of a file that is not there have no steps yet, and a line of their own
    is_known = all(not isinstance(stage, SftStage) or stage.steps for stage in recipe.stages)
    if profile is not None and is_known and profile.first_step > total:
        yield Problem(
            "run.profile.first_step",
            f"got {profile.first_step}, but the run has {total} steps over its stages (optimizer steps of SFT, "
            f"iterations of RL); use at most {total}, or set run.profile to null",
        )

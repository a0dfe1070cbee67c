"""Which steps of a run are profiled: they count on over its stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron_rl.recipe.problems import Problem
from megatron_rl.recipe.schema import ProfileConfig, Recipe
from megatron_rl.recipe.stages import SftStage, Stage

# of all lanes: half a GB of text before it is packed, about what viewers open and rank 0 gathers without harm
_MOST_SPANS = 5_000_000
# torch's own trace has some 10^5 events a step and rank, all of them in memory until it is written
_MOST_STEPS_OF_OPERATORS = 20


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
    """A window behind the end of the run shows nothing, one over too much of it cannot be kept or looked at."""
    profile, total = recipe.run.profile, steps_before(recipe.stages, len(recipe.stages))
    # epochs of a file that is not there have no steps yet, and a line of their own
    is_known = all(not isinstance(stage, SftStage) or stage.steps for stage in recipe.stages)
    if profile is not None and is_known and profile.first_step > total:
        yield Problem(
            "run.profile.first_step",
            f"got {profile.first_step}, but the run has {total} steps over its stages (optimizer steps of SFT, "
            f"iterations of RL); use at most {total}, or set run.profile to null",
        )
        return
    if profile is None:
        return
    steps = min(profile.steps, total - profile.first_step + 1) if is_known else profile.steps
    most = max(1, _MOST_SPANS // max(_spans_per_step(recipe, stage) for stage in recipe.stages))
    reason = f"its trace would have more than {_MOST_SPANS:,} spans"
    if profile.operators and most > _MOST_STEPS_OF_OPERATORS:
        most, reason = _MOST_STEPS_OF_OPERATORS, "operators of more steps do not fit in memory and file"
    if steps > most:
        yield Problem("run.profile.steps", f"got {profile.steps}, must be at most {most} here: {reason}")


def _spans_per_step(recipe: Recipe, stage: Stage) -> int:
    """At most about: a forward, a backward and two exchanges of each micro-batch of samples that are as long as they
    may be, and what a step has besides; of the ranks of one model."""
    layout = recipe.layout
    if isinstance(stage, SftStage):
        tokens = stage.global_batch_size * stage.max_sample_tokens
    else:
        longest = stage.sampling.max_prompt_tokens + stage.sampling.max_response_tokens
        tokens = stage.prompts_per_iteration * stage.group_size * longest
    microbatches = -(-tokens // stage.tokens_per_microbatch)
    return layout.tp * layout.pp * layout.vpp * (4 * microbatches + 20)

"""`verify resume`: a run that is killed and resumed against the same run left alone."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_rl.errors import MegatronRLError
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.recipe.schema import Recipe
from megatron_rl.recipe.stages import RlStage, SftStage
from megatron_rl.verify.kills import KillableRun, Moment, Outcome, draw_moments
from megatron_rl.verify.layouts import layout_config, layout_text, parse_layout
from megatron_rl.verify.place import deadline, open_place, say
from megatron_rl.verify.prepare import Prepared, prepare, write_recipe
from megatron_rl.verify.runs import (
    ACROSS_BOUND,
    DRIFT_BOUND,
    RunRecord,
    across_faults,
    exact_faults,
    steps_table,
)
from megatron_rl.verify.shorten import with_coin
from megatron_rl.verify.table import NOT_RUN, PROVEN, REFUTED, verdict


def verify_resume(args: argparse.Namespace) -> int:
    """The exit code. Raises MegatronRLError for what cannot be run."""
    other = parse_layout(args.layout) if args.layout else None
    with deadline(args.timeout_s), open_place(args.keep) as place:
        layouts = [other] if other else []
        prepared = prepare(
            args.recipe, args.overrides, place, shrink=args.shrink, trains=True, layouts=layouts
        )
        _check_repeats_itself(prepared.recipe)
        recipe = _decided(prepared.recipe, across=other is not None)
        prepared = write_recipe(recipe, place)
        changed = _in_layout(recipe, other, place) if other else None
        moments = draw_moments(recipe, kills=args.kills, seed=args.seed)
        straight = _run(prepared, place / "straight")
        _run_straight(straight)
        if _has_rl(recipe) and RunRecord.read(straight.run_dir).num_rl_updates() == 0:
            say(
                "no iteration of RL changed the weights, since no group of rollouts had two rewards: from here on with "
                "`coin`, a reward that is a hash of the response"
            )
            recipe = _with_coins(recipe)
            prepared = write_recipe(recipe, place)
            straight = _run(prepared, place / "straight_with_coin")
            _run_straight(straight)
        resumed = _run(prepared, place / "resumed")
        killed = _run_killed(resumed, moments, changed=changed)
        if killed.fault is not None:
            print(verdict([killed.fault], proven=""))
            return REFUTED
        records = RunRecord.read(straight.run_dir), RunRecord.read(resumed.run_dir)
        return report(
            *records, recipe=recipe, kills=killed.kills, other=other, resumed_after=killed.resumed_after
        )


def _check_repeats_itself(recipe: Recipe) -> None:
    for number, stage in enumerate(recipe.stages):
        if isinstance(stage, RlStage) and stage.stragglers is not None:
            raise MegatronRLError(
                f"stages.{number}.stragglers: which groups are late depends on the clock, so that no two runs are bit "
                "for bit the same; verify it with stragglers: null, and overlap one_step in the place of partial"
            )


def _decided(recipe: Recipe, *, across: bool) -> Recipe:
    """The recipe in deterministic mode; across layouts its SFT stages alone: sampled tokens do not compare."""
    recipe = replace(recipe, run=replace(recipe.run, deterministic=True))
    if not across:
        return recipe
    stages = tuple(stage for stage in recipe.stages if isinstance(stage, SftStage))
    if not stages:
        raise MegatronRLError(
            "--layout: compares SFT losses, and the recipe has no SFT stage; leave it out, or run `verify layout`"
        )
    if len(stages) < len(recipe.stages):
        say(
            "across layouts only the SFT stages are run: the first token that rounding changes, changes all after it"
        )
    return replace(recipe, stages=stages)


def _has_rl(recipe: Recipe) -> bool:
    return any(isinstance(stage, RlStage) for stage in recipe.stages)


def _with_coins(recipe: Recipe) -> Recipe:
    stages = (with_coin(stage) if isinstance(stage, RlStage) else stage for stage in recipe.stages)
    return replace(recipe, stages=tuple(stages))


def _in_layout(recipe: Recipe, layout: ParallelLayout, place: Path) -> Prepared:
    """The same recipe in another layout; checked now, not after the first run."""
    folder = place / "other_layout"
    folder.mkdir()
    changed = replace(recipe, layout=layout_config(layout))
    return write_recipe(changed, folder, world_size=layout.world_size)


def _run(prepared: Prepared, run_dir: Path) -> KillableRun:
    return KillableRun(prepared.recipe, prepared.path, run_dir, nproc=prepared.world_size)


def _run_straight(run: KillableRun) -> None:
    say(f"running it straight through, on {run.nproc} process{'es' if run.nproc > 1 else ''}")
    outcome = run.start()
    if outcome.exit_code:
        raise MegatronRLError(f"the run failed with exit code {outcome.exit_code}:\n{run.last_words()}")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Killed:
    """What became of the run that was killed."""

    kills: int
    resumed_after: int  # steps that it had when it was resumed first
    fault: str | None = None  # why it could not be resumed


def _run_killed(run: KillableRun, moments: Sequence[Moment], *, changed: Prepared | None) -> _Killed:
    """Kill it at every moment, then let it end. `changed` is what it is resumed with, if not with itself."""
    kills, resumed_after = 0, 0
    for moment in [*moments, None]:
        outcome = run.start(moment=moment)
        if not outcome.was_killed:
            if outcome.exit_code:
                which = f"the start after kill {kills}" if kills else "the first start"
                words = f"{which} failed with exit code {outcome.exit_code}:\n{run.last_words()}"
                return _Killed(kills=kills, resumed_after=resumed_after, fault=words)
            break
        kills += 1
        say(f"killed ({kills} of {len(moments)}): {_where(outcome)}; resuming")
        if kills == 1:
            resumed_after = _saved_steps(run.run_dir)
            if changed is not None:
                run.recipe_file, run.nproc = changed.path, changed.world_size
                say(f"from here on in the other layout, on {changed.world_size} processes")
    say("ran to its end" if kills == len(moments) else "ran to its end before it could be killed again")
    return _Killed(kills=kills, resumed_after=resumed_after)


def _where(outcome: Outcome) -> str:
    phase = outcome.phase
    assert phase is not None
    return f"{phase.stage or 'before the first stage'}, step {phase.step}, in {phase.phase}"


def _saved_steps(run_dir: Path) -> int:
    """Steps of the first stage in the newest checkpoint; a later stage counts as all of them."""
    names = [path.name for path in (run_dir / "checkpoints").glob("stage_*_step_*")]
    if not names:
        return 0
    _, stage, _, step = max(names).split("_")
    return int(step) if stage == "0" else 1 << 30


def report(
    straight: RunRecord,
    resumed: RunRecord,
    *,
    recipe: Recipe,
    kills: int,
    other: ParallelLayout | None,
    resumed_after: int,
) -> int:
    """Print the table and the verdict, and return the exit code."""
    print()
    print("\n".join(steps_table(straight, resumed, across=other is not None)))
    if other is not None:
        faults = across_faults(straight, resumed, resumed_after=resumed_after)
        proven = (
            f"{len(straight.lines)} steps, resumed in layout {layout_text(other)}: losses within {ACROSS_BOUND:g} in "
            f"the first step there, {DRIFT_BOUND:g} in later ones"
        )
    else:
        faults = exact_faults(straight, resumed)
        print(f"final weights: {straight.model[:32]} straight, {resumed.model[:32]} resumed (SHA-256)")
        proven = (
            f"{len(straight.lines)} steps and {len(straight.rollouts)} files of rollouts are bit for bit the same "
            f"after {kills} kills, and so are the final weights"
        )
    if kills == 0:
        print(
            "verdict: not proven: the run ended before it could be killed; try another --seed, or more --kills"
        )
        return NOT_RUN
    if not faults and _has_rl(recipe) and straight.num_rl_updates() == 0:
        print(
            "verdict: not proven: no iteration of RL changed the weights, since no group of rollouts had two rewards; "
            "give the stage longer responses or more samples per prompt (sampling.max_response_tokens, group_size)"
        )
        return NOT_RUN
    print(verdict(faults, proven=proven))
    return REFUTED if faults else PROVEN

"""`verify resume`: a run that is killed and resumed against the same run left alone."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megatron_rl.errors import MegatronRLError
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.recipe.load import load_recipe
from megatron_rl.recipe.schema import Recipe
from megatron_rl.recipe.stages import RlStage
from megatron_rl.verify.kills import KillableRun, Moment, Outcome, draw_moments, sft_only
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
from megatron_rl.verify.table import NOT_RUN, PROVEN, REFUTED, verdict


def verify_resume(args: argparse.Namespace) -> int:
    """The exit code. Raises MegatronRLError for what cannot be run."""
    other = parse_layout(args.layout) if args.layout else None
    with deadline(args.timeout_s), open_place(args.keep) as place:
        layouts = [other] if other else []
        prepared = prepare(
            args.recipe, args.overrides, place, shrink=args.shrink, trains=True, layouts=layouts
        )
        recipe = _decided(prepared.recipe, across=other is not None)
        prepared = write_recipe(recipe, place)
        moments = draw_moments(recipe, kills=args.kills, seed=args.seed)
        straight = _run(prepared, place / "straight")
        _run_straight(straight)
        resumed = _run(prepared, place / "resumed")
        faults, resumed_after = _run_killed(resumed, moments, other=other, place=place)
        if faults:
            print(verdict(faults, proven=""))
            return REFUTED
        records = RunRecord.read(straight.run_dir), RunRecord.read(resumed.run_dir)
        return report(*records, recipe=recipe, kills=len(moments), other=other, resumed_after=resumed_after)


def _decided(recipe: Recipe, *, across: bool) -> Recipe:
    """The recipe in deterministic mode; across layouts its SFT stages alone: sampled tokens do not compare."""
    recipe = replace(recipe, run=replace(recipe.run, deterministic=True))
    if not across:
        return recipe
    stages = sft_only(recipe)
    if not stages:
        raise MegatronRLError(
            "--layout: compares SFT losses, and the recipe has no SFT stage; leave it out, or run `verify layout`"
        )
    if len(stages) < len(recipe.stages):
        say(
            "across layouts only the SFT stages are run: the first token that rounding changes, changes all after it"
        )
    return replace(recipe, stages=stages)


def _run(prepared: Prepared, run_dir: Path) -> KillableRun:
    return KillableRun(prepared.recipe, prepared.path, run_dir, nproc=prepared.world_size)


def _run_straight(run: KillableRun) -> None:
    say(f"running it straight through, on {run.nproc} process{'es' if run.nproc > 1 else ''}")
    outcome = run.start()
    if outcome.exit_code:
        raise MegatronRLError(f"the run failed with exit code {outcome.exit_code}:\n{run.last_words()}")


def _run_killed(
    run: KillableRun, moments: Sequence[Moment], *, other: ParallelLayout | None, place: Path
) -> tuple[list[str], int]:
    """Kill it at every moment, then let it end; faults, and the steps it had when it was resumed first."""
    resumed_after: int | None = None
    for number, moment in enumerate([*moments, None]):
        if number and resumed_after is None:
            resumed_after = _saved_steps(run.run_dir)
            if other is not None:
                _change_layout(run, other, place)
        outcome = run.start(moment=moment)
        if outcome.was_killed:
            say(f"killed ({number + 1} of {len(moments)}): {_where(outcome)}; resuming")
        elif outcome.exit_code:
            which = "the first start" if number == 0 else f"the start after kill {number}"
            return [f"{which} failed with exit code {outcome.exit_code}:\n{run.last_words()}"], 0
        elif moment is not None:
            say(f"ended before it could be killed in {moment.phase} of step {moment.step}")
        else:
            say("ran to its end")
    return [], resumed_after or 0


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


def _change_layout(run: KillableRun, layout: ParallelLayout, place: Path) -> None:
    recipe = load_recipe(run.recipe_file).recipe
    folder = place / "other_layout"
    folder.mkdir()
    changed = write_recipe(replace(recipe, layout=layout_config(layout)), folder)
    run.recipe_file, run.nproc = changed.path, layout.world_size
    say(f"from here on in layout {layout_text(layout)}")


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
    has_rl = any(isinstance(stage, RlStage) for stage in recipe.stages)
    if not faults and has_rl and straight.num_rl_updates() == 0:
        print(
            "verdict: not proven: no iteration of RL changed the weights, since no group of rollouts had two rewards; "
            "use --shrink, or give the stage `rewards.coin=1.0` and `algorithm.drop_zero_advantage=false`"
        )
        return NOT_RUN
    print(verdict(faults, proven=proven))
    return REFUTED if faults else PROVEN

"""The command `check`: every problem of a recipe at once, else what follows from it, and what it will cost."""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import replace
from typing import Any

from megatron_rl.arguments import add_recipe, positive_int
from megatron_rl.errors import MegatronRLError, RecipeError, kept_in, raise_together
from megatron_rl.estimate.estimate import (
    build_estimate,
    estimate_data,
    estimate_rows,
    nearest_worlds,
    other_layout,
)
from megatron_rl.estimate.hardware import Hardware, load_hardware
from megatron_rl.estimate.models import known_models, named_spec
from megatron_rl.estimate.stage_time import Assumed
from megatron_rl.estimate.suggest import suggest
from megatron_rl.estimate.suggest_text import suggestion_data, suggestion_rows
from megatron_rl.estimate.text import Row
from megatron_rl.recipe.load import LoadedRecipe, load_recipe, resolved_yaml
from megatron_rl.recipe.problems import raise_problems
from megatron_rl.recipe.resolve import Resolved, check_recipe, check_without_files, smallest_world
from megatron_rl.recipe.summary import aligned, summary_data, summary_table

_EXAMPLES = """examples:
  megatron-rl check recipes/quickstart.yaml --world 4 layout.tp=2
  megatron-rl check recipes/klear_reasoner_8b/math_rl.yaml --world 64 --gpu h100-80g --model-config qwen3-8b
  megatron-rl check recipes/klear_reasoner_8b/math_rl.yaml --world 64 --gpu h100-80g --model-config qwen3-8b --suggest
  megatron-rl check mine.yaml --world 64 --gpu cluster.yaml --plan --response-mean 6000
"""


def add_check(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """The parser of `check`."""
    check = commands.add_parser(
        "check",
        help="every problem of a recipe at once, else its derived numbers and what it will cost",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_recipe(check)
    check.add_argument(
        "--world", type=positive_int, metavar="N", help="processes (default: the fewest that fit)"
    )
    check.add_argument("--json", action="store_true", help="print the numbers as JSON")
    check.add_argument(
        "--resolved",
        action="store_true",
        help="print the recipe with every key, and whether file, override, compat or a default set it",
    )
    check.add_argument(
        "--gpu",
        metavar="NAME|FILE",
        help="estimate memory and time on h100-80g, h200-141g, b200, or the machine type of a YAML file",
    )
    check.add_argument(
        "--response-mean",
        type=_mean_length,
        metavar="TOKENS",
        help="mean length of responses, in SFT of samples (default: a third of the longest allowed)",
    )
    check.add_argument(
        "--prompt-mean", type=_mean_length, metavar="TOKENS", help="mean length of prompts (default: 200)"
    )
    check.add_argument(
        "--plan",
        action="store_true",
        help="before anything is on the disk: list files that are not there instead of refusing them",
    )
    check.add_argument(
        "--recipe-alone",
        action="store_true",
        help="say what is wrong with the recipe on a machine without its model and data, and no numbers",
    )
    check.add_argument(
        "--model-config",
        metavar="FILE|NAME",
        help="with --plan, which it implies: take the model's sizes from this config.json, or those of a public "
        f"model: {', '.join(known_models())}",
    )
    check.add_argument(
        "--suggest",
        action="store_true",
        help="rank layouts of trainer and engines on --world GPUs by predicted time, among those that fit --gpu",
    )
    check.set_defaults(run=run_check)
    return check


def run_check(args: argparse.Namespace) -> int:
    """Print and return 0. Raises for everything that is wrong with the recipe or the machine type."""
    _check_options(args)
    errors: list[MegatronRLError] = []
    hardware = spec = None
    with kept_in(errors):
        hardware = None if args.gpu is None else load_hardware(args.gpu)
    if args.model_config is not None:
        with kept_in(errors):
            spec = named_spec(args.model_config)
    with kept_in(errors):
        loaded = load_recipe(args.recipe, args.overrides)
    raise_together(errors)
    if args.recipe_alone:
        check_without_files(loaded, world_size=args.world or smallest_world(loaded.recipe))
        print(f"{loaded.source}: nothing wrong that shows without model and data")
        return 0
    if spec is not None and (positions := loaded.recipe.model.max_positions) is not None:
        spec = replace(spec, max_positions=positions)
    world_size = args.world or smallest_world(loaded.recipe)
    planned = args.plan or spec is not None
    assumed = Assumed(response_mean=args.response_mean, prompt_mean=args.prompt_mean)
    try:
        resolved = check_recipe(loaded, world_size=world_size, model_spec=spec, planned=planned)
    except RecipeError:
        if args.suggest and hardware is not None:
            other = other_layout(loaded, spec, hardware, world_size=world_size, planned=planned)
            if other is not None:
                _print_suggestions(loaded, other, hardware, assumed, as_json=args.json)
            elif nearest := nearest_worlds(loaded, spec, hardware, world_size=world_size):
                others = " or ".join(map(str, nearest))
                text = f"none: model and batches do not split over {world_size} GPUs; try --world {others}"
                print(aligned([("suggestions", text)]), file=sys.stderr)
        raise
    if args.resolved:
        print(resolved_yaml(loaded), end="")
        return 0
    found = (
        None
        if hardware is None
        else build_estimate(loaded, resolved, hardware, assumed, suggests=args.suggest)
    )
    if found is not None and found.problems and found.suggestions is None:
        # with suggestions the numbers are what was asked for
        raise_problems(loaded.source, found.problems, loaded.places)
    nodes = {} if hardware is None else {"gpus_per_node": hardware.gpus_per_node}
    if args.json:
        data = summary_data(loaded, resolved, **nodes) | _unchecked_data(resolved)
        if found is not None:
            data["estimate"] = estimate_data(found)
        print(json.dumps(data, indent=2))
        return 0
    rows = estimate_rows(found) if found is not None else []
    rows += _unchecked_rows(resolved)
    print(summary_table(loaded, resolved, more=rows, **nodes))
    return 0


def _print_suggestions(
    loaded: LoadedRecipe, other: Resolved, hardware: Hardware, assumed: Assumed, *, as_json: bool
) -> None:
    """Suggestions alone, for a recipe whose own layout does not do on so many GPUs."""
    num_gpus = other.layout.world_size
    found = suggest(loaded.recipe, other.spec, hardware, assumed, num_gpus=num_gpus)
    if as_json:
        data = suggestion_data(found, loaded.recipe, own_s=None, own_gpus=num_gpus)
        print(json.dumps({"estimate": {"hardware": hardware.name, "suggestions": data}}, indent=2))
        return
    rows = suggestion_rows(found, loaded.recipe, own_s=None, own_gpus=num_gpus, fits=False, num_gpus=num_gpus)
    print(aligned(rows[1:]))


def _check_options(args: argparse.Namespace) -> None:
    found = []
    if args.resolved and (args.json or args.gpu is not None):
        found.append("--resolved: prints the recipe in place of numbers; leave out --json and --gpu")
    if args.gpu is None and (args.response_mean or args.prompt_mean):
        found.append("--response-mean, --prompt-mean: only estimates use them; add --gpu NAME")
    if args.recipe_alone and (args.gpu or args.model_config or args.plan or args.json or args.suggest):
        found.append("--recipe-alone: gives no numbers; it goes with RECIPE, --world and path=value alone")
    if args.suggest and (args.gpu is None or args.world is None):
        found.append("--suggest: needs the GPUs and their number; add --gpu NAME and --world N")
    raise_together([MegatronRLError(text) for text in found])


def _unchecked_rows(resolved: Resolved) -> list[Row]:
    if not resolved.unchecked:
        return []
    rows = [("", ""), ("not checked", "a plan: what is not there was not looked into; `train` refuses it")]
    return rows + [(f"  {problem.path}", problem.text.split("; ")[0]) for problem in resolved.unchecked]


def _unchecked_data(resolved: Resolved) -> dict[str, Any]:
    return {"not_checked": {problem.path: problem.text for problem in resolved.unchecked}}


def _mean_length(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 1 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"got {text!r}, must be a number of tokens, at least 1")
    return value

"""`megatron-rl data`: its arguments, and how a recipe's options reach the survey of a file."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_rl.arguments import number_above_0, positive_int, whole_number
from megatron_rl.errors import MegatronRLError, kept_in, raise_together
from megatron_rl.recipe.dataset import DatasetConfig, DifficultyConfig
from megatron_rl.recipe.load import load_recipe
from megatron_rl.recipe.schema import Recipe
from megatron_rl.recipe.stages import SftStage

if TYPE_CHECKING:
    from megatron_rl.data.survey import Reading


def add_data(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    data = commands.add_parser(
        "data",
        help="what a data file holds: rows kept and dropped by reason, and examples with the response mask",
        description="Read prompt files and supervised files of any supported schema and say what is kept, what is "
        "dropped and why. Text in double brackets is what the model is trained on.",
    )
    data.add_argument("files", nargs="+", metavar="FILE", help="JSONL, a JSON array or parquet")
    source = data.add_mutually_exclusive_group()
    source.add_argument(
        "--tokenizer", type=Path, metavar="HF_DIR", help="to count tokens and show the chat template"
    )
    source.add_argument(
        "--recipe",
        metavar="RECIPE",
        help="tokenizer and, for files that it names, all options of reading them",
    )
    data.add_argument(
        "--as", dest="kind", choices=("prompts", "conversations"), help="instead of telling by the rows"
    )
    data.add_argument(
        "--max-tokens", type=positive_int, metavar="N", help="longer rows are counted as too_long"
    )
    data.add_argument(
        "--difficulty", metavar="COLUMN", help="dotted, such as extra_info.model_difficulty.NAME"
    )
    data.add_argument(
        "--higher-is",
        choices=("harder", "easier"),
        default="harder",
        help="of --difficulty (default: harder)",
    )
    data.add_argument(
        "--denominator", type=number_above_0, default=1.0, metavar="D", help="of --difficulty (default: 1)"
    )
    data.add_argument(
        "--show", type=whole_number, default=3, metavar="N", help="examples of each file (default: 3)"
    )
    data.add_argument(
        "--json", action="store_true", help="print everything as JSON, a list with one entry per file"
    )
    data.set_defaults(run=_data)
    return data


def _data(args: argparse.Namespace) -> int:
    try:
        _print_surveys(args)
        sys.stdout.flush()
    except BrokenPipeError:
        # a reader such as `head` has seen enough; what is buffered still goes somewhere when Python ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _print_surveys(args: argparse.Namespace) -> None:
    from megatron_rl.data.survey import survey_file
    from megatron_rl.data.survey_text import survey_text
    from megatron_rl.data.tokenizer import load_tokenizer
    from megatron_rl.platform.quiet import silence_library_warnings

    silence_library_warnings()
    recipe = None if args.recipe is None else load_recipe(args.recipe).recipe
    home = args.tokenizer if recipe is None else recipe.model.hf_path
    errors: list[MegatronRLError] = []
    tokenizer, surveys = None, []
    with kept_in(errors):
        tokenizer = None if home is None else load_tokenizer(home)
    for file in args.files:
        with kept_in(errors):
            reading = _reading(file, args, recipe)
            surveys.append(survey_file(file, reading, tokenizer=tokenizer, num_shown=args.show))
            # without the tokenizer that was asked for the numbers are not those
            if not args.json and (tokenizer is not None or home is None):
                print(survey_text(surveys[-1], colour=sys.stdout.isatty()) + "\n")
    raise_together(errors)
    if args.json:
        print(json.dumps([dataclasses.asdict(survey) for survey in surveys], indent=2, default=str))


def _reading(file: str, args: argparse.Namespace, recipe: Recipe | None) -> Reading:
    """What the recipe says of this file, else what the arguments say; arguments win."""
    reading = _of_recipe(file, recipe)
    if args.difficulty is not None:
        difficulty = DifficultyConfig(
            column=args.difficulty, higher_is=args.higher_is, denominator=args.denominator
        )
        reading = dataclasses.replace(
            reading, dataset=dataclasses.replace(reading.dataset, difficulty=difficulty)
        )
    return dataclasses.replace(
        reading,
        kind=args.kind or reading.kind,
        max_tokens=args.max_tokens or reading.max_tokens,
    )


def _of_recipe(file: str, recipe: Recipe | None) -> Reading:
    from megatron_rl.data.survey import Reading

    path = Path(file).absolute()
    for stage in recipe.stages if recipe is not None else ():
        if isinstance(stage, SftStage):
            if Path(stage.data).absolute() == path:
                return Reading(
                    kind="conversations", columns=stage.columns, max_tokens=stage.max_sample_tokens
                )
            continue
        sets = stage.eval.sets.values() if stage.eval is not None else ()
        is_eval = any(Path(name).absolute() == path for name in sets)
        if is_eval or Path(stage.prompts).absolute() == path:
            return Reading(
                kind="prompts",
                dataset=DatasetConfig(duplicates="content") if is_eval else stage.dataset,
                template=stage.prompt_template,
                truncation=stage.sampling.prompt_truncation,
                max_tokens=stage.sampling.max_prompt_tokens,
            )
    return Reading()

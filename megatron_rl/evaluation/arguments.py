"""The command line of `eval`. Without torch."""

from __future__ import annotations

import argparse
import datetime
import math
from pathlib import Path

from megatron_rl.arguments import number_above_0, positive_int, seconds, seed, whole_number
from megatron_rl.errors import raise_together
from megatron_rl.evaluation.options import EvalOptions, model_problems, named_file, option_problems
from megatron_rl.recipe.dataset import PLACE
from megatron_rl.rewards import REWARDS

_SubParsers = argparse._SubParsersAction

_EXAMPLES = """examples:
  megatron-rl eval --model exported --data heldout=data/heldout.jsonl --n 4 --seed 1 --max-tokens 128 --out eval.json
  megatron-rl eval --model Qwen3-8B --data aime24.jsonl --data aime25.jsonl --n 64 --pass-at 1,8,32 \\
      --temperature 0.6 --top-p 0.95 --max-tokens 65536 --yarn 2.5 --yarn-original 32768
"""


def add_eval(commands: _SubParsers[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """The parser of `eval`."""
    parser = commands.add_parser(
        "eval",
        help="avg@k, pass@k and cons@k of a model on files of problems",
        description="Sample every problem K times and grade by the code that grades in training. With the settings of "
        "a recipe's `eval` and its run.seed, an exported checkpoint draws the samples that were drawn in the run.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, required=True, metavar="HF_DIR", help="Hugging Face directory")
    parser.add_argument(
        "--data",
        type=_named_file,
        action="append",
        required=True,
        metavar="[NAME=]FILE",
        help="problems: JSONL, JSON or parquet; again for more sets. NAME is part of the seeds (default: the file's)",
    )
    parser.add_argument("--n", type=positive_int, required=True, metavar="K", help="samples of each problem")
    _add_sampling(parser)
    _add_problems(parser)
    _add_engine(parser)
    parser.add_argument("--out", type=Path, metavar="FILE", help="results as JSON, written when complete")
    parser.add_argument(
        "--samples-out", type=Path, metavar="FILE", help="every sample as a line of JSON: text, verdict, seed"
    )
    parser.set_defaults(run=_eval)
    return parser


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling and numbers (defaults are those of a recipe's `eval`)")
    group.add_argument("--temperature", type=_temperature, default=1.0, metavar="T", help="1.0; 0 is greedy")
    group.add_argument("--top-p", type=_probability, default=1.0, metavar="P", help="1.0")
    group.add_argument("--top-k", type=_top_k, default=-1, metavar="N", help="-1: no limit")
    group.add_argument("--seed", type=seed, default=1, metavar="S", help="a run's run.seed (default: 1)")
    group.add_argument(
        "--max-tokens",
        type=positive_int,
        metavar="N",
        help="of a response (default: what the model's positions leave, at most 32768)",
    )
    group.add_argument(
        "--max-prompt-tokens",
        type=positive_int,
        metavar="N",
        help="of a prompt (default: 1024, or half of the positions)",
    )
    group.add_argument(
        "--pass-at", type=_ks, default=(), metavar="K,K", help="each k of pass@k, at most --n: 1,4,8"
    )
    group.add_argument(
        "--yarn",
        type=_factor,
        metavar="FACTOR",
        help="more positions than trained on: 2.5 makes 81920 of 32768",
    )
    group.add_argument(
        "--yarn-original",
        type=positive_int,
        metavar="N",
        help="positions that the model was trained on (default: max_position_embeddings)",
    )


def _add_problems(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("problems and grading")
    judges = [name for name, entry in REWARDS.items() if entry.judges_answers]
    group.add_argument("--reward", choices=judges, default=judges[0], help="default: %(default)s")
    group.add_argument("--limit", type=positive_int, metavar="N", help="the first N problems of each set")
    group.add_argument(
        "--since", type=_date, metavar="YYYY-MM-DD", help="problems dated on this day or later"
    )
    group.add_argument("--until", type=_date, metavar="YYYY-MM-DD", help="problems dated before this day")
    group.add_argument(
        "--prompt-template",
        default=PLACE,
        metavar="TEXT",
        help="text around each problem, such as '{problem} Put the answer in \\boxed{}.' (default: %(default)s)",
    )
    group.add_argument(
        "--prompt-truncation",
        choices=("drop", "left"),
        default="drop",
        help="prompts that are too long: an error, or without their first tokens (default: drop)",
    )
    group.add_argument(
        "--skip-unusable",
        action="store_true",
        help="evaluate the rest of a file with rows that have no prompt or answer or are too long",
    )
    group.add_argument(
        "--grader-workers",
        type=positive_int,
        default=2,
        metavar="N",
        help="grading processes, or sandboxes of programs (2)",
    )
    group.add_argument(
        "--grader-memory-gib", type=_gibibytes, default=2.0, metavar="N", help="of a grading process (2)"
    )
    group.add_argument(
        "--reasoning",
        choices=("auto", "required"),
        default="auto",
        help="required: a response without </think> has no answer (default: auto)",
    )
    group.add_argument(
        "--allow-weak-sandbox",
        action="store_true",
        help="run programs although a layer of isolation is missing: only models that you trust",
    )
    group.add_argument(
        "--grader-timeout-s", type=seconds, default=5.0, metavar="S", help="seconds for one answer (5)"
    )


def _add_engine(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    group.add_argument("--tp", type=positive_int, default=1, metavar="N", help="workers of one engine (1)")
    group.add_argument("--replicas", type=positive_int, default=1, metavar="N", help="engines (1)")
    group.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: that of config.json")
    group.add_argument(
        "--max-concurrent", type=positive_int, default=256, metavar="N", help="sequences at once (256)"
    )
    group.add_argument(
        "--kv-cache-gib",
        type=positive_int,
        default=1,
        metavar="N",
        help="without GPUs: KV cache of an engine (1)",
    )
    group.add_argument(
        "--gpu-memory-fraction", type=_probability, default=0.9, metavar="F", help="share of its GPUs (0.9)"
    )
    group.add_argument(
        "--threads", type=positive_int, default=1, metavar="N", help="CPU threads of a worker (1)"
    )
    group.add_argument(
        "--start-timeout-s", type=seconds, default=600.0, metavar="S", help="for an engine to start (600)"
    )
    group.add_argument(
        "--request-timeout-s",
        type=seconds,
        default=86400.0,
        metavar="S",
        help="for one call: the concurrent sequences four times over (86400)",
    )
    group.add_argument(
        "--restarts", type=whole_number, default=3, metavar="N", help="lost engines that are started anew (3)"
    )
    group.add_argument(
        "--log-dir", type=Path, metavar="DIR", help="logs of engines (default: kept only if it fails)"
    )


def _eval(args: argparse.Namespace) -> int:
    values = {name: getattr(args, name) for name in EvalOptions.__slots__ if hasattr(args, name)}
    options = EvalOptions(**values, sets=tuple(args.data), samples=args.n)
    problems, of_model = [*option_problems(options)], [*model_problems(options.model)]
    if of_model:
        # without a model nothing else can be looked at
        raise_together([*problems, *of_model])
    from megatron_rl.platform.loading import loading_libraries

    with loading_libraries():
        from megatron_rl.evaluation.command import run_eval

    return run_eval(options, problems)


def _named_file(text: str) -> tuple[str, Path]:
    try:
        return named_file(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _ks(text: str) -> tuple[int, ...]:
    return tuple(sorted({positive_int(part.strip()) for part in text.split(",")}))


def _top_k(text: str) -> int:
    if text == "-1":
        return -1
    return positive_int(text)


def _date(text: str) -> datetime.date:
    try:
        return datetime.date.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text!r}, must be a day such as 2024-08-01") from None


def _number(text: str, *, allowed: str, low: float, high: float = math.inf, above: bool = False) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (low < value if above else low <= value) or not value <= high or math.isinf(value):
        raise argparse.ArgumentTypeError(f"got {text!r}, must be {allowed}")
    return value


def _temperature(text: str) -> float:
    # vLLM raises what is between to 0.01 without an error
    if text.strip("0.") == "" and "0" in text:
        return 0.0
    return _number(text, allowed="0, which is greedy, or a number from 0.01 to 100", low=0.01, high=100.0)


def _gibibytes(text: str) -> float:
    return number_above_0(text, most=2**20)


def _probability(text: str) -> float:
    return _number(text, allowed="a number above 0 and at most 1", low=0.0, high=1.0, above=True)


def _factor(text: str) -> float:
    return _number(text, allowed="a factor above 1", low=1.0, above=True)

"""The command line of `score`. Without torch."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_rl.arguments import positive_int, seconds, write_problem
from megatron_rl.errors import MegatronRLError
from megatron_rl.score.names import REWARD_NAMES

_SubParsers = argparse._SubParsersAction


def add_score(commands: _SubParsers[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """The parser of `score`."""
    score = commands.add_parser(
        "score",
        help="grade a file of responses",
        description="Grade responses by the code that grades them in training. One JSON object a line: `id` and "
        "`response`, with `gold` (math_answer) or `tests` and optional `limits` (code_tests), and optionally "
        "`expected`, the score you hold for right. Out comes {id, score, verdict, reason, seconds} a line, in the "
        "same order, score 0 to 1; a summary goes to stderr.",
    )
    score.add_argument("--reward", choices=REWARD_NAMES, required=True, help="the reward that grades")
    score.add_argument("--cases", type=Path, required=True, metavar="FILE", help="JSONL file of responses")
    score.add_argument(
        "--out", type=Path, metavar="FILE", help="write here, once complete (default: standard output)"
    )
    score.add_argument(
        "--workers", type=positive_int, default=2, metavar="N", help="grading processes (default: 2)"
    )
    score.add_argument(
        "--timeout-s",
        type=seconds,
        metavar="S",
        help="seconds for one answer (default: the reward's own)",
    )
    score.set_defaults(run=_score)
    return score


def _score(args: argparse.Namespace) -> int:
    if args.out is not None and (problem := write_problem(args.out)):
        raise MegatronRLError(f"--out {args.out}: {problem}")
    from megatron_rl.score.command import score_file

    return score_file(
        args.cases, reward=args.reward, out=args.out, workers=args.workers, timeout_s=args.timeout_s
    )

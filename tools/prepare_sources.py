"""The part of `prepare_math_data.py` that makes a training set of data sets: its arguments, and what it prints."""

from __future__ import annotations

import argparse
import re
from contextlib import nullcontext
from pathlib import Path

from megatron_rl.arguments import positive_int
from megatron_rl.data.rows import data_files
from megatron_rl.errors import DataError

EXAMPLES = """
  prepare_math_data.py --out data/gsm8k --from gsm8k_train.jsonl
  prepare_math_data.py --out data/math30k --from skywork.parquet numina.parquet --against aime24.jsonl math500.jsonl \\
      --measure models/policy --samples 8 --pass-rate 0.05:0.9 --limit 30000 --cut hard:pass_rate:0.05:0.4"""
_CUT = re.compile(r"([A-Za-z0-9][A-Za-z0-9_-]*):(pass_rate|difficulty):([^:]+):([^:]+)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "from data sets (--from)",
        "Rows are read by schema, as megatron_rl/data/README.md lists them. Left out and counted are rows without a\n"
        "problem or gold, proofs, golds in several parts or in prose, golds that the grader does not take for\n"
        "themselves, repeats, and what shares a run of words with evaluation problems.",
    )
    group.add_argument(
        "--from",
        dest="sources",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="JSONL, JSON or parquet files to merge",
    )
    group.add_argument("--against", type=Path, nargs="+", default=[], metavar="FILE", help="evaluation files")
    group.add_argument(
        "--ngram",
        type=_words,
        default=9,
        metavar="N",
        help="words of a run that counts as shared (default: 9)",
    )
    group.add_argument(
        "--unwrap", metavar="TEXT", help="instruction around each problem, with {problem}: taken away"
    )
    group.add_argument(
        "--difficulty", metavar="COLUMN", help="dotted, such as extra_info.model_difficulty.NAME"
    )
    group.add_argument("--higher-is", choices=("harder", "easier"), default="harder", help="of --difficulty")
    group.add_argument(
        "--denominator", type=float, default=1.0, metavar="D", help="of --difficulty (default: 1)"
    )
    group.add_argument(
        "--difficulties",
        type=_window,
        metavar="LOW:HIGH",
        help="that are sound: rows with another one are left out",
    )
    group.add_argument("--pass-rate", type=_window, metavar="LOW:HIGH", help="leave out problems outside")
    group.add_argument("--limit", type=positive_int, metavar="N", help="keep N problems, drawn by --seed")
    group.add_argument(
        "--cut",
        type=_cut,
        action="append",
        default=[],
        metavar="NAME:pass_rate|difficulty:LOW:HIGH",
        help="also write NAME.jsonl with the kept problems in this window; may be given several times",
    )
    group.add_argument(
        "--workers", type=positive_int, default=1, metavar="N", help="grading processes (default: 1)"
    )
    measure = parser.add_argument_group(
        "pass rates (--measure)", "An interrupted measurement goes on when repeated."
    )
    measure.add_argument("--measure", type=Path, metavar="MODEL_DIR", help="policy that solves each problem")
    measure.add_argument(
        "--samples", type=positive_int, default=8, metavar="K", help="of each problem (default: 8)"
    )
    measure.add_argument("--temperature", type=float, default=1.0, help="(default: 1.0)")
    measure.add_argument("--top-p", type=float, default=1.0, help="(default: 1.0)")
    measure.add_argument(
        "--max-tokens", type=positive_int, default=4096, help="of a response (default: 4096)"
    )
    measure.add_argument("--max-prompt-tokens", type=positive_int, default=1024, help="(default: 1024)")
    measure.add_argument("--tp", type=positive_int, default=1, help="workers of one engine (default: 1)")
    measure.add_argument("--replicas", type=positive_int, default=1, help="engines (default: 1)")
    measure.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="(default: bfloat16)"
    )


def run(args: argparse.Namespace) -> None:
    """Write the set and print the report. Raises DataError."""
    _check(args)
    # Here, since they load torch, which generating does without.
    from megatron_rl.data.prepare import Options, prepare
    from megatron_rl.data.prepare_report import report_text
    from megatron_rl.recipe.dataset import DatasetConfig, DifficultyConfig, dataset_problems
    from megatron_rl.rewards.math_answer import MathAnswer

    difficulty = None
    if args.difficulty is not None:
        difficulty = DifficultyConfig(
            column=args.difficulty, higher_is=args.higher_is, denominator=args.denominator
        )
    dataset = DatasetConfig(difficulty=difficulty, unwrap=args.unwrap)
    for problem in dataset_problems(dataset, "--unwrap"):
        raise DataError(f"--unwrap: {problem.text}")
    options = Options(
        sources=args.sources,
        against=args.against,
        ngram=args.ngram,
        dataset=dataset,
        difficulties=args.difficulties,
        pass_rate=args.pass_rate,
        limit=args.limit,
        seed=args.seed,
        cuts=args.cut,
    )
    grader = MathAnswer(workers=args.workers, timeout_s=5.0)
    try:
        with _measuring(args, grader) as measure:
            report = prepare(options, args.out, grader=grader, measure=measure)
    finally:
        grader.close()
    left_out = "".join(f", dropped {count} {reason}" for reason, count in sorted(report.reasons().items()))
    print(report_text(report))
    print(f"kept {sum(report.kept.values())} rows{left_out}\nwrote {args.out / 'train.jsonl'}")


def _check(args: argparse.Namespace) -> None:
    """What would otherwise be noticed after hours."""
    for path in (*args.sources, *args.against):
        data_files(path)
    if args.denominator <= 0 or args.temperature <= 0 or not 0 < args.top_p <= 1:
        raise DataError("--denominator and --temperature must be above 0, --top-p above 0 and at most 1")
    if args.measure is not None and not (args.measure / "config.json").is_file():
        raise DataError(f"--measure: {args.measure} is no Hugging Face model directory")


def _measuring(args: argparse.Namespace, grader):  # type: ignore[no-untyped-def]
    if args.measure is None:
        return nullcontext()
    from prepare_measure import measuring

    from megatron_rl.recipe.stages import EngineConfig
    from megatron_rl.rollout.measure import Sampling

    args.out.mkdir(parents=True, exist_ok=True)
    sampling = Sampling(
        model=str(args.measure),
        samples=args.samples,
        temperature=args.temperature,
        top_p=args.top_p,
        max_tokens=args.max_tokens,
        max_prompt_tokens=args.max_prompt_tokens,
        seed=args.seed,
    )
    engine = EngineConfig(tp=args.tp, replicas=args.replicas, request_timeout_s=3600.0)
    return measuring(
        args.measure, args.out, sampling=sampling, engine=engine, dtype=args.dtype, grader=grader
    )


def _words(text: str) -> int:
    value = positive_int(text)
    if not 5 <= value <= 50:
        raise argparse.ArgumentTypeError(f"got {text}, must be 5 to 50: shorter runs are in every problem")
    return value


def _window(text: str) -> tuple[float, float]:
    try:
        low, high = map(float, text.split(":"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text!r}, must be LOW:HIGH, such as 0.1:0.9") from None
    if not low <= high:
        raise argparse.ArgumentTypeError(f"got {text!r}, the lower bound must come first")
    return low, high


def _cut(text: str):  # type: ignore[no-untyped-def]
    found = _CUT.fullmatch(text)
    if found is None or found[1] in ("train", "dropped", "measured"):
        raise argparse.ArgumentTypeError(
            f"got {text!r}, must be NAME:pass_rate:LOW:HIGH or NAME:difficulty:LOW:HIGH"
        )
    low, high = _window(f"{found[3]}:{found[4]}")
    # Here, since it loads torch.
    from megatron_rl.data.prepare import Cut

    return Cut(name=found[1], by=found[2], low=low, high=high)

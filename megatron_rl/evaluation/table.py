"""Results for people: a table of every set, and one per difficulty."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from megatron_rl.evaluation.result import Band, EvalResult
from megatron_rl.evaluation.statistics import Estimate

_WIDTH = 160  # where nobody says how wide a line may be
_SHARES = {"truncated_frac": "truncated", "no_answer_frac": "no answer", "ungraded_frac": "grader failed"}
_LENGTHS = {
    "response_tokens_mean": "tokens, mean",
    "response_tokens_p50": "tokens, median",
    "response_tokens_p95": "tokens, 95 %",
}


def results_text(results: Sequence[EvalResult]) -> str:
    """One column per set: estimates in % with their standard errors over problems, shares of samples, lengths."""
    parts = [_table(results), *(_by_difficulty(result) for result in results if len(result.bands()) > 1)]
    return "\n\n".join(_text(part) for part in parts)


def _text(table: Table) -> str:
    stream = io.StringIO()
    Console(file=stream, width=_WIDTH, color_system=None).print(table)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines() if line.strip())


def _table(results: Sequence[EvalResult]) -> Table:
    table = Table("", *(result.name for result in results), box=SIMPLE_HEAD, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    table.add_row("problems", *(str(len(result.problems)) for result in results))
    table.add_row("samples of each", *(str(result.samples) for result in results))
    columns = [
        {_label(name, result): _percent(one) for name, one in result.estimates().items()}
        | {_SHARES[name]: f"{100 * value:.1f} %" for name, value in result.shares().items()}
        | {_LENGTHS[name]: f"{value:.0f}" for name, value in result.lengths().items()}
        for result in results
    ]
    for label in dict.fromkeys(label for column in columns for label in column):
        table.add_row(label, *(column.get(label, "-") for column in columns))
    return table


def _label(name: str, result: EvalResult) -> str:
    """`avg_at_k` of 4 samples is avg@4."""
    return name.replace("_at_k", f"@{result.samples}").replace("_at_", "@")


def _percent(found: Estimate | Band) -> str:
    mean = found.mean if isinstance(found, Estimate) else found.avg_at_k
    error = "" if math.isnan(found.stderr) else f" ± {100 * found.stderr:.1f}"
    return f"{100 * mean:.1f}{error} %"


def _by_difficulty(result: EvalResult) -> Table:
    title = f"{result.name}: by difficulty"
    table = Table(title, "problems", f"avg@{result.samples}", box=SIMPLE_HEAD, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for band in [*result.bands(), result.overall()]:
        table.add_row(band.label, str(band.num_problems), _percent(band))
    return table

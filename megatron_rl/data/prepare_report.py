"""What became of every row of the sources, as data and as text."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_rl.data.prepare import Report

_MEANING = {
    "no_prompt": "no problem that can be read",
    "no_answer": "no gold",
    "proof": "a proof is asked for",
    "invalid": "marked as invalid by its source",
    "code": "a programming problem",
    "multi_part": "the gold answers several parts",
    "prose": "the gold is a sentence",
    "tests_in_file": "a program whose tests are in another file",
    "bad_tests": "a program whose tests cannot be read",
    "bad_difficulty": "a difficulty outside of --difficulties",
    "bad_gold": "the grader does not take the gold for itself",
    "duplicate": "same problem and gold as an earlier row",
    "repeated_text": "same problem as an earlier row but for spacing and case",
    "conflicting_answer": "same problem with another gold; none of them is kept",
    "contaminated": "shares a run of words with an evaluation problem",
    "too_hard": "pass rate below the window",
    "too_easy": "pass rate above the window",
    "no_pass_rate": "no pass rate, with a window given",
    "over_limit": "left out by --limit",
}


def report_data(report: Report) -> dict[str, Any]:
    """Plain JSON types."""
    sources = {
        name: {"rows": rows, "kept": report.kept[name], "dropped": dict(report.dropped.get(name, {}))}
        for name, rows in report.num_rows.items()
    }
    rest = {f.name: getattr(report, f.name) for f in dataclasses.fields(report)}
    for name in ("num_rows", "kept", "dropped"):
        del rest[name]
    totals = {"rows": sum(report.num_rows.values()), "kept": sum(report.kept.values())}
    return {**totals, "dropped": dict(report.reasons()), "sources": sources, **rest}


def report_text(report: Report) -> str:
    """For people, with what each reason means and ids to look up."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Report) -> Iterator[str]:
    names = [*report.num_rows]
    width = max(18, *(len(reason) for reason in report.reasons()), 0)
    yield f"{'':<{width}}" + "".join(f"  {name:>16}" for name in names) + f"  {'all':>9}"
    yield from (_row("rows", width, report.num_rows, names),)
    for reason in sorted(report.reasons(), key=list(_MEANING).index):
        counts = {name: found[reason] for name, found in report.dropped.items()}
        yield _row(reason, width, counts, names)
    yield _row("kept", width, report.kept, names)
    if report.evaluation:
        yield ""
        yield f"runs of {report.options['ngram']} words shared with evaluation problems:"
        for name, problems in report.evaluation.items():
            yield f"  {name}: {problems:,} problems, {report.contaminated_by.get(name, 0):,} rows left out for them"
    yield ""
    yield "why, and ids of the first rows (all are in dropped.jsonl):"
    for reason in sorted(report.examples, key=list(_MEANING).index):
        yield f"  {reason}: {_MEANING[reason]}: {', '.join(report.examples[reason])}"
    for title, counts in (
        ("difficulty", report.difficulty),
        ("pass rate", report.pass_rate),
        ("files", report.cuts),
    ):
        if counts and set(counts) != {"none"}:
            yield f"\n{title} of what was kept: " + ", ".join(
                f"{name}: {count:,}" for name, count in counts.items()
            )


def _row(title: str, width: int, counts: Mapping[str, int], names: list[str]) -> str:
    cells = "".join(f"  {counts.get(name, 0):>{max(16, len(name))},}" for name in names)
    return f"{title:<{width}}{cells}  {sum(counts.get(name, 0) for name in names):>9,}"

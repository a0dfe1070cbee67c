"""A survey for people: counts by reason, difficulties as bars, and examples with the response mask visible."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megatron_rl.data.prompts import NAME_COLUMNS
from megatron_rl.data.survey import Shown, Survey

OPEN, CLOSE = "⟦", "⟧"  # around what is trained on
_GREEN, _PLAIN = "\x1b[32m", "\x1b[0m"
_BAR = 40  # characters of the longest bar
_MAX_SOURCES, _MAX_CHARS = 8, 2000


def survey_text(survey: Survey, *, colour: bool) -> str:
    """Everything a survey counted; trained text is in double brackets, and green where `colour`."""
    return "\n".join(_lines(survey, colour))


def _lines(survey: Survey, colour: bool) -> Iterator[str]:
    yield f"{survey.file}: {survey.kind}"
    yield f"  rows        {survey.num_rows:,}"
    yield f"  kept        {survey.kept:,}"
    for reason, count in sorted(survey.dropped.items()):
        rows = ", ".join(map(str, survey.dropped_rows.get(reason, ())))
        yield f"  dropped     {count:,} {reason}" + (
            f" (rows {rows}{', ...' if _more(survey, reason) else ''})" if rows else ""
        )
    if survey.renamed:
        yield f"  renamed     {survey.renamed:,} whose id another row has"
    if survey.truncated:
        yield f"  cut         {survey.truncated:,} on the left to the longest allowed"
    if survey.repeated:
        other = f", {survey.conflicting:,} of them with another gold" if survey.kind == "prompts" else ""
        yield f"  repeated    {survey.repeated:,} texts that stand there before{other}"
    yield from _named("schemas", survey.schemas)
    yield f"  columns     {', '.join(survey.columns)}"
    yield from _named("sources", survey.sources)
    yield from _named("gold types", survey.gold_types)
    if survey.tokens:
        shares = ", ".join(f"{name} {value:,}" for name, value in survey.tokens.items())
        yield f"  tokens      {shares}"
    else:
        yield "  tokens      unknown; give --tokenizer HF_DIR or --recipe RECIPE"
    if not survey.kept and survey.kind == "prompts" and {"no_prompt", "no_answer"} & set(survey.dropped):
        yield f"  nothing is left: {NAME_COLUMNS}"
    yield from _bars(survey.difficulty)
    for number, shown in enumerate(survey.shown, start=1):
        yield from _example(number, shown, colour)


def _more(survey: Survey, reason: str) -> bool:
    return len(survey.dropped_rows[reason]) < survey.dropped[reason]


def _named(title: str, counts: Mapping[str, int]) -> Iterator[str]:
    if counts:
        shown = list(counts.items())[:_MAX_SOURCES]
        more = f" and {len(counts) - len(shown)} more" if len(counts) > len(shown) else ""
        yield f"  {title:<11} " + ", ".join(f"{name} {count:,}" for name, count in shown) + more


def _bars(counts: Mapping[str, int]) -> Iterator[str]:
    if not counts or set(counts) == {"none"}:
        return
    yield "  difficulty  (larger is harder)"
    width, most = max(map(len, counts)), max(counts.values())
    for band, count in counts.items():
        yield f"    {band:>{width}}  {'#' * -(-count * _BAR // most):<{_BAR}} {count:,}"


def _example(number: int, shown: Shown, colour: bool) -> Iterator[str]:
    facts = [f"id {shown.id}"]
    facts += [f"{shown.tokens} tokens"] if shown.tokens is not None else []
    facts += [f"difficulty {shown.difficulty:g}"] if shown.difficulty is not None else []
    facts += [f"gold {_cut(shown.answer, 80)}"] if shown.answer else []
    yield f"\n--- {number}: {', '.join(facts)}"
    text = ""
    for piece, is_trained in shown.pieces:
        shortened = _cut(piece, _MAX_CHARS)
        if is_trained:
            marked = f"{OPEN}{shortened or 'the response'}{CLOSE}"
            text += f"{_GREEN}{marked}{_PLAIN}" if colour else marked
        else:
            text += shortened
    yield text.rstrip("\n")


def _cut(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]} ... ({len(text) - limit:,} characters left out) ... {text[-half:]}"

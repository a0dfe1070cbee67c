"""Tables of a report: what runs reached, evaluations before and after, and what set each value of the recipe."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean

from megatron_rl.evaluation.result import Band, paired_bands
from megatron_rl.report.evaluations import set_names
from megatron_rl.report.source import Source
from megatron_rl.report.style import NUM_COLOURS
from megatron_rl.train.console import format_seconds

_RECENT = 0.1  # share of the steps, at the end, that "at the end" is a mean over

Cell = tuple[str, str]  # text and class


def table(head: Sequence[str], rows: Sequence[Sequence[str | Cell]], *, kind: str = "") -> str:
    """An HTML table of plain texts; the first cell of a row is its heading."""
    heads = "".join(f"<th scope=col>{html.escape(text)}</th>" for text in head)
    body = "".join(f"<tr>{''.join(map(_cell, range(len(row)), row))}</tr>" for row in rows)
    return (
        f'<div class="scroll"><table class="{kind}"><thead><tr>{heads}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _cell(index: int, cell: str | Cell) -> str:
    text, kind = cell if isinstance(cell, tuple) else (cell, "")
    if index == 0:
        dot = f'<i class="dot {kind}"></i>' if kind else ""
        return f"<th scope=row>{dot}{html.escape(text)}</th>"
    return f'<td class="{kind}">{html.escape(text)}</td>' if kind else f"<td>{html.escape(text)}</td>"


def facts(source: Source) -> list[tuple[str, str]]:
    """What one run has reached so far, label and value."""
    run = source.run
    last = run.lines[-1] if run.lines else {}
    found = [
        ("steps", str(len(run.lines))),
        ("time in steps", format_seconds(sum(run.seconds_per_span().values()))),
    ]
    if run.lines:
        found.append(("now in", f"{last['stage']}, step {last['iteration']}"))
    if rewards := [value for _, value in run.curve("reward/mean")]:
        found.append(("reward at the end", f"{_recent(rewards):.3f}"))
    for name, points in run.eval_sets().items():
        first, final = points[0].result, points[-1].result
        found.append(
            (f"{name}, avg@{final.samples}", f"{100 * first.avg_at_k:.1f} → {100 * final.avg_at_k:.1f} %")
        )
    # counted over the whole run
    for label, name in (("SFT tokens", "count/tokens"), ("rollouts", "count/rollouts")):
        if name in last:
            found.append((label, f"{last[name]:,.0f}"))
    return found


def evaluation_tables(source: Source) -> str:
    """Each set before and after RL by difficulty."""
    parts = []
    for name, points in source.run.eval_sets().items():
        first, last = points[0], points[-1]
        if not first.result.problems or first is last:
            continue
        head = (
            "difficulty",
            "problems",
            f"step {max(0, first.step)}, %",
            f"step {last.step}, %",
            "change",
        )
        rows = [_band_row(*pair) for pair in paired_bands(first.result, last.result)]
        title = f"{name}: avg@{last.result.samples} by difficulty"
        parts.append(
            f'<figure class="card"><figcaption><h3>{html.escape(title)}</h3></figcaption>{table(head, rows)}'
            '<p class="note">± is the standard error over problems</p></figure>'
        )
    return "".join(parts)


def _band_row(before: Band, after: Band) -> list[str | Cell]:
    change = 100 * (after.avg_at_k - before.avg_at_k)
    kind = "good" if change > 0 else "bad" if change < 0 else ""
    return [before.label, str(before.num_problems), _share(before), _share(after), (f"{change:+.1f}", kind)]


def _share(band: Band) -> str:
    return f"{100 * band.avg_at_k:.1f} ± {100 * band.stderr:.1f}"


def comparison(sources: Sequence[Source]) -> str:
    """Final and best numbers, a row for each run."""
    columns: list[tuple[str, Callable[[Source], str]]] = [
        ("steps", lambda source: str(len(source.run.lines))),
        ("time in steps", lambda source: format_seconds(sum(source.run.seconds_per_span().values()))),
    ]
    for name in set_names(sources):
        columns += [
            (f"{name}, {which}, %", partial(_evaluated, name=name, which=which))
            for which in ("first", "last", "best")
        ]
    columns += [
        (label, partial(_metric, metric=metric, how=how, form=form))
        for label, metric, how, form in (
            ("reward, end", "reward/mean", _recent, ".3f"),
            ("reward, best", "reward/mean", max, ".3f"),
            ("SFT loss, end", "sft/loss", _recent, ".4f"),
            ("response tokens, end", "rollout/response_tokens_mean", _recent, ".0f"),
            ("entropy, end", "policy/entropy", _recent, ".3f"),
            ("mismatch, largest", "mismatch/max", max, ".2g"),
            ("tokens/s", "throughput/tokens_per_s", fmean, ",.0f"),
        )
    ]
    shown = [(label, [value(source) for source in sources]) for label, value in columns]
    shown = [(label, values) for label, values in shown if any(values)]
    rows: list[list[str | Cell]] = [
        [(source.name, f"c{number % NUM_COLOURS}"), *(values[number] for _, values in shown)]
        for number, source in enumerate(sources)
    ]
    return table(["run", *(label for label, _ in shown)], rows, kind="numbers")


def _evaluated(source: Source, name: str, which: str) -> str:
    points = source.run.eval_sets().get(name, [])
    if not points:
        return ""
    if which == "best":
        best = max(points, key=lambda point: point.result.avg_at_k)
        return f"{_share(best.result.overall())} at {max(0, best.step)}"
    return _share(points[0 if which == "first" else -1].result.overall())


def _metric(source: Source, metric: str, how: Callable[[list[float]], float], form: str) -> str:
    values = [value for _, value in source.run.curve(metric)]
    return format(how(values), form) if values else ""


def _recent(values: Sequence[float]) -> float:
    return fmean(values[-max(1, round(_RECENT * len(values))) :])


def differences(sources: Sequence[Source]) -> str:
    """The values of the recipes that are not the same in all runs."""
    by_run = [{setting.path: setting.value for setting in source.settings} for source in sources]
    paths = dict.fromkeys(path for values in by_run for path in values)
    rows = [
        [path, *(values.get(path, "-") for values in by_run)]
        for path in paths
        if len({values.get(path) for values in by_run}) > 1
    ]
    if not rows:
        return '<p class="note">the recipes are the same in every value</p>'
    return table(["key", *(source.name for source in sources)], rows, kind="recipe")


def recipe(source: Source) -> str:
    """Every value of the resolved recipe with what set it; as text where it cannot be read."""
    if not source.settings:
        text = source.run.recipe
        return f"<pre>{html.escape(text)}</pre>" if text else '<p class="note">no recipe was recorded</p>'
    rows: list[list[str | Cell]] = [
        [setting.path, setting.value, (setting.origin, f"from-{setting.origin}")]
        for setting in source.settings
    ]
    return table(["key", "value", "set by"], rows, kind="recipe")

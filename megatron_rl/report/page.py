"""One HTML file of one or several runs: charts, tables, rollouts to read. It asks no network for anything.

What runs and models wrote reaches the page in two ways, neither of which can run: as escaped text, and as JSON in which
no tag can end. A content security policy lets the browser run the scripts of this package alone, by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from plotly.offline import get_plotlyjs

from megatron_rl.arguments import write_problem
from megatron_rl.errors import DataError
from megatron_rl.report import tables
from megatron_rl.report.charts import sections
from megatron_rl.report.figures import Card, Chart, Figure, curves, plain
from megatron_rl.report.reader import Reading, choose_rollouts
from megatron_rl.report.series import MAX_POINTS
from megatron_rl.report.source import Source, read_sources
from megatron_rl.report.style import NUM_COLOURS, colour_classes, dark_colours
from megatron_rl.train.files import write_atomically

REPORT_FILE = "report.html"
_MAX_METRICS = 250  # to choose from by name
_MAX_FAULTS = 20  # named
_ASSETS = files("megatron_rl.report") / "assets"


def write_report(
    run_dirs: Path | str | Sequence[Path | str],
    out: Path | None = None,
    *,
    say: Callable[[str], None] | None = None,
) -> Path:
    """Write what the run directories hold so far as one page, by default into the first of them.

    `say` is told of each record that cannot be read and is left out, as the page tells. Raises DataError for a
    directory that holds no run, and for an `out` that is there and is no report.
    """
    folders = [Path(run_dirs)] if isinstance(run_dirs, str | Path) else [Path(one) for one in run_dirs]
    if out is not None and out.is_file() and out.stat().st_size and not _is_page(out):
        raise DataError(f"{out}: is there and is no HTML page; write somewhere else, or remove it first")
    path = out or folders[0] / REPORT_FILE
    if out is not None and (problem := write_problem(out)):
        raise DataError(f"{out}: {problem}")
    sources = read_sources(folders)
    reading = choose_rollouts(sources)
    faults = [fault for source in sources for fault in source.faults] + reading.faults
    if say is not None and faults:
        for line in _left_out(faults):
            say(line)
    write_atomically(path, page(sources, reading, faults).encode("utf-8", errors="xmlcharrefreplace"))
    return path


def page(sources: Sequence[Source], reading: Reading, faults: Sequence[str]) -> str:
    """The whole file."""
    found = sections(sources)
    figures: list[Figure] = []
    body = {"Overview": _warning(faults) + _overview(sources)}
    for title, cards in found.items():
        shown = "".join(_card(card, figures) for card in cards)
        extra = tables.evaluation_tables(sources[0]) if title == "Evaluation" and len(sources) == 1 else ""
        body[title] = f'<div class="grid">{shown}{extra}</div>'
    metrics = _every_metric(sources)
    if metrics:
        body["Any metric"] = (
            '<div class="card"><label class="pick note">metric <select id="metric"></select></label>'
            '<div class="plot" id="metric-plot"></div></div>'
        )
    rollouts = ""
    if reading.rollouts:
        rollouts = Template(_asset("reader.html")).substitute(note=html.escape(reading.note))
    recipes = {"Recipe": _recipes(sources)}
    content = _sections(body) + rollouts + _sections(recipes)
    names = [*body, *(["Rollouts"] if rollouts else []), *recipes]
    data = {
        "figures": figures,
        "metrics": metrics,
        "rollouts": reading.rollouts,
        "runs": [source.name for source in sources],
        "dark": dark_colours(),
    }
    scripts = {
        "plotly": get_plotlyjs(),
        "charts": _asset("charts.js"),
        "reader": _asset("reader.js"),
    }
    title = " · ".join(source.name for source in sources)
    return Template(_asset("page.html")).substitute(
        title=html.escape(title),
        subtitle=html.escape(_subtitle(sources)),
        style=_asset("report.css") + colour_classes(),
        links="".join(f'<a href="#{_anchor(name)}">{html.escape(name)}</a>' for name in names),
        runs=_run_colours(sources),
        content=content,
        footer=html.escape(_footer()),
        policy=_policy(list(scripts.values())),
        data=inert_json(data),
        **scripts,
    )


def _is_page(path: Path) -> bool:
    with path.open("rb") as stream:
        return stream.read(15).lower() == b"<!doctype html>"


def _left_out(faults: Sequence[str]) -> list[str]:
    """A line that counts them, and the first of them."""
    more = [f"and {len(faults) - _MAX_FAULTS:,} more"] if len(faults) > _MAX_FAULTS else []
    head = f"{len(faults):,} broken record{'s are' if len(faults) > 1 else ' is'} left out"
    return [head, *faults[:_MAX_FAULTS], *more]


def _warning(faults: Sequence[str]) -> str:
    if not faults:
        return ""
    head, *lines = _left_out(faults)
    items = "".join(f"<li>{html.escape(line)}</li>" for line in lines)
    return f'<details class="warning"><summary>{html.escape(head)}</summary><ul>{items}</ul></details>'


def inert_json(data: Any) -> str:
    """JSON without any character that means something to HTML, and in ASCII: lone surrogates and NUL as escapes."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _policy(scripts: Sequence[str]) -> str:
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    hashes = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _anchor(name: str) -> str:
    return name.lower().replace(" ", "-")


def _sections(contents: dict[str, str]) -> str:
    return "".join(
        f'<section id="{_anchor(name)}"><h2>{html.escape(name)}</h2>{content}</section>'
        for name, content in contents.items()
    )


def _card(card: Card, figures: list[Figure]) -> str:
    """The title of a card is HTML text already escaped as plotly wants it, which is as HTML wants it."""
    figures.append(card.figure)
    note = f'<p class="note">{html.escape(card.note)}</p>' if card.note else ""
    wide = " two" if card.is_wide else ""
    return (
        f'<figure class="card{wide}"><figcaption><h3>{card.title}</h3></figcaption>'
        f'<div class="plot" data-figure="{len(figures) - 1}"></div>{note}</figure>'
    )


def _overview(sources: Sequence[Source]) -> str:
    if len(sources) > 1:
        return (
            f'<div class="card">{tables.comparison(sources)}<p class="note">± is the standard error over problems; '
            '"end" is the mean of the last tenth of the steps</p></div><h3 class="apart">Where the recipes differ'
            f'</h3><div class="card">{tables.differences(sources)}</div>'
        )
    tiles = (
        f"<div><dt>{html.escape(label)}</dt><dd>{html.escape(value)}</dd></div>"
        for label, value in tables.facts(sources[0])
    )
    return f'<dl class="facts">{"".join(tiles)}</dl>'


def _every_metric(sources: Sequence[Source]) -> dict[str, Figure]:
    """A figure of each metric that any run has, by name."""
    names = dict.fromkeys(
        name for source in sources for line in source.run.lines for name in line if "/" in name
    )
    found = {}
    for name in sorted(names)[:_MAX_METRICS]:
        card = curves(
            Chart(title=name, metrics={"" if len(sources) > 1 else name: name}, unit=plain(name)), sources
        )
        if card is not None:
            found[name] = card.figure
    return found


def _recipes(sources: Sequence[Source]) -> str:
    return "".join(
        f"<details><summary>{html.escape(source.name)}: {len(source.settings)} values, and what set each"
        f"</summary>{tables.recipe(source)}</details>"
        for source in sources
    )


def _run_colours(sources: Sequence[Source]) -> str:
    """What stays in sight of a comparison: the colour of each run."""
    if len(sources) == 1:
        return ""
    chips = (
        f'<span><i class="dot c{number % NUM_COLOURS}"></i>{html.escape(source.name)}</span>'
        for number, source in enumerate(sources)
    )
    return f'<div class="runs"><div class="wide">{"".join(chips)}</div></div>'


def _subtitle(sources: Sequence[Source]) -> str:
    if len(sources) > 1:
        return f"{len(sources)} runs compared; a colour for each run, a dash for each curve of a chart"
    run = sources[0].run
    stages = ", ".join(run.stages()) or "none yet"
    return f"{len(run.lines)} steps · stages: {stages} · {run.run_dir.resolve()}"


def _footer() -> str:
    return (
        "Vertical lines: a stage begins (solid), ▸ the next curriculum window, ★ one that ended early, ↻ resumed, ✕ an "
        "engine or grader restarted. Pale under a line: the values, under their moving mean. Of curves with more than "
        f"{MAX_POINTS} points the ends are shown, and of equal stretches the smallest and the largest; heat maps and "
        "rollouts are of evenly spread iterations."
    )

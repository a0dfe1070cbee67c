"""The curves of a report as plotly figures: plain dictionaries that plotly's own classes accept.

One run: a colour for each metric. Several: a colour for each run, a dash for each metric.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from megatron_rl.report.series import moving_mean, points, rounded, spread, thin
from megatron_rl.report.source import Mark, Source
from megatron_rl.report.style import DASHES, MARK_COLOUR, band_colour, colour

Figure = dict[str, Any]

# how a mark looks above a curve: its line and its sign
_MARKS = {
    "stage": ("solid", ""),
    "window": ("dot", "▸"),
    "resume": ("dash", "↻"),
    "restart": ("dot", "✕"),
    "promotion": ("dashdot", "★"),
}
_MAX_CLEAR = 120  # points of a curve that is shown as it is
_WINDOWS, _MEANS = 50, 200  # of the moving mean of one with more: the window is a 50th of it
_MAX_MARKS = 40  # of one kind and run: more say nothing


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """Curves over the steps of a run: label to metric; `bands` gives the metric that a curve is widened by."""

    title: str
    metrics: Mapping[str, str]
    unit: str
    note: str = ""
    bands: Mapping[str, str] = field(default_factory=dict)
    is_share: bool = False  # shown in per cent
    is_log: bool = False
    is_exact: bool = False  # has no noise to smooth
    is_rare: bool = False  # says nothing while it is 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """A figure with what stands above and below it."""

    title: str
    figure: Figure
    note: str = ""
    is_wide: bool = False


def plain(text: str) -> str:
    """Text as plotly takes it, which reads a few HTML tags, and what stands between two dollars as mathematics."""
    return html.escape(text, quote=False).replace("$", "&#36;")


def curves(chart: Chart, sources: Sequence[Source]) -> Card | None:
    """None where no run has the metrics."""
    traces: list[dict[str, Any]] = []
    is_alone = len(sources) == 1
    for number, source in enumerate(sources):
        for index, (label, name) in enumerate(chart.metrics.items()):
            lines = source.run.lines
            kept = points(lines, name)
            values = [float(lines[i][name]) for i in kept]
            # a log axis has no place for zeros, and a verdict that never came says nothing
            if not kept or (
                not any(values)
                and (chart.is_log or chart.is_rare or (chart.is_share and len(chart.metrics) > 2))
            ):
                continue
            style = Style(number, index, label, [one.name for one in sources])
            hover = ".2%" if chart.is_share else ".4~g"
            steps = [float(lines[i]["step"]) for i in kept]
            stages = [str(lines[i]["stage"]) for i in kept]
            band = None
            if is_alone and name in chart.bands:
                band = [float(lines[i].get(chart.bands[name], 0.0)) for i in kept]
            if len(kept) > _MAX_CLEAR and not chart.is_exact:
                traces += noisy_curve(steps, values, band, style, hover=hover, stages=stages)
            else:
                traces += curve(steps, values, band, style, hover=hover, stages=stages)
    if not traces:
        return None
    traces += legend(traces, chart.metrics, sources)
    layout = step_layout(sources, traces, unit=chart.unit, is_share=chart.is_share, is_log=chart.is_log)
    return Card(title=chart.title, note=chart.note, figure={"data": traces, "layout": layout})


@dataclass(frozen=True, slots=True)
class Style:
    """Where a curve stands among those of its chart."""

    run: int
    metric: int
    label: str
    runs: Sequence[str]

    @property
    def name(self) -> str:
        if len(self.runs) == 1:
            return plain(self.label)
        run = plain(self.runs[self.run])
        return f"{run} · {plain(self.label)}" if self.label else run

    @property
    def colour(self) -> int:
        return self.metric if len(self.runs) == 1 else self.run

    @property
    def dash(self) -> str:
        return "solid" if len(self.runs) == 1 else DASHES[self.metric % len(DASHES)]


def curve(
    xs: Sequence[float],
    ys: Sequence[float],
    band: Sequence[float] | None,
    style: Style,
    *,
    hover: str,
    stages: Sequence[str] | None = None,
) -> Iterator[dict[str, Any]]:
    """The trace of a curve, after that of its band where it has one; both are broken where `stages` changes."""
    key = str(style.metric)
    pieces = _pieces(stages or [""] * len(xs))
    if band is not None and any(band):
        around_x: list[float | None] = []
        around_y: list[float | None] = []
        for piece in pieces:
            around_x += [*(xs[i] for i in piece), *(xs[i] for i in reversed(piece)), None]
            around_y += [rounded(ys[i] + band[i]) for i in piece]
            around_y += [*(rounded(ys[i] - band[i]) for i in reversed(piece)), None]
        yield {
            "type": "scatter",
            "x": around_x[:-1],
            "y": around_y[:-1],
            "fill": "toself",
            "fillcolor": band_colour(style.colour),
            "line": {"width": 0, "color": band_colour(style.colour)},
            "mode": "lines",
            "hoverinfo": "skip",
            "showlegend": False,
            "legendgroup": key,
            "name": f"{style.name} band",
        }
    yield {
        "type": "scatter",
        "x": _broken(xs, pieces),
        "y": _broken([rounded(y) for y in ys], pieces),
        "mode": "lines+markers" if len(xs) <= 40 else "lines",
        "marker": {"size": 5},
        "line": {"color": colour(style.colour), "width": 1.8, "dash": style.dash},
        "name": style.name,
        "legendgroup": key,
        "showlegend": len(style.runs) == 1,
        "hovertemplate": f"%{{y:{hover}}}",
    }


def legend(
    traces: Sequence[Mapping[str, Any]], labels: Iterable[str], sources: Sequence[Source]
) -> list[dict[str, Any]]:
    """Of several runs what the dashes mean; the page says once what the colours do."""
    if len(sources) == 1:
        return []
    shown = {trace["legendgroup"] for trace in traces}
    entries = [(index, label) for index, label in enumerate(labels) if str(index) in shown]
    return [
        {
            "type": "scatter",
            "x": [None],
            "y": [None],
            "mode": "lines",
            "line": {"color": MARK_COLOUR, "width": 1.8, "dash": DASHES[index % len(DASHES)]},
            "name": plain(label),
            "legendgroup": str(index),
            "showlegend": len(entries) > 1,
            "hoverinfo": "skip",
        }
        for index, label in entries
    ]


def noisy_curve(
    xs: Sequence[float],
    ys: Sequence[float],
    band: Sequence[float] | None,
    style: Style,
    *,
    hover: str,
    stages: Sequence[str],
) -> Iterator[dict[str, Any]]:
    """The values, pale, under their moving mean, which has the band."""
    shown = thin(ys)
    pale = curve(
        [xs[i] for i in shown],
        [ys[i] for i in shown],
        None,
        style,
        hover=hover,
        stages=[stages[i] for i in shown],
    )
    means: list[float] = []
    widths: list[float] = []
    kept = spread(len(ys), _MEANS)
    window = max(5, len(ys) // _WINDOWS)
    for piece in _pieces(stages):
        inside = [i - piece.start for i in kept if i in piece]
        means += moving_mean(ys[piece.start : piece.stop], window, inside)
        widths += moving_mean(band[piece.start : piece.stop], window, inside) if band is not None else []
    smooth = list(
        curve(
            [xs[i] for i in kept],
            means,
            widths if band is not None else None,
            style,
            hover=hover,
            stages=[stages[i] for i in kept],
        )
    )
    yield from smooth[:-1]
    yield from (
        {**trace, "opacity": 0.3, "showlegend": False, "line": {**trace["line"], "width": 1}}
        for trace in pale
    )
    # the value is told by the pale curve
    yield {**smooth[-1], "mode": "lines", "hoverinfo": "skip", "hovertemplate": None}


def _pieces(stages: Sequence[str]) -> list[range]:
    """Stretches of equal stages: what is measured in one stage does not go on in the next."""
    borders = [index for index in range(1, len(stages)) if stages[index] != stages[index - 1]]
    return [range(first, end) for first, end in pairwise([0, *borders, len(stages)])]


def _broken(values: Sequence[float | None], pieces: Sequence[range]) -> list[float | None]:
    parts = [[*(values[i] for i in piece), None] for piece in pieces]
    return [value for part in parts for value in part][:-1]


def step_layout(
    sources: Sequence[Source],
    traces: Sequence[Mapping[str, Any]],
    *,
    unit: str,
    is_share: bool = False,
    is_log: bool = False,
) -> dict[str, Any]:
    """Axes over the steps that `traces` have, with what happened meanwhile."""
    steps = [x for trace in traces for x in trace["x"] if x is not None]
    # a curve that does not move would get an axis beyond the whole
    is_part = is_share and all(y is None or y <= 1 for trace in traces for y in trace["y"])
    low, high = min(steps, default=0.0), max(steps, default=1.0)
    pad = max(0.5, 0.02 * (high - low))
    shapes, annotations = _marks(sources)
    return {
        "xaxis": {"title": {"text": "step"}, "range": [low - pad, high + pad]},
        "yaxis": {
            "title": {"text": unit},
            # 12k tokens, but no micro-nats
            "exponentformat": "SI" if "tokens" in unit else "e",
            **({"tickformat": ".3~%", "rangemode": "nonnegative"} if is_share else {}),
            **({"autorangeoptions": {"clipmax": 1}} if is_part else {}),
            **({"type": "log", "exponentformat": "power", "nticks": 6} if is_log else {}),
        },
        "shapes": shapes,
        "annotations": annotations,
    }


def _marks(sources: Sequence[Source]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    shapes: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for number, source in enumerate(sources):
        at: dict[float, dict[str, Any]] = {}  # what happened at one step stands side by side
        tone = MARK_COLOUR if len(sources) == 1 else colour(number)
        for mark in _shown(source.marks):
            dash, sign = _MARKS[mark.kind]
            line = {"color": tone, "width": 1, "dash": dash}
            ends = {"x0": mark.step, "x1": mark.step, "y0": 0, "y1": 1}
            shapes.append(
                {"type": "line", "yref": "paper", **ends, "line": line, "opacity": 0.6, "layer": "below"}
            )
            text = plain(mark.text) if mark.kind == "stage" and len(sources) == 1 else sign
            told = plain(f"{source.name}: {mark.text}, step {mark.step:g}")
            if text and mark.step in at:
                at[mark.step]["text"] += f" {text}"
                at[mark.step]["hovertext"] += f"<br>{told}"
            elif text:
                at[mark.step] = {
                    "x": mark.step,
                    "y": 1,
                    "yref": "paper",
                    "yanchor": "bottom",
                    "showarrow": False,
                    "text": text,
                    "hovertext": told,
                    "font": {"size": 10, "color": tone},
                }
        annotations += at.values()
    return shapes, annotations


def _shown(marks: Sequence[Mark]) -> list[Mark]:
    by_kind: dict[str, list[Mark]] = {}
    for mark in marks:
        by_kind.setdefault(mark.kind, []).append(mark)
    return [mark for found in by_kind.values() for mark in found[-_MAX_MARKS:]]

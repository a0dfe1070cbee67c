"""Where the time went: seconds of each phase, stacked."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from megatron_rl.report.figures import Card, plain, step_layout
from megatron_rl.report.series import rounded, stretches
from megatron_rl.report.source import Source
from megatron_rl.report.style import colour, fill_colour

_MAX_STEPS = 250  # shown; beyond it, means over equal stretches
_MAX_TICK_CHARS = 24
_WHOLE = "time/iteration_s"


def time_cards(sources: Sequence[Source]) -> list[Card]:
    """Of one run its steps; of several their means."""
    names = _spans(sources)
    if not names:
        return []
    return [_over_steps(sources[0], names)] if len(sources) == 1 else [_means(sources, names)]


def _spans(sources: Sequence[Source]) -> list[str]:
    """Metrics of spans in all runs, the longest first."""
    totals: dict[str, float] = {}
    for source in sources:
        for name, seconds in source.run.seconds_per_span().items():
            totals[name] = totals.get(name, 0.0) + seconds
    return [
        f"time/{name}_s" for name, seconds in sorted(totals.items(), key=lambda pair: -pair[1]) if seconds > 0
    ]


def _over_steps(source: Source, names: Sequence[str]) -> Card:
    lines = [line for line in source.run.lines if any(name in line for name in names)]
    parts = stretches(len(lines), _MAX_STEPS)
    steps = [float(lines[part[0]]["step"]) for part in parts]
    traces = [
        {
            "type": "scatter",
            "x": steps,
            "y": [rounded(fmean(lines[i].get(name, 0.0) for i in part), 4) for part in parts],
            "mode": "lines",
            "stackgroup": "time",
            "line": {"width": 0.5, "color": colour(index), "shape": "hv"},
            "fillcolor": fill_colour(index),
            "name": _label(name),
            "hovertemplate": "%{y:.3~g} s",
        }
        for index, name in enumerate(names)
    ]
    note = "wall-clock seconds of rank 0 in each step"
    if len(parts) < len(lines):
        note += f"; means of stretches of {len(lines) / len(parts):.1f} steps"
    layout = step_layout([source], traces, unit="seconds per step")
    return Card(title="Time per phase", note=note, figure={"data": traces, "layout": layout}, is_wide=True)


def _means(sources: Sequence[Source], names: Sequence[str]) -> Card:
    """Of RL iterations alone where a run has any: SFT steps are another matter."""
    labels = [plain(source.name) for source in sources]
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "y": labels,
            "x": [_mean(source, name) for source in sources],
            "marker": {"color": colour(index)},
            "name": _label(name),
            "hovertemplate": "%{x:.3~g} s",
        }
        for index, name in enumerate(names)
    ]
    layout = {
        "barmode": "stack",
        "bargap": 0.4,
        "hovermode": "y unified",
        "xaxis": {"title": {"text": "seconds per step"}},
        # the first run on top
        "yaxis": {
            "title": {"text": "run"},
            "type": "category",
            "autorange": "reversed",
            "automargin": True,
            **_short_ticks(sources),
        },
    }
    note = "mean over RL iterations, over SFT steps for a run without any"
    return Card(title="Time per phase", note=note, figure={"data": traces, "layout": layout})


def _short_ticks(sources: Sequence[Source]) -> dict[str, Any]:
    """Names that would leave no room for bars cut to their ends, which tell runs apart."""
    names = [source.name for source in sources]
    if max(map(len, names)) <= _MAX_TICK_CHARS:
        return {}
    short = [name if len(name) <= _MAX_TICK_CHARS else f"…{name[1 - _MAX_TICK_CHARS :]}" for name in names]
    return {"tickmode": "array", "tickvals": list(map(plain, names)), "ticktext": list(map(plain, short))}


def _mean(source: Source, name: str) -> float | None:
    lines = [line for line in source.run.lines if _WHOLE in line]
    chosen = [line for line in lines if "time/generate_s" in line] or lines
    return rounded(fmean(line.get(name, 0.0) for line in chosen), 4) if chosen else 0.0


def _label(name: str) -> str:
    return name.removeprefix("time/").removesuffix("_s")

"""Line charts as SVG text, for documents that show pictures and run no script."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence

from megatron_rl.train.run_data import Curve

_WIDTH, _HEIGHT = 420, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 10, 10, 24
_COLOURS = ("#1f6feb", "#d1242f", "#1a7f37", "#9a6700", "#8250df", "#57606a")
_MAX_POINTS = 400


def line_chart(curves: Mapping[str, Curve]) -> str:
    """One chart with a line per curve over the step axis; curves without points are left out."""
    shown = {name: _thin(points) for name, points in curves.items() if points}
    if not shown:
        return ""
    xs = [x for points in shown.values() for x, _ in points]
    ys = [y for points in shown.values() for _, y in points]
    x_low, x_high = min(xs), max(xs)
    y_low, y_high = _padded(min(ys), max(ys))

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - x_low) / (x_high - x_low) if x_high > x_low else 0.5
        up = (y - y_low) / (y_high - y_low)
        return (
            _LEFT + across * (_WIDTH - _LEFT - _RIGHT),
            _HEIGHT - _BOTTOM - up * (_HEIGHT - _TOP - _BOTTOM),
        )

    parts = [_grid(y_low, y_high, x_low, x_high)]
    for (_, points), colour in zip(shown.items(), _cycle(len(shown)), strict=True):
        placed = [place(x, y) for x, y in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        if len(placed) <= 30:
            parts.extend(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.2" fill="{colour}"/>' for x, y in placed)
    return _svg("".join(parts)) + (_legend(list(shown)) if len(shown) > 1 else "")


def _svg(content: str) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" role="img">{content}</svg>'
    )


def _legend(names: Sequence[str]) -> str:
    entries = (
        f'<span><i style="background:{colour}"></i>{html.escape(name)}</span>'
        for name, colour in zip(names, _cycle(len(names)), strict=True)
    )
    return f'<div class="legend">{"".join(entries)}</div>'


def _cycle(count: int) -> list[str]:
    return [_COLOURS[index % len(_COLOURS)] for index in range(count)]


def _grid(y_low: float, y_high: float, x_low: float, x_high: float) -> str:
    parts = []
    for index in range(5):
        share = index / 4
        y = _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)
        value = y_low + share * (y_high - y_low)
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#d0d7de"/>'
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_number(value, y_high - y_low)}</text>'
        )
    for x, value, anchor in ((_LEFT, x_low, "start"), (_WIDTH - _RIGHT, x_high, "end")):
        parts.append(f'<text x="{x}" y="{_HEIGHT - 6}" text-anchor="{anchor}">step {value:g}</text>')
    return "".join(parts)


def _number(value: float, spread: float) -> str:
    """As many digits as neighbouring grid lines need to differ."""
    if value and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.1e}"
    digits = max(0, min(4, 1 - math.floor(math.log10(spread)))) if spread > 0 else 2
    return f"{value:.{digits}f}"


def _padded(low: float, high: float) -> tuple[float, float]:
    if high > low:
        return low, high
    pad = abs(low) * 0.1 or 1.0
    return low - pad, high + pad


def _thin(points: Curve) -> Curve:
    """At most so many points that a screen can show, first and last among them."""
    if len(points) <= _MAX_POINTS:
        return points
    step = (len(points) - 1) / (_MAX_POINTS - 1)
    return [points[round(index * step)] for index in range(_MAX_POINTS)]

"""Every weight transfer: how far trainer and engine were apart after it, on fixed prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_rl.report.figures import Card, Style, curve, legend, step_layout
from megatron_rl.report.series import thin
from megatron_rl.report.source import Source
from megatron_rl.report.style import MARK_COLOUR
from megatron_rl.train.files import is_finite

_GAPS = {"mean": "mean", "99th percentile": "p99", "largest": "max"}


def parity_card(sources: Sequence[Source]) -> list[Card]:
    """One card, or none where no run has transferred weights."""
    traces: list[dict[str, Any]] = []
    runs = [source.name for source in sources]
    for number, source in enumerate(sources):
        for index, (label, key) in enumerate(_GAPS.items()):
            found = [
                (float(sync["step"]), float(sync[key])) for sync in source.syncs if is_finite(sync.get(key))
            ]
            found = [(step, gap) for step, gap in found if gap > 0]
            shown = [found[i] for i in thin([gap for _, gap in found])]
            if shown:
                xs, ys = [step for step, _ in shown], [gap for _, gap in shown]
                traces += curve(xs, ys, None, Style(number, index, label, runs), hover=".3~g")
    bounds = [sync["bound"] for source in sources for sync in source.syncs if is_finite(sync.get("bound"))]
    if not traces:
        return []
    traces += legend(traces, _GAPS, sources)
    layout = step_layout(sources, traces, unit="|difference| of log-probs, nats", is_log=True)
    for bound in sorted({bound for bound in bounds if bound > 0})[:3]:
        line = {"color": MARK_COLOUR, "width": 1.2, "dash": "dot"}
        layout["shapes"].append(
            {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": bound, "y1": bound, "line": line}
        )
    note = "fixed prompts and sampled tokens; the run ends above the dotted bound"
    title = "Parity after each weight transfer"
    return [Card(title=title, note=note, figure={"data": traces, "layout": layout})]

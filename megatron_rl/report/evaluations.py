"""Curves of each evaluated set: avg@k with its standard error, and what else was estimated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_rl.evaluation.statistics import Estimate
from megatron_rl.report.figures import Card, Style, curve, legend, plain, step_layout
from megatron_rl.report.series import spread
from megatron_rl.report.source import Source
from megatron_rl.train.files import is_finite
from megatron_rl.train.run_data import EvalPoint

_MAX_EVALS = 200


def set_names(sources: Sequence[Source]) -> list[str]:
    """Evaluated sets of all runs, in order of appearance."""
    return list(dict.fromkeys(name for source in sources for name in source.run.eval_sets()))


def evaluation_cards(sources: Sequence[Source]) -> list[Card]:
    """One card per set."""
    return [_card(name, sources) for name in set_names(sources)]


def _card(name: str, sources: Sequence[Source]) -> Card:
    traces: list[dict[str, Any]] = []
    counts: set[int] = set()
    labels: dict[int, str] = {}
    runs = [source.name for source in sources]
    for number, source in enumerate(sources):
        every = [point for point in source.run.eval_sets().get(name, []) if point.result.problems]
        shown = [every[index] for index in spread(len(every), _MAX_EVALS)]
        counts |= {point.result.samples for point in shown}
        for index, (estimator, values) in enumerate(_estimates(shown).items()):
            steps = [float(max(0, point.step)) for point, _ in values]
            means = [found.mean for _, found in values]
            errors = [found.stderr if is_finite(found.stderr) else 0.0 for _, found in values]
            label = _label(estimator, {point.result.samples for point, _ in values})
            style = Style(number, index, label, runs)
            labels.setdefault(index, label)
            # one band a run is readable
            traces += curve(steps, means, errors if index == 0 else None, style, hover=".1%")
    traces += legend(traces, labels.values(), sources)
    layout = step_layout(sources, traces, unit="share of right answers", is_share=True)
    note = "the band is ± the standard error over problems"
    if len(counts) > 1:
        note += f"; k, the samples of a problem, is not the same in all evaluations: {min(counts)} to {max(counts)}"
    return Card(title=f"{plain(name)}", note=note, figure={"data": traces, "layout": layout})


def _estimates(points: Sequence[EvalPoint]) -> dict[str, list[tuple[EvalPoint, Estimate]]]:
    found: dict[str, list[tuple[EvalPoint, Estimate]]] = {}
    for point in points:
        for name, one in point.result.estimates().items():
            found.setdefault(name, []).append((point, one))
    return found


def _label(estimator: str, samples: set[int]) -> str:
    """`avg_at_k` of four samples as avg@4; pass_at_2 as pass@2."""
    label = estimator.replace("_at_", "@")
    return label.replace("@k", f"@{min(samples)}") if len(samples) == 1 else label

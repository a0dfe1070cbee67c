"""Numbers of a step: how they are reduced over micro-batches and ranks, and where the time went.

Nothing here communicates: who holds the parts of several ranks merges them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from megatron_rl.algo.metric import Metric
from megatron_rl.errors import TrainingError


def merge(parts: Sequence[Sequence[Metric]]) -> dict[str, float]:
    """One number per name over all parts (micro-batches, ranks), each by its rule, in order of appearance.

    A mean is sum(weight * value) / sum(weight); a name with only zero weights has no mean and is left out.
    NaN stays NaN. Raises TrainingError if a name comes with two rules.
    """
    found: dict[str, list[Metric]] = {}
    for part in parts:
        for metric in part:
            found.setdefault(metric.name, []).append(metric.on_host())
    merged = {name: _reduce(metrics) for name, metrics in found.items()}
    return {name: value for name, value in merged.items() if value is not None}


def _reduce(metrics: Sequence[Metric]) -> float | None:
    rules = {metric.reduce for metric in metrics}
    if len(rules) > 1:
        raise TrainingError(
            f"metric {metrics[0].name}: reduced by {' and by '.join(sorted(rules))}; choose one"
        )
    pairs = [(float(metric.value), float(metric.weight)) for metric in metrics]
    if "sum" in rules:
        return sum(value for value, _ in pairs)
    if "max" in rules:
        return math.nan if any(math.isnan(value) for value, _ in pairs) else max(value for value, _ in pairs)
    # a part without tokens has weight 0, and its value means nothing
    counted = [(value, weight) for value, weight in pairs if weight]
    total = sum(weight for _, weight in counted)
    return sum(value * weight for value, weight in counted) / total if total else None


class Meter:
    """Wall-clock seconds of one step by named span. Spans do not nest: they are shares of the whole.

    `entering` is told the name of each span as it opens, `leaving` that it is over.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        *,
        entering: Callable[[str], None] = lambda name: None,
        leaving: Callable[[], None] = lambda: None,
    ) -> None:
        self._clock, self._entering, self._leaving = clock, entering, leaving
        self._started = clock()
        self._seconds: dict[str, float] = {}
        self._open: str | None = None

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time what runs inside; the same name adds up. Raises TrainingError inside another span."""
        if self._open is not None:
            raise TrainingError(f"meter: span {name!r} opened inside {self._open!r}; spans do not nest")
        self._open = name
        self._entering(name)
        started = self._clock()
        try:
            yield
        finally:
            self._open = None
            self._seconds[name] = self._seconds.get(name, 0.0) + self._clock() - started
            self._leaving()

    def metrics(self, *, tokens: int | None = None) -> dict[str, float]:
        """`time/NAME_s` of every span, `time/other_s` and `time/iteration_s` since the meter was made.

        With `tokens`, the tokens that went through meanwhile, also `throughput/tokens_per_s`.
        """
        whole = self._clock() - self._started
        times = {f"time/{name}_s": seconds for name, seconds in self._seconds.items()}
        times["time/other_s"] = max(0.0, whole - sum(self._seconds.values()))
        times["time/iteration_s"] = whole
        if tokens is not None:
            times["throughput/tokens_per_s"] = tokens / whole if whole > 0 else 0.0
        return times

"""Micro-batches as spans: what megatron-core's schedules call where their configuration has `timers`."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.platform.spans import Spans

# by megatron-core's names; its others are parts of these, or the whole
_MICROBATCH = {"forward-compute": "forward", "backward-compute": "backward"}
_SUMS = {"all-grads-sync": "sum gradients"}
# exchanges with other pipeline stages keep their names: forward-recv, backward-send-forward-recv, ...
_EXCHANGES = ("-send", "-recv")


class ScheduleSpans:
    """`timers` of one pass of a schedule over its micro-batches. A micro-batch is numbered from 0 in the order in which
    this rank runs it; model chunks of an interleaved pipeline count on."""

    def __init__(self, spans: Spans) -> None:
        self._spans = spans
        self._counts: dict[str, int] = {}

    def __call__(self, name: str, log_level: int = 0) -> ScheduleSpan:
        return ScheduleSpan(self, name)

    def start(self, name: str) -> None:
        if name in _MICROBATCH:
            number = self._counts.get(name, 0)
            self._counts[name] = number + 1
            self._spans.begin(_MICROBATCH[name], microbatch=number)
        elif shown := _shown(name):
            self._spans.begin(shown)

    def stop(self, name: str) -> None:
        if shown := _MICROBATCH.get(name) or _shown(name):
            self._spans.end(shown)


def _shown(name: str) -> str | None:
    return name if name.endswith(_EXCHANGES) else _SUMS.get(name)


@dataclass(frozen=True, slots=True)
class ScheduleSpan:
    """One timer."""

    owner: ScheduleSpans
    name: str

    def start(self, barrier: bool = False) -> None:
        """Without the barrier that megatron-core offers: a profile must not change what it shows."""
        self.owner.start(self.name)

    def stop(self, barrier: bool = False) -> None:
        self.owner.stop(self.name)

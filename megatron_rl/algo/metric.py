"""One named number of a micro-batch, and how it merges over micro-batches and ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

Reduce = Literal["sum", "mean", "max"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """`sum`: values add up; `mean`: sum(value * weight) / sum(weight); `max`: the largest.

    A 0-dim tensor stays on its device until the step ends: turning it into a float waits for the device.
    """

    name: str
    value: float | Tensor
    reduce: Reduce
    # read by `mean` alone; 0 where the micro-batch had nothing to average, and then the value means nothing
    weight: float | Tensor = 1.0

    def on_host(self) -> Metric:
        """The same metric with plain floats; waits for the device."""
        return replace(self, value=float(self.value), weight=float(self.weight))

"""The coefficient of the entropy bonus: fixed, or adapted step by step towards a target."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from megatron_rl.recipe.algorithm import (
    DEFAULT_ENTROPY_DELTA,
    DEFAULT_MAX_ENTROPY_COEFFICIENT,
    EntropyConfig,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class EntropyState:
    """Before an optimizer step; a checkpoint holds it as `to_dict`."""

    coefficient: float = 0.0
    measured: float | None = None  # mean entropy of the step before, nats; None before the first

    @classmethod
    def start(cls, config: EntropyConfig | None, saved: Mapping[str, float | None]) -> EntropyState:
        """Where `saved` left it; empty: at the beginning of a stage."""
        if config is None:
            return cls()
        if not saved:
            return cls(coefficient=config.coefficient)
        return cls(coefficient=saved["coefficient"] or 0.0, measured=saved["measured"])

    def to_dict(self) -> dict[str, float | None]:
        return {"coefficient": self.coefficient, "measured": self.measured}

    def active_coefficient(self, config: EntropyConfig | None) -> float:
        """What the next step's bonus is multiplied by: 0 once the entropy has reached the target."""
        if config is None:
            return 0.0
        if config.target is None or self.measured is None or self.measured < config.target:
            return self.coefficient
        return 0.0

    def after_step(self, config: EntropyConfig | None, entropy: float | None) -> EntropyState:
        """After a step of that mean entropy (arXiv 2505.22312, section on adaptive entropy control).

        Left as it is for a fixed coefficient, and by a step whose entropy was not measured or is not finite.
        """
        if config is None or config.target is None or entropy is None or not math.isfinite(entropy):
            return self
        delta = config.delta or DEFAULT_ENTROPY_DELTA
        highest = config.max_coefficient or DEFAULT_MAX_ENTROPY_COEFFICIENT
        moved = self.coefficient + (delta if entropy < config.target else -delta)
        return replace(self, coefficient=min(max(moved, 0.0), highest), measured=entropy)

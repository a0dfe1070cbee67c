"""YaRN: more positions than a model was trained on, for evaluation with long responses.

Rotation frequencies are interpolated by `factor` where they are slow, and logits scaled a little (Peng et al. 2023,
"YaRN: Efficient Context Window Extension of Large Language Models"); the engine computes it, here is what it is told.
It changes every log-prob, short prompts' too, so that engines of a trainer never run with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from megatron_rl.errors import ModelError
from megatron_rl.model.spec import ModelSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Yarn:
    """`original_positions` that the model was trained on, times `factor`: 32768 * 2.5 = 81920."""

    factor: float
    original_positions: int

    @property
    def max_positions(self) -> int:
        # factors such as 1.1 are no binary fractions
        return math.floor(self.factor * self.original_positions + 1e-6)

    def overrides(self, spec: ModelSpec) -> dict[str, Any]:
        """Values of `config.json` that the engine is to take instead of the model's."""
        return {
            "max_position_embeddings": self.max_positions,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": spec.rope_theta,
                "factor": self.factor,
                "original_max_position_embeddings": self.original_positions,
            },
        }


def plan_yarn(spec: ModelSpec, *, factor: float, original_positions: int | None = None) -> Yarn:
    """YaRN by `factor`; `original_positions` None: those that config.json names.

    Raises ModelError for a model whose frequencies are scaled already, and for numbers that gain nothing.
    """
    if spec.rope_scaling is not None:
        raise ModelError(
            f"yarn: the model's rope_type is llama3 with factor {spec.rope_scaling.factor:g}, so its frequencies are "
            f"scaled already; YaRN needs rope_type default: evaluate without it, within {spec.max_positions} positions"
        )
    original = spec.max_positions if original_positions is None else original_positions
    if not 0 < original <= spec.max_positions:
        raise ModelError(
            f"yarn: original positions {original}, must be 1 to max_position_embeddings = {spec.max_positions} of "
            f"config.json: those that the model was trained on"
        )
    yarn = Yarn(factor=factor, original_positions=original)
    if not (math.isfinite(factor) and factor > 1 and yarn.max_positions > spec.max_positions):
        raise ModelError(
            f"yarn: factor {factor:g} of {original} positions, must give more than the {spec.max_positions} that "
            f"the model has: a factor above {spec.max_positions / original:g}"
        )
    return yarn

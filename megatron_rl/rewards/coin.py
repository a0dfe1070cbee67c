"""A reward that knows nothing: for proofs of the machinery, where a random model must still be trained."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from megatron_rl.rewards.protocol import Grade, RewardInput


class CoinReward:
    """0 or 1 by a hash of the response: the same for the same text, in every run and on every machine."""

    def grade(self, inputs: Sequence[RewardInput]) -> list[Grade]:
        """One grade per input, in order; it judges no answer, so no verdict."""
        return [Grade(score=float(hashlib.sha256(item.text.encode()).digest()[0] & 1)) for item in inputs]

    @property
    def num_restarts(self) -> int:
        return 0

    def close(self) -> None:
        """Nothing to release."""

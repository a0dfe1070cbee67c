"""What the trainer asks of a generation engine. Implementations: `rollout.vllm_engine`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_rl.data.types import Completion


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateRequest:
    """One sample to draw. Same request, same weights: same tokens, on any replica and engine layout."""

    prompt_token_ids: Sequence[int]
    seed: int
    max_tokens: int
    temperature: float
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: Sequence[int] = ()


class RolloutEngine(Protocol):
    """One or more engine processes behind one door. Only the driving trainer rank holds one."""

    @property
    def weight_version(self) -> int:
        """Version that every replica confirmed after the last finished transfer; -1 before the first."""
        ...

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        """Completions in the order of `requests`: a pure function of them, the weights and the number of replicas.

        Raises LostEngineError if a replica dies or hangs, EngineError if it is stale.
        """
        ...

    def score_all(self, prompts: Sequence[Sequence[int]]) -> list[list[list[float]]]:
        """Log-probs at temperature 1 of every prompt's tokens given what stands before each; by engine, [L - 1] each.

        Computed afresh: nothing cached takes part.
        """
        ...

    def find_lost(self) -> dict[int, str]:
        """Replicas that died or no longer answer, and why. Waits until the others are done with what they do."""
        ...

    def restart(self, replicas: Sequence[int]) -> None:
        """Start these anew in the place of lost ones; all replicas need a weight transfer then. Raises EngineError."""
        ...

    def status(self) -> list[dict[str, Any]]:
        """Of each replica: `weight_version`, and `stale`: None, or why it refuses to answer."""
        ...

    def close(self) -> None:
        """Stop every process of every replica; safe to call twice."""
        ...

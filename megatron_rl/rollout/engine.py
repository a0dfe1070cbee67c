"""What the trainer asks of a generation engine. Implementations: `rollout.vllm_engine`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
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


Ticket = int  # of one submitted request; unique in an engine


class RolloutEngine(Protocol):
    """One or more engine processes behind one door. Only the driving trainer rank holds one.

    Requests are submitted and waited for, and meanwhile others can be submitted, waited for and cancelled; `generate`
    is both at once. Weights are transferred only while nothing runs.
    """

    @property
    def weight_version(self) -> int:
        """Version that every replica confirmed after the last finished transfer; -1 before the first."""
        ...

    def generate(self, requests: Sequence[GenerateRequest], *, evenly: bool = False) -> list[Completion]:
        """Completions in the order of `requests`. `evenly`: replicas take consecutive blocks of them, whatever
        `engine.routing` says, so that of as many requests as there are replicas each has one.

        Where they are in blocks, a pure function of the requests, the weights and the number of replicas; with
        `least_loaded` log-probs may differ in their last bits, see `EngineConfig.routing`.
        Raises LostEngineError if a replica dies or hangs, EngineError if it is stale. Called again with the same
        requests, only what is missing is done.
        """
        ...

    def submit(self, requests: Sequence[GenerateRequest]) -> list[Ticket]:
        """Begin with these and return. A ticket each, to be given to `wait` or `cancel` once.

        Raises EngineError when a request does not fit; what a replica refuses is raised by `wait`.
        """
        ...

    def wait(
        self, tickets: Collection[Ticket], *, count: int | None = None, timeout_s: float | None = None
    ) -> dict[Ticket, Completion]:
        """At least `count` (None: all) of these as soon as they are finished; fewer once `timeout_s` is over. 0 polls.

        Raises LostEngineError if a replica that has one of them dies or hangs, EngineError if it is stale. The tickets
        stay good: after a restart and a transfer, waiting again asks for the missing ones anew, with the weights of
        then. What was finished on other replicas is kept.
        """
        ...

    def cancel(self, tickets: Collection[Ticket]) -> dict[Ticket, Completion]:
        """End these; others go on. Of each the tokens, log-probs and weight version so far, with `Finish.ABORT`, or the
        whole completion if it was finished; no tokens where none was begun or its replica is lost.

        A request for the same prompt with those tokens behind it, and a seed of its own, goes on from there.
        """
        ...

    def score_all(self, prompts: Sequence[Sequence[int]]) -> list[list[list[float]]]:
        """Log-probs at temperature 1 of every prompt's tokens given what stands before each; by engine, [L - 1] each.

        Computed afresh: nothing cached takes part.
        """
        ...

    def sleep(self) -> None:
        """Give the memory of weights and KV cache back, until the next transfer. Nothing may run; stale until then."""
        ...

    def find_lost(self) -> dict[int, str]:
        """Replicas that died or no longer answer, and why. Waits until the others are done with what they do."""
        ...

    def restart(self, replicas: Sequence[int]) -> None:
        """Start these anew in the place of lost ones; all replicas need a weight transfer then. Raises EngineError."""
        ...

    def load_metrics(self) -> dict[str, float]:
        """How evenly replicas worked since this was last asked: `engine/imbalance`, the busiest one's seconds over
        their mean. Nothing for one replica."""
        ...

    def status(self) -> list[dict[str, Any]]:
        """Of each replica: `weight_version`, and `stale`: None, or why it refuses to answer."""
        ...

    def close(self) -> None:
        """Stop every process of every replica; safe to call twice."""
        ...

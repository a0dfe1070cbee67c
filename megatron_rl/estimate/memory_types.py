"""What a memory estimate is made of: bytes by part, by phase, by pipeline stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Device = Literal["gpu", "cpu"]

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseMemory:
    """Bytes on one rank's device while it is busiest in one phase, by part; parts of 0 bytes are left out."""

    phase: str  # load | generate | logprob | train | step | sync | save
    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """The trainer rank of one pipeline stage that needs most; its tp and dp neighbours need the same."""

    pp_rank: int
    phases: Sequence[PhaseMemory]
    host_bytes: int  # host memory besides: reference policy, copies of a checkpoint

    def phase(self, name: str) -> PhaseMemory | None:
        return next((phase for phase in self.phases if phase.phase == name), None)

    @property
    def peak(self) -> PhaseMemory:
        return max(self.phases, key=lambda phase: phase.total)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineMemory:
    """One worker of a generation engine. Bytes; a token's keys and values are `kv_token_bytes` on each worker."""

    weights: int
    kv_token_bytes: int
    overhead: int  # activations of one step, the runtime, CUDA graphs: an allowance
    sync: int  # buckets and tensors under way while weights arrive, besides what the engine owns

    def kv_bytes(self, budget: int) -> int:
        """What is left for the KV cache of `budget` bytes in all; 0 where nothing is."""
        return max(0, budget - self.weights - self.overhead)

    def sequences(self, budget: int, tokens: int) -> int:
        """Sequences of `tokens` tokens that the cache holds together."""
        return self.kv_bytes(budget) // (self.kv_token_bytes * tokens)

    def needed(self, sequences: float, tokens: int) -> int:
        """Bytes of an engine that holds so many sequences."""
        return self.weights + self.overhead + int(sequences * tokens * self.kv_token_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class StageMemory:
    """One stage of a recipe."""

    kind: str  # sft | rl
    tokens_per_microbatch: int
    longest: int  # tokens of the longest sample, prompt and response
    ranks: Sequence[RankMemory]
    engine: EngineMemory | None  # RL on GPUs
    shared_pp: frozenset[int]  # pipeline stages of trainer ranks that have an engine worker on their GPU
    sleeps: bool  # engines give their memory back while the trainer works

    @property
    def sharing(self) -> Sequence[RankMemory]:
        """Ranks that share their GPU with an engine worker, one of each pipeline stage."""
        return [rank for rank in self.ranks if rank.pp_rank in self.shared_pp]

    @property
    def busiest(self) -> RankMemory:
        """The pipeline stage whose peak is highest."""
        return max(self.ranks, key=lambda rank: rank.peak.total)

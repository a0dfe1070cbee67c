"""Whether a stage fits the memory of a GPU, and how much of it engines on the same GPUs may have."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_rl.estimate.memory_types import GIB, EngineMemory, PhaseMemory, RankMemory, StageMemory

# of an engine that sleeps: context, libraries and communicators stay; an allowance, not measured here
ASLEEP_BYTES = 3 * GIB // 2
# of phases that an engine takes turns with, the one that it holds its whole share in: while weights arrive, those alone
_AWAKE = ("generate",)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tight:
    """Where a rank needs most beside what an engine takes: `bytes` in `phase`."""

    rank: RankMemory
    phase: PhaseMemory
    bytes: int


def tightest(memory: StageMemory) -> Tight:
    """Of all pipeline stages; what an engine holds of its own accord while it sleeps or loads weights counts."""
    return max((_of(rank, phase, memory) for rank in memory.ranks for phase in rank.phases), key=_bytes)


def beside_engine(memory: StageMemory) -> Tight | None:
    """The most that a trainer rank needs while an engine on its GPU is awake; None: none shares one."""
    found = [
        _of(rank, phase, memory)
        for rank in memory.sharing
        for phase in rank.phases
        if _is_awake(phase, memory)
    ]
    return max(found, key=_bytes, default=None)


def largest_fraction(memory: StageMemory, capacity: int) -> float:
    """Share of a GPU that the trainer leaves to an engine, in hundredths; at most vLLM's usual 0.9."""
    tight = beside_engine(memory)
    left = capacity - tight.bytes if tight is not None else capacity
    return max(0.0, min(0.9, math.floor(100 * left / capacity) / 100))


def smallest_fraction(engine: EngineMemory, capacity: int, *, sequences: float, tokens: int) -> float:
    """Share of a GPU, in hundredths, of which an engine holds `sequences` of `tokens` tokens; may exceed 1."""
    return math.ceil(100 * engine.needed(sequences, tokens) / capacity) / 100


def fits(memory: StageMemory, capacity: int, *, fraction: float) -> bool:
    """Whether trainer, and engines with `fraction` of a GPU, need at most `capacity` bytes and hold a sequence."""
    if tightest(memory).bytes > capacity:
        return False
    if memory.engine is None:
        return True
    if memory.engine.sequences(int(fraction * capacity), memory.longest) < 1:
        return False
    tight = beside_engine(memory)
    return tight is None or tight.bytes + int(fraction * capacity) <= capacity


def _of(rank: RankMemory, phase: PhaseMemory, memory: StageMemory) -> Tight:
    size = phase.total
    if memory.engine is not None and rank in memory.sharing:
        if phase.phase == "sync":
            size += memory.engine.sync + memory.engine.weights * memory.sleeps
        if memory.sleeps and not _is_awake(phase, memory):
            size += ASLEEP_BYTES
    return Tight(rank=rank, phase=phase, bytes=size)


def _is_awake(phase: PhaseMemory, memory: StageMemory) -> bool:
    # the model is loaded before engines start
    return phase.phase in _AWAKE if memory.sleeps else phase.phase != "load"


def _bytes(tight: Tight) -> int:
    return tight.bytes

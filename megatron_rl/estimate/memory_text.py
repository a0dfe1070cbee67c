"""A memory estimate as rows of text and as plain data, for `check`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_rl.estimate.memory_fit import beside_engine, largest_fraction, smallest_fraction, tightest
from megatron_rl.estimate.memory_types import GIB, RankMemory, StageMemory
from megatron_rl.recipe.stages import RlStage, Stage
from megatron_rl.reshard.plan_text import size_text


def memory_rows(
    memory: StageMemory, stage: Stage, *, memory_gib: float, mean_tokens: int | None = None
) -> list[tuple[str, str]]:
    """(what, how much) of one stage: each phase of the busiest rank, then what engines hold.

    `mean_tokens`: of a sequence, prompt and response, where it is known.
    """
    capacity = int(memory_gib * GIB)
    rank = tightest(memory).rank
    title = f"memory of a rank{_which(rank, memory)}"
    rows = [(title, f"at most {size_text(rank.peak.total)} of {size_text(capacity)}, in {rank.peak.phase}")]
    for phase in rank.phases:
        parts = sorted(phase.parts.items(), key=lambda part: -part[1])
        listed = ", ".join(f"{name} {size_text(size)}" for name, size in parts)
        rows.append((f"  {phase.phase}", f"{size_text(phase.total)}: {listed}"))
    if len(memory.ranks) > 1:
        peaks = ", ".join(f"{size_text(other.peak.total)} in {other.peak.phase}" for other in memory.ranks)
        rows.append(("  peak of each pp rank", peaks))
    if rank.host_bytes:
        rows.append(("  host memory", f"{size_text(rank.host_bytes)}: reference policy, while it scores"))
    if isinstance(stage, RlStage) and memory.engine is not None:
        rows += _engine_rows(memory, stage, capacity, mean_tokens)
    return rows


def _which(rank: RankMemory, memory: StageMemory) -> str:
    return f" of pp rank {rank.pp_rank}, the busiest" if len(memory.ranks) > 1 else ""


def _engine_rows(
    memory: StageMemory, stage: RlStage, capacity: int, mean_tokens: int | None
) -> list[tuple[str, str]]:
    engine, fraction = memory.engine, stage.engine.gpu_memory_fraction
    assert engine is not None
    budget = int(fraction * capacity)
    rows = [
        (
            "memory of an engine worker",
            f"{size_text(budget)} (gpu_memory_fraction {fraction:g}): weights {size_text(engine.weights)}, overhead "
            f"{size_text(engine.overhead)}, KV cache {size_text(engine.kv_bytes(budget))}",
        ),
        ("  KV cache holds", _holds(memory, budget, mean_tokens)),
        ("  while weights arrive", f"{size_text(engine.sync)} more"),
    ]
    concurrent, tokens = stage.engine.max_concurrent, mean_tokens or memory.longest
    wanted = smallest_fraction(engine, capacity, sequences=concurrent, tokens=tokens)
    which = f"{concurrent} sequences of {tokens:,} tokens"
    note = ", more than a GPU has: the others wait" if wanted > 1 else ""
    rows.append(("  fraction for max_concurrent", f"{wanted:g} would hold {which}{note}"))
    tight = beside_engine(memory)
    if tight is not None:
        turns = "they take turns" if memory.sleeps else "both at once"
        most = largest_fraction(memory, capacity)
        text = f"at most {most:g}: it needs {size_text(tight.bytes)} in {tight.phase.phase}; {turns}"
        rows.append(("  fraction beside the trainer", text))
    elif stage.engine.hosts and stage.engine.colocated is None and stage.overlap == "none":
        # nothing in the recipe says whose machines they are
        everywhere = replace(memory, shared_pp=frozenset(range(len(memory.ranks))))
        most = largest_fraction(everywhere, capacity)
        text = f"taken for machines of their own; if they are the trainer's (engine.colocated: true), at most {most:g}"
        rows.append(("  engine.hosts", text))
    return rows


def _holds(memory: StageMemory, budget: int, mean_tokens: int | None) -> str:
    assert memory.engine is not None
    text = f"{memory.engine.sequences(budget, memory.longest):,} sequences of {memory.longest:,} tokens, the longest"
    if mean_tokens is not None:
        text += f"; {memory.engine.sequences(budget, mean_tokens):,} of {mean_tokens:,}, the mean"
    return text


def memory_data(memory: StageMemory, stage: Stage, *, memory_gib: float) -> dict[str, Any]:
    """Plain JSON types; bytes."""
    capacity = int(memory_gib * GIB)
    data: dict[str, Any] = {
        "capacity": capacity,
        "peak": tightest(memory).bytes,
        "tokens_per_microbatch": memory.tokens_per_microbatch,
        "ranks": [
            {
                "pp_rank": rank.pp_rank,
                "phases": {phase.phase: dict(phase.parts) for phase in rank.phases},
                "host": rank.host_bytes,
            }
            for rank in memory.ranks
        ],
    }
    engine = memory.engine
    if isinstance(stage, RlStage) and engine is not None:
        budget = int(stage.engine.gpu_memory_fraction * capacity)
        data["engine"] = {
            "weights": engine.weights,
            "overhead": engine.overhead,
            "kv_cache": engine.kv_bytes(budget),
            "sync": engine.sync,
            "longest_tokens": memory.longest,
            "longest_sequences": engine.sequences(budget, memory.longest),
            "takes_turns": memory.sleeps,
            "largest_fraction": largest_fraction(memory, capacity),
            "smallest_fraction": smallest_fraction(engine, capacity, sequences=1, tokens=memory.longest),
        }
    return data

"""A plan in numbers and in words: what moves, how evenly, how far from the least possible, and by which path."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict
from math import prod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_rl.reshard.plan import ReshardPlan


def summarise(plan: ReshardPlan) -> dict[str, Any]:
    """Sizes and balance; `broadcast_bytes` is what sending whole tensors to every worker would move."""
    sent: dict[int, int] = defaultdict(int)
    received: dict[int, int] = defaultdict(int)
    messages: set[tuple[int, int, int]] = set()
    for segment, senders in zip(plan.segments, plan.routes, strict=True):
        for worker, sender in zip(plan.members.workers_of(segment), senders, strict=True):
            sent[sender] += segment.bytes
            received[worker] += segment.bytes
            messages.add((segment.bucket, sender, worker))
    model_bytes = sum(prod(shape) for shape in plan.shapes.values()) * plan.element_bytes
    sent_bytes = {rank: sent[rank] for rank in range(plan.num_trainers)}
    mean = sum(sent_bytes.values()) / len(sent_bytes)
    return {
        "source": asdict(plan.source),
        "target": {"tp": plan.target_tp, "replicas": plan.replicas},
        "transfers": sum(len(s.intervals) * len(r) for s, r in zip(plan.segments, plan.routes, strict=True)),
        "messages": len(messages),
        "buckets": plan.num_buckets,
        "model_bytes": model_bytes,
        "bytes_moved": plan.bytes_moved(),
        "broadcast_bytes": model_bytes * plan.num_workers,
        "sent_bytes": sent_bytes,
        "received_bytes": {w: received[plan.num_trainers + w] for w in range(plan.num_workers)},
        "send_imbalance": max(sent_bytes.values()) / mean if mean else 1.0,
    }


def explain(plan: ReshardPlan) -> str:
    """A short table for a person: totals, then bytes per trainer rank and per worker."""
    facts = summarise(plan)
    lines = [
        f"reshard plan: {plan.source} -> {plan.replicas} engine(s) of tp={plan.target_tp}",
        f"  {facts['transfers']:,} transfers, {_mib(facts['bytes_moved'])}",
        f"  model {_mib(facts['model_bytes'])}, a broadcast would move {_mib(facts['broadcast_bytes'])}",
        f"  busiest sender / mean {facts['send_imbalance']:.2f}",
    ]
    for title, sizes in (
        ("trainer rank sends", facts["sent_bytes"]),
        ("worker receives", facts["received_bytes"]),
    ):
        shown = list(sizes.items())[:16]
        more = f" ... {len(sizes) - len(shown)} more" if len(sizes) > len(shown) else ""
        lines.append(f"  {title}: " + ", ".join(f"{i}: {_mib(size)}" for i, size in shown) + more)
    return "\n".join(lines)


def _mib(size: int) -> str:
    return f"{size / 2**20:,.2f} MiB"

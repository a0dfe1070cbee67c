"""Which replica answers which request. Pure: what is sent, and what came back, is `rollout.dispatch`'s."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from megatron_rl.rollout.engine import GenerateRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What one replica has been given and not answered yet."""

    requests: int
    tokens: int  # see `tokens_of`


def even_blocks(count: int, replicas: int) -> list[range]:
    """Positions of `count` requests, in at most `replicas` consecutive blocks, the last the smallest.

    Depends on nothing but its arguments: the same requests come to the same replica, in the same batches.
    """
    share = -(-count // replicas)
    return [range(first, min(first + share, count)) for first in range(0, count, share)] if count else []


def groups_of(requests: Sequence[GenerateRequest]) -> list[range]:
    """Positions of consecutive requests with one prompt: they stay together, for the prefix that they share."""
    groups, first = [], 0
    for _, members in groupby(requests, key=lambda request: tuple(request.prompt_token_ids)):
        size = sum(1 for _ in members)
        groups.append(range(first, first + size))
        first += size
    return groups


def tokens_of(request: GenerateRequest) -> int:
    """The most tokens that it can cost: how long its answer becomes nobody knows yet."""
    return len(request.prompt_token_ids) + request.max_tokens


def least_loaded(loads: Sequence[Load | None], *, max_concurrent: int) -> int | None:
    """The replica with the fewest outstanding tokens, of those that could decode another request at once.

    None in `loads` is a replica that takes nothing. Ties go to fewer requests, then to the first. Returns None while
    all are full: what waits here can still go to whoever is done first, what waits inside an engine cannot.
    """
    open_ones = [
        (load.tokens, load.requests, i)
        for i, load in enumerate(loads)
        if load is not None and load.requests < max_concurrent
    ]
    return min(open_ones)[2] if open_ones else None


def imbalance(busy_s: Sequence[float]) -> float | None:
    """The busiest replica's seconds over their mean: 1 is even. None for one replica, and where none was busy."""
    total = sum(busy_s)
    return max(busy_s) * len(busy_s) / total if len(busy_s) > 1 and total else None

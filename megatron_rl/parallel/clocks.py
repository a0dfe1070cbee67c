"""How far clocks of other machines are from rank 0's, by asking there and back (Cristian 1989)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_rl.parallel.collectives import all_gather_object

_ROUNDS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class ClockOffset:
    """`their clock - own clock`, right within `error_ns`."""

    offset_ns: int = 0
    error_ns: int = 0


def offset_of(rounds: Sequence[tuple[int, int, int]]) -> ClockOffset:
    """From rounds of (own time at the question, their time, own time at the answer): by the quickest.

    Their time was somewhere between both; its middle is off by half the round at most.
    """
    asked, theirs, answered = min(rounds, key=lambda one: one[2] - one[0])
    return ClockOffset(offset_ns=theirs - (asked + answered) // 2, error_ns=-(-(answered - asked) // 2))


def offset_to_first(
    clock_name: str,
    *,
    rank: int,
    group: dist.ProcessGroup | None,
    clock: Callable[[], int] = time.monotonic_ns,
) -> ClockOffset:
    """Of rank 0's clock from this rank's; nothing for clocks of the same name. Collective over `group`, which holds
    every rank and works on the CPU; None: this process is alone."""
    if group is None:
        return ClockOffset()
    names = all_gather_object(clock_name, group)
    found = ClockOffset()
    box = torch.zeros(1, dtype=torch.int64)
    for other in [other for other, name in enumerate(names) if name != names[0]]:
        # one after the other: rank 0 answers at once
        rounds = []
        for _ in range(_ROUNDS):
            if rank == 0:
                dist.recv(box, src=other, group=group)
                box[0] = clock()
                dist.send(box, dst=other, group=group)
            elif rank == other:
                asked = clock()
                dist.send(box, dst=0, group=group)
                dist.recv(box, src=0, group=group)
                rounds.append((asked, int(box[0]), clock()))
        if rounds:
            found = offset_of(rounds)
    return found

"""Full-shape tensors of which one worker fills its interval, given to a loader that may keep them for a while."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor

from megatron_rl.reshard.plan import Message, ReshardPlan, Transfer

_Interval = tuple[int, int, int]  # dim, start, length


class Scratch:
    """Makes them, and on the CPU makes them again from memory that nobody uses any more.

    Pages that a process has never touched cost several times as much to write as others, and a model has many
    tensors of the same shape. With `canary` whatever no message brings is NaN, else undefined.
    """

    def __init__(
        self,
        plan: ReshardPlan,
        messages: Iterable[Message],
        *,
        dtype: torch.dtype,
        device: torch.device,
        canary: bool,
    ) -> None:
        """`messages` are all that this worker receives."""
        self._shapes, self._dtype, self._device, self._canary = plan.shapes, dtype, device, canary
        self._unsent = _unsent(plan, messages)
        self._memory: dict[tuple[tuple[int, ...], tuple[_Interval, ...]], list[np.ndarray]] = defaultdict(
            list
        )

    def take(self, name: str) -> Tensor:
        """The tensor `name` before any of its intervals is filled."""
        shape, unsent = self._shapes[name], self._unsent[name]
        if self._device.type != "cpu":
            return self._clean(torch.empty(shape, dtype=self._dtype, device=self._device), unsent)
        memory = self._memory[shape, unsent]
        for array in memory:
            # a tensor, and each view of it, holds a reference: without one it is this list's, ours and the call's
            if sys.getrefcount(array) == 3:
                return self._over(array, shape)
        memory.append(np.empty(prod(shape) * self._dtype.itemsize, dtype=np.uint8))
        # what is NaN stays so: users of this memory fill the same intervals, and loaders only read
        return self._clean(self._over(memory[-1], shape), unsent)

    def _over(self, array: np.ndarray, shape: tuple[int, ...]) -> Tensor:
        return torch.from_numpy(array).view(self._dtype).view(shape)

    def _clean(self, full: Tensor, unsent: Iterable[_Interval]) -> Tensor:
        if self._canary:
            for dim, start, length in unsent:
                full.narrow(dim, start, length).fill_(float("nan"))
        return full


def _unsent(plan: ReshardPlan, messages: Iterable[Message]) -> dict[str, tuple[_Interval, ...]]:
    """Of each tensor the intervals that none of `messages` brings."""
    sent: dict[str, list[Transfer]] = {name: [] for name in plan.shapes}
    for message in messages:
        for transfer in message.transfers:
            sent[transfer.hf_name].append(transfer)
    return {name: tuple(_gaps(plan.shapes[name], transfers)) for name, transfers in sent.items()}


def _gaps(shape: tuple[int, ...], transfers: Sequence[Transfer]) -> Iterator[_Interval]:
    dim = transfers[0].hf_dim if transfers else 0
    if dim is None:
        return
    position = 0
    for transfer in sorted(transfers, key=lambda each: each.hf_start):
        if transfer.hf_start > position:
            yield dim, position, transfer.hf_start - position
        position = transfer.hf_start + transfer.length
    if position < shape[dim]:
        yield dim, position, shape[dim] - position

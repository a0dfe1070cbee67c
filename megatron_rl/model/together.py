"""Steps that all ranks take together, where a failure of one is an error on all; every wait is bounded."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron_rl.errors import CheckpointError, LostPeerError

T = TypeVar("T")


class Together:
    """The ranks of a run around one place on disk, in a group of their own.

    Writing may take longer than a training step, and a GPU is of no use to it. `timeout_s` bounds a rank's own wait
    for a disk or a process; the others wait for it a little longer, so that its own words are what they hear.
    """

    def __init__(self, place: str, *, rank: int, timeout_s: float) -> None:
        self._place, self._rank, self.timeout_s = place, rank, timeout_s
        self._lazy_group: dist.ProcessGroup | None = None

    @property
    def _group(self) -> dist.ProcessGroup:
        if self._lazy_group is None:
            patience = timedelta(seconds=1.1 * self.timeout_s + 5.0)
            self._lazy_group = dist.new_group(backend="gloo", timeout=patience)
        return self._lazy_group

    def run(
        self, what: str, action: Callable[[], T], *, rank: int | None = None, after: str = ""
    ) -> list[T | None]:
        """What `action` returned on every rank, picklable and small; or on `rank` alone, None from the others.

        One failure raises CheckpointError on all, with the words of the first and then `after`. A rank that is lost
        or silent is a LostPeerError. Collective.
        """
        group, result, failure = self._group, None, None
        try:
            if rank is None or rank == self._rank:
                result = action()
        except Exception as error:
            failure = error
        message = None if failure is None else self._describe(failure)
        outcomes: list[Any] = [None] * dist.get_world_size()
        try:
            dist.all_gather_object(outcomes, (result, message), group=group)
        except RuntimeError as error:
            if failure is not None:
                raise CheckpointError(f"{self._place}: {what} failed: {message}") from failure
            raise self._lost(what, error) from error
        failures = [said for _, said in outcomes if said is not None]
        if failures:
            raise CheckpointError(f"{self._place}: {what} failed: {failures[0]}{after}") from failure
        return [returned for returned, _ in outcomes]

    def agree(self, what: str, *, is_ready: bool) -> bool:
        """Whether every rank is ready: the cheapest question there is. Collective."""
        answer = torch.tensor([int(is_ready)], dtype=torch.int32)
        try:
            dist.all_reduce(answer, op=dist.ReduceOp.MIN, group=self._group)
        except RuntimeError as error:
            raise self._lost(what, error) from error
        return bool(answer.item())

    def _describe(self, failure: Exception) -> str:
        if isinstance(failure, CheckpointError):
            return str(failure)
        return f"rank {self._rank}: {type(failure).__name__}: {failure}"

    def _lost(self, what: str, error: Exception) -> LostPeerError:
        return LostPeerError(
            f"{self._place}: {what} failed: {error}; a rank stopped or took longer than {self.timeout_s:g} s: read "
            "its log first"
        )

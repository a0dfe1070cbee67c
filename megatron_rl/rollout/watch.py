"""Steps that wait inside a library and cannot be interrupted, given up once somebody knows that they must fail.

Rank 0 hears from its engines; the other members hear it from rank 0, over the store where the group meets.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import TypeVar

import torch
from torch.distributed import PrefixStore

from megatron_rl.errors import ReshardError
from megatron_rl.platform.device import has_accelerator
from megatron_rl.reshard.transports import Membership
from megatron_rl.reshard.transports.rendezvous import join_store

_POLL_S = 0.2
_KEY = "lost"

T = TypeVar("T")


class GivenUp(ReshardError):
    """Why a step was not waited for."""


class Board:
    """One word for all members of a group: why it cannot go on. Raises ReshardError if nobody keeps the store."""

    def __init__(self, member: Membership) -> None:
        # a connection of its own: on another one, somebody may be waiting
        self._store = PrefixStore("board", join_store(member))

    def tell(self, reason: str) -> None:
        # without a store, whoever reads knows enough
        with suppress(RuntimeError):
            self._store.set(_KEY, reason)

    def read(self) -> str | None:
        """None as long as nothing was told."""
        try:
            return self._store.get(_KEY).decode() if self._store.check([_KEY]) else None
        except RuntimeError as error:
            return f"weight transfer: the store of trainer rank 0 is gone: {error}"


def run_watched(step: Callable[[], T], given_up: Callable[[], str | None]) -> T:
    """`step()`, or GivenUp as soon as `given_up()`, asked several times a second, has a reason.

    The step runs on a thread of its own, which is then left alone with its own time-outs.
    """
    outcome: Future[T] = Future()
    device = torch.cuda.current_device() if has_accelerator() else None

    def run() -> None:
        if device is not None:
            torch.cuda.set_device(device)  # each thread has its own
        try:
            outcome.set_result(step())
        except BaseException as error:  # of whatever kind, it is the caller's
            outcome.set_exception(error)

    threading.Thread(target=run, name="weight-transfer", daemon=True).start()
    while not wait([outcome], timeout=_POLL_S).done:
        if (reason := given_up()) is not None:
            raise GivenUp(reason)
    return outcome.result()


def watch_engines(step: Callable[[], T], engines: Future[object] | None, board: Board) -> T:
    """`step()`, given up by every member once `engines`, which rank 0 alone has, fails."""

    def lost() -> str | None:
        if engines is None:
            return board.read()
        if not engines.done() or (error := engines.exception()) is None:
            return None
        board.tell(str(error))
        return str(error)

    return run_watched(step, lost)

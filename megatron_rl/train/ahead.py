"""Where an iteration's rollouts come from: made on the spot, or while the trainer worked on those of the one before.

With `overlap: one_step` the driving rank has a thread that makes the next batch, with the weights transferred last, as
soon as the trainer takes one. It is over before the next transfer, so that between two iterations no engine works: that
is when weights move, sets are evaluated and checkpoints saved.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol, TypeVar

import torch.distributed as dist

from megatron_rl.errors import EngineError, LostEngineError, MegatronRLError, ReshardError
from megatron_rl.model.background import Background
from megatron_rl.parallel.collectives import broadcast_outcome
from megatron_rl.reshard.placement import Placement
from megatron_rl.train.batch_work import BatchWork, Place, with_staleness
from megatron_rl.train.groups import Collected
from megatron_rl.train.kept_rollouts import Kept
from megatron_rl.train.metrics import Meter

T = TypeVar("T")

_CLOSING_S = 30.0


class Engines(Protocol):
    """What is asked of `LiveEngines`; collective."""

    @property
    def versions(self) -> Sequence[int]:
        """Of the weights transferred so far, in order."""
        ...

    def ask(self, work: Callable[[], T] | None) -> T: ...

    def restart(self, error: LostEngineError | ReshardError) -> None: ...


def check_separate(placement: Placement) -> None:
    """Raise EngineError where a trainer rank and a worker have one GPU: one of them would have to stop."""
    shared = {device for device in _devices(placement, workers=True) if device in _devices(placement)}
    if shared:
        names = ", ".join(f"{device} of machine {node}" for node, device in sorted(shared))
        raise EngineError(
            f"overlap: trainer and engine share GPU {names}, and cannot work at the same time; give the engines GPUs "
            "of their own (engine.hosts, or fewer trainer ranks), or set overlap to none"
        )


def _devices(placement: Placement, *, workers: bool = False) -> set[tuple[int, int]]:
    first = len(placement.trainer_nodes)
    members = range(first, first + len(placement.worker_nodes)) if workers else range(first)
    return {device for member in members if (device := placement.device(member)) is not None}


class RolloutSource:
    """The batch of each iteration, the same on every rank. Every method but `close` is collective."""

    def __init__(
        self,
        engines: Engines,
        new_work: Callable[[Place, Kept | None], BatchWork] | None,
        *,
        is_ahead: bool,
        group: dist.ProcessGroup | None,
        kept: Kept | None = None,
    ) -> None:
        """`new_work`, of what is kept or from the beginning, on the driving rank alone; `kept` is the batch that a
        checkpoint had."""
        self._engines, self._new_work, self._is_ahead, self._group = engines, new_work, is_ahead, group
        self._next = None if kept is None else kept.place
        self._work = new_work(kept.place, kept) if kept and new_work else None
        self._thread: _Ahead | None = None
        self._is_running = False

    @property
    def ready(self) -> BatchWork | None:
        """On the driving rank the batch of the next iteration, if it is there already; None while it is made."""
        return None if self._is_running else self._work

    def take(self, place: Place, *, following: Place | None, meter: Meter) -> Collected:
        """The batch of `place`, trained on with the weights transferred last; that of `following` is begun.

        A batch that was made for another place, since a rule ended its window meanwhile, is dropped and counted.
        """
        dropped = 0
        if self._next != place:
            dropped = self._work.num_groups if self._work is not None else 0
            self._work = self._new_work(place, None) if self._new_work is not None else None
        work, self._work, self._next = self._work, None, None

        def collect(work: BatchWork) -> Collected:
            collected = with_staleness(work(meter.span), self._engines.versions)
            counts = {**collected.counts, **({"dropped_ahead": dropped} if dropped else {})}
            return replace(collected, counts=counts)

        collected = self._engines.ask(partial(collect, work) if work is not None else None)
        if self._is_ahead and following is not None:
            self._next, self._is_running = following, True
            if self._new_work is not None:
                self._work = self._new_work(following, None)
                self._thread = _Ahead(self._work)
        return collected

    def settle(self, meter: Meter, push: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Wait until no engine works. After a loss `push` transfers weights and the rest is made with them.

        Returns metrics: what `push` returned, and on the driving rank the seconds of what was made ahead.
        Whatever ended the thread is raised on every rank where it is meant for the user.
        """
        if not self._is_running:
            return {}
        metrics: dict[str, float] = {}
        try:
            began = time.perf_counter()
            with meter.span("wait"):
                thread = self._thread
                broadcast_outcome(
                    None if thread is None else thread.wait, src=0, group=self._group, shared=MegatronRLError
                )
        except LostEngineError as error:
            self._engines.restart(error)
            with meter.span("sync"):
                metrics |= push()
            work = self._work
            self._engines.ask(None if work is None else lambda: _no_result(work, meter))
        if self._thread is not None:
            metrics |= self._thread.metrics(began)
        self._thread, self._is_running = None, False
        return metrics

    def close(self) -> None:
        """Once engines and graders are closed: what still asks them ends with their errors."""
        if self._thread is not None:
            self._thread.join(_CLOSING_S)


class _Ahead:
    """One batch that a thread makes, with a clock of its own: spans of the trainer's meter do not overlap."""

    def __init__(self, work: BatchWork) -> None:
        self._meter = Meter()
        self._began = time.perf_counter()
        self._ended = self._began
        self._background = Background(lambda: self._make(work), what="rollouts of the next iteration")

    def _make(self, work: BatchWork) -> None:
        try:
            work(self._meter.span)
        finally:
            self._ended = time.perf_counter()

    def wait(self) -> None:
        """Raises what the work raised. It is bounded: every wait for engines and graders is."""
        self._background.result()

    def join(self, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        while not self._background.is_done() and time.monotonic() < end:
            time.sleep(0.01)

    def metrics(self, waited_from: float) -> Mapping[str, float]:
        """Seconds of generation and grading, and of both together before anybody waited for them."""
        times = self._meter.metrics()
        return {
            "overlap/generate_s": times.get("time/generate_s", 0.0),
            "overlap/reward_s": times.get("time/reward_s", 0.0),
            "overlap/hidden_s": min(self._ended, waited_from) - self._began,
        }


def _no_result(work: BatchWork, meter: Meter) -> None:
    work(meter.span)

"""The weight transfer as the RL loop sees it: every rank calls `push`, and all succeed or all raise."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.errors import EngineError, MegatronRLError, ReshardError
from megatron_rl.model.spec import ModelSpec
from megatron_rl.parallel.collectives import all_gather_object, broadcast_object
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.recipe.stages import EngineConfig
from megatron_rl.reshard.execute import Params, send_weights
from megatron_rl.reshard.plan import plan_reshard
from megatron_rl.reshard.transports import LOOPBACK, GlooGroup, make_group, open_store
from megatron_rl.rollout.vllm_engine import VllmEngine


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncResult:
    """One finished transfer: wall-clock seconds on this rank and bytes over all ranks."""

    version: int
    seconds: float
    bytes: int


class WeightSync:
    """Sends the policy's weights to the engines, by the plan of `spec`, `layout` and `config`.

    `params` returns the live parameters of this rank, one mapping per model chunk. `engine` is given on rank
    0 only. `host` is rank 0's address as other trainer ranks reach it, and workers unless it is a loopback address
    (see `replicas.meeting_host`). `dtype` is the engine's; values are cast before they travel. `canary` fills what a
    worker must not read with NaN, at the cost of writing it. `trainers` is the group of trainer ranks to agree in
    (None: the default one); its time-out must exceed what rank 0 waits for its engines.
    """

    def __init__(
        self,
        params: Callable[[], Params],
        *,
        spec: ModelSpec,
        layout: ParallelLayout,
        rank: int,
        engine: VllmEngine | None,
        config: EngineConfig,
        dtype: torch.dtype,
        host: str = LOOPBACK,
        trainers: dist.ProcessGroup | None = None,
        canary: bool = True,
    ) -> None:
        if (engine is not None) != (rank == 0):
            raise EngineError(
                f"weight transfer: the engine belongs to rank 0 alone, rank {rank} was given {engine}"
            )
        self._params, self._rank, self._engine, self._dtype = params, rank, engine, dtype
        self._host, self._port, self._timeout_s, self._canary = (
            host,
            config.port,
            config.request_timeout_s,
            canary,
        )
        self._group: GlooGroup | None = None
        self._trainers = trainers
        self.plan = plan_reshard(
            spec, layout, target_tp=config.tp, replicas=config.replicas, element_bytes=dtype.itemsize
        )

    def push(self, version: int) -> SyncResult:
        """Transfer all weights as `version`. Collective over the trainer ranks.

        Returns once every replica runs on them. Raises ReshardError on all ranks, naming those that failed;
        then the engines refuse to generate until a later push succeeds.
        """
        began = time.monotonic()
        if self._group is None:
            self._connect()
        assert self._group is not None
        staged = self._engine.begin_update(version, timeout_s=self._timeout_s) if self._engine else None
        errors = []
        try:
            send_weights(
                self.plan, self._rank, self._params(), self._group, dtype=self._dtype, version=version
            )
        except MegatronRLError as error:
            errors.append(str(error))
            # closing our end lets the workers fail now instead of waiting for the time-out
            self._group = None
        errors += _failure_of(staged)
        try:
            self._agree(errors)
        except ReshardError:
            # a transfer that stopped half-way leaves bytes in the channel: the next push opens a new one
            self._group = None
            self._abandon()
            raise
        engine = self._engine
        self._agree(_failure_of_call(lambda: engine.finish_update(version)) if engine else [])
        return SyncResult(version=version, seconds=time.monotonic() - began, bytes=self.plan.bytes_moved())

    def disconnect(self) -> None:
        """Leave the group, so that the next push opens a new one. Collective."""
        self._group = None

    def _connect(self) -> None:
        """Open the group: rank 0 listens and tells the others where, then ranks and workers join."""
        store = None
        where: list[Any] = [None, None, None]  # host and port, or why there is none
        if self._rank == 0:
            host = self._engine.meeting_host(self._host) if self._engine else self._host
            try:
                store = open_store(host, self._port, timeout_s=self._timeout_s)
                where = [host, store.port, None]
            except ReshardError as error:
                where = [None, None, str(error)]
        host, port, failure = broadcast_object(where, src=0, group=self._trainers)
        if failure is not None:
            raise ReshardError(failure)
        joined = None
        if self._engine:
            joined = self._engine.begin_join(
                self.plan, host=host, port=port, timeout_s=self._timeout_s, canary=self._canary
            )
        errors = []
        try:
            self._group = make_group(
                host,
                port,
                self._rank,
                self.plan.source.world_size + self.plan.num_workers,
                self._timeout_s,
                store=store,
            )
        except ReshardError as error:
            errors.append(str(error))
        errors += _failure_of(joined)
        try:
            self._agree(errors)
        except ReshardError:
            self._group = None
            raise

    def _abandon(self) -> None:
        """The failure that led here is the one to report, so one more from a dead engine is not."""
        if self._engine:
            _failure_of_call(self._engine.abandon_update)

    def _agree(self, errors: list[str]) -> None:
        """Raise on every rank if any rank has an error."""
        everyone = all_gather_object(errors, self._trainers)
        failed = [f"trainer rank {rank}: {text}" for rank, texts in enumerate(everyone) for text in texts]
        if failed:
            raise ReshardError("\n".join(failed))


def _failure_of(future: Future[Any] | None) -> list[str]:
    return _failure_of_call(future.result) if future is not None else []


def _failure_of_call(call: Callable[[], Any]) -> list[str]:
    try:
        call()
    except MegatronRLError as error:
        return [str(error)]
    return []

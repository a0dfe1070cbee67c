"""The weight transfer as the RL loop sees it: every rank calls `push`, and all succeed or all raise."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from megatron_rl.errors import EngineError, MegatronRLError, ReshardError
from megatron_rl.model.spec import ModelSpec
from megatron_rl.parallel.collectives import all_gather_object, broadcast_object
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.platform.device import has_accelerator
from megatron_rl.platform.spans import Spans
from megatron_rl.recipe.stages import EngineConfig
from megatron_rl.reshard.execute import Params, WeightSender, connect_plan
from megatron_rl.reshard.placement import Placement
from megatron_rl.reshard.plan import plan_reshard
from megatron_rl.reshard.transports import LOOPBACK, Membership, Router, open_store
from megatron_rl.rollout.devices import node_id
from megatron_rl.rollout.vllm_engine import VllmEngine
from megatron_rl.rollout.watch import Board, GivenUp, watch_engines

_PORT_S = 30.0  # a step that was given up holds its group, and a fixed port with it, until it notices
_RETRY_S = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncResult:
    """One finished transfer: wall-clock seconds on this rank and bytes over all ranks."""

    version: int
    seconds: float
    bytes: int


class WeightSync:
    """Sends the policy's weights to the engines, by the plan of `spec`, `layout`, `config` and where all run.

    Making one is collective over the trainer ranks. `params` returns the live parameters of this rank, one
    mapping per model chunk. `engine` is given on rank 0 only. `host` is rank 0's address as other trainer
    ranks reach it, and workers unless it is a loopback address (see `replicas.meeting_host`). `dtype` is the
    engine's; values are cast before they travel. `canary` fills what a worker must not read with NaN, at the
    cost of writing it. `trainers` is the group of trainer ranks to agree in (None: the default one); its
    time-out must exceed what rank 0 waits for its engines. `spans` get one for each bucket that is sent.
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
        spans: Spans | None = None,
    ) -> None:
        if (engine is not None) != (rank == 0):
            raise EngineError(
                f"weight transfer: the engine belongs to rank 0 alone, rank {rank} was given {engine}"
            )
        self._params, self._rank, self._engine, self._dtype = params, rank, engine, dtype
        self._config = config
        self._host, self._trainers, self._canary = host, trainers, canary
        self._port_patience_s = 0.0
        self._spans = spans
        self._router: Router | None = None
        self._board: Board | None = None
        self._sender: WeightSender | None = None
        self.plan = plan_reshard(
            spec,
            layout,
            target_tp=config.tp,
            replicas=config.replicas,
            element_bytes=dtype.itemsize,
            placement=self._find_placement(),
            bucket_bytes=config.bucket_mib * 2**20,
            two_tier=config.two_tier,
        )

    def push(self, version: int) -> SyncResult:
        """Transfer all weights as `version`. Collective over the trainer ranks.

        Returns once every replica runs on them. Raises ReshardError on all ranks, naming those that failed;
        then the engines refuse to generate until a later push succeeds.
        """
        began = time.monotonic()
        if self._sender is None:
            self._connect()
        assert self._sender is not None
        engine, timeout_s = self._engine, self._config.request_timeout_s
        received = engine.begin_update(version, timeout_s=timeout_s) if engine else None
        errors = []
        try:
            self._send(self._sender, version, received)
        except GivenUp:
            # whoever knows why reports it
            self.disconnect()
        except MegatronRLError as error:
            errors.append(str(error))
            self._tell(errors)
            # leaving lets the workers fail now instead of waiting for the time-out
            self.disconnect()
        errors += _failure_of(received)
        self._tell(errors)
        try:
            self._agree(errors)
        except ReshardError:
            # what one member knows of the transfer another may not: the next push opens a new group
            self.disconnect()
            raise
        self._agree(_failure_of_call(lambda: engine.finish_update(version)) if engine else [])
        return SyncResult(version=version, seconds=time.monotonic() - began, bytes=self.plan.bytes_moved())

    def _send(self, sender: WeightSender, version: int, received: Future[Any] | None) -> None:
        """Raises GivenUp as soon as rank 0 hears that an engine failed."""
        assert self._board is not None
        params = self._params()
        watch_engines(lambda: sender.send(params, version=version), received, self._board)

    def _tell(self, errors: Sequence[str]) -> None:
        """Other ranks may still wait for what cannot come any more."""
        if errors and self._board is not None:
            self._board.tell(errors[0])

    def disconnect(self) -> None:
        """Leave the group, so that the next push opens a new one; the other ranks must do the same."""
        if self._router is not None:
            self._router.close()
        self._router = self._sender = self._board = None

    def _connect(self) -> None:
        """Open the group: rank 0 listens and tells the others where, then ranks and workers join."""
        store = None
        timeout_s = self._config.request_timeout_s
        where: list[Any] = [None, None, None]  # host and port, or why there is none
        if self._rank == 0:
            host = self._engine.meeting_host(self._host) if self._engine else self._host
            try:
                store = self._open_store(host, timeout_s)
                where = [host, store.port, None]
            except ReshardError as error:
                where = [None, None, str(error)]
        host, port, failure = broadcast_object(where, src=0, group=self._trainers)
        if failure is not None:
            raise ReshardError(failure)
        joined = None
        if self._engine:
            joined = self._engine.begin_join(
                self.plan, host=host, port=port, timeout_s=timeout_s, canary=self._canary,
                transport=self._config.transport,
            )  # fmt: skip
        member = Membership(
            rank=self._rank,
            num_trainers=self.plan.num_trainers,
            num_workers=self.plan.num_workers,
            host=host,
            port=port,
            timeout_s=timeout_s,
        )
        errors = []
        try:
            self._board = Board(member)
            kind = self._config.transport
            self._router = watch_engines(
                lambda: connect_plan(self.plan, member, kind=kind, store=store), joined, self._board
            )
            self._sender = WeightSender(
                self.plan, self._router, dtype=self._dtype, spans=self._spans
            )
        except GivenUp:
            pass
        except ReshardError as error:
            errors.append(str(error))
        errors += _failure_of(joined)
        try:
            self._agree(errors)
        except ReshardError:
            self.disconnect()
            raise

    def _open_store(self, host: str, timeout_s: float) -> TCPStore:
        deadline, self._port_patience_s = time.monotonic() + self._port_patience_s, _PORT_S
        while True:
            try:
                return open_store(host, self._config.port, timeout_s=timeout_s)
            except ReshardError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(_RETRY_S)

    def _find_placement(self) -> Placement:
        """Ask every trainer rank and every replica where it runs. Collective."""
        own = (node_id(), torch.cuda.current_device() if has_accelerator() else None)
        trainers = all_gather_object(own, self._trainers)
        workers = None
        if self._engine:
            workers = list(zip(self._engine.worker_nodes(), self._engine.worker_devices(), strict=True))
        workers = broadcast_object(workers, src=0, group=self._trainers)
        assert workers is not None
        return placement_of(trainers, workers)

    def _agree(self, errors: list[str]) -> None:
        """Raise on every rank if any rank has an error."""
        everyone = all_gather_object(errors, self._trainers)
        failed = [f"trainer rank {rank}: {text}" for rank, texts in enumerate(everyone) for text in texts]
        if failed:
            raise ReshardError("\n".join(failed))


Place = tuple[str, int | None]  # node, and device among those that the node shows


def placement_of(trainers: Sequence[Place], workers: Sequence[Place]) -> Placement:
    """The placement of trainer ranks and workers, nodes numbered as they first come.

    Raises ReshardError when two trainer ranks name one device: then each sees other devices under that number.
    """
    seen: dict[Place, int] = {}
    for rank, place in enumerate(trainers):
        other = seen.setdefault(place, rank)
        if place[1] is not None and other != rank:
            raise ReshardError(
                f"weight transfer: trainer ranks {other} and {rank} of one machine both name GPU {place[1]}; start all "
                f"ranks of a machine with the same CUDA_VISIBLE_DEVICES, as torchrun does"
            )
    nodes = {node: number for number, node in enumerate(dict.fromkeys(p[0] for p in (*trainers, *workers)))}
    return Placement(
        trainer_nodes=tuple(nodes[node] for node, _ in trainers),
        worker_nodes=tuple(nodes[node] for node, _ in workers),
        trainer_devices=tuple(device for _, device in trainers),
        worker_devices=tuple(device for _, device in workers),
    )


def _failure_of(future: Future[Any] | None) -> list[str]:
    return _failure_of_call(future.result) if future is not None else []


def _failure_of_call(call: Callable[[], Any]) -> list[str]:
    try:
        call()
    except MegatronRLError as error:
        return [str(error)]
    return []

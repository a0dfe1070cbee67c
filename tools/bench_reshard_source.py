"""What a source rank of `bench_reshard.py` does, and what it shares with the engine's side."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import groupby
from math import prod
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from megatron_rl.model.hf_tables import Piece, padded_vocab, source_pieces
from megatron_rl.model.spec import ModelSpec
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.reshard.execute import WeightSender, connect_plan, outgoing
from megatron_rl.reshard.plan import ReshardPlan
from megatron_rl.reshard.transports import LOOPBACK, Membership, TransportKind, open_store
from megatron_rl.reshard.transports.gloo import GlooTransport
from megatron_rl.reshard.transports.rendezvous import join_store
from megatron_rl.reshard.transports.staged import aligned, cut

TIMEOUT_S = 600.0
DTYPE = torch.bfloat16
WEIGHTS = "model.safetensors"
Chunk = list[tuple[str, tuple[int, ...]]]  # names and shapes of tensors that travel together


def member_of(plan: ReshardPlan, rank: int, port: int) -> Membership:
    return Membership(
        rank=rank, num_trainers=plan.num_trainers, num_workers=plan.num_workers, host=LOOPBACK, port=port,
        timeout_s=TIMEOUT_S,
    )  # fmt: skip


def status_bytes(field: str) -> int:
    """`VmHWM` (peak) or `VmRSS` of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def forget_peak() -> int:
    """Start to measure the peak anew; returns what the process has now."""
    Path("/proc/self/clear_refs").write_text("5")
    return status_bytes("VmRSS")


def whole_chunks(plan: ReshardPlan) -> list[Chunk]:
    """Tensors in checkpoint order, as many at a time as fit a bucket, never a part of a layer: what the loader keeps
    until a layer is complete is still there."""
    size = plan.element_bytes
    layers = [
        list(group)
        for _, group in groupby(
            plan.shapes.items(), key=lambda item: item[0].split(".")[2] if ".layers." in item[0] else item[0]
        )
    ]
    chunks: list[Chunk] = [[]]
    for layer in layers:
        own = [(name, shape) for name, shape in layer]
        if chunks[-1] and sum(prod(s) for _, s in chunks[-1] + own) * size > plan.bucket_bytes:
            chunks.append([])
        chunks[-1] += own
    return chunks


def chunk_bytes(chunk: Chunk) -> int:
    return sum(aligned(prod(shape) * DTYPE.itemsize) for _, shape in chunk)


class Source:
    """One source rank: its shards as plain tensors, and each way to send them."""

    def __init__(self, rank: int, plan: ReshardPlan, model: Path) -> None:
        self.rank, self.plan, self.layout = rank, plan, plan.source
        self.tp_rank, _, self.pp_rank = self.layout.coord(rank)
        self.params = read_shards(plan.spec, self.layout, rank, model / WEIGHTS)
        self.routers: dict[str, Any] = {}
        self.senders: dict[str, WeightSender] = {}

    def join_sources(self, port: int) -> None:
        """The groups that trainers have anyway: all ranks, those of a tensor-parallel group, those of a pipeline."""
        store = dist.TCPStore(LOOPBACK, port, self.layout.world_size, self.rank == 0)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.layout.world_size)
        ranks = range(self.layout.world_size)
        self.tp_group = self.pp_group = None
        for index, name in ((2, "tp_group"), (0, "pp_group")):
            for value in sorted({self.layout.coord(r)[index] for r in ranks}):
                group = dist.new_group([r for r in ranks if self.layout.coord(r)[index] == value])
                if self.layout.coord(self.rank)[index] == value:
                    setattr(self, name, group)

    def join(self, kind: TransportKind, port: int, store: Any) -> None:
        router = connect_plan(self.plan, member_of(self.plan, self.rank, port), kind=kind, store=store)
        self.routers[kind] = router
        self.senders[kind] = WeightSender(self.plan, router, dtype=DTYPE)

    def send_plan(self, kind: str, version: int) -> None:
        self.senders[kind].send(self.params, version=version)

    def join_raw(self, port: int, store: Any) -> None:
        member = member_of(self.plan, self.rank, port)
        router = connect_plan(self.plan, member, kind="gloo", store=store)
        self.routers["raw"] = router
        self.raw = [batch for group in outgoing(self.plan, router, limit=self.plan.bucket_bytes).values()
                    for batch in group]  # fmt: skip

    def send_raw(self) -> None:
        """The same bytes in the same messages, whatever they are: nothing is packed or digested."""
        for batch in self.raw:
            batch.send(batch.buffers())
        for outbox in {id(batch.outbox): batch.outbox for batch in self.raw}.values():
            outbox.flush()

    def join_whole(self, port: int, store: Any) -> None:
        self.chunks = whole_chunks(self.plan)
        workers = range(self.plan.num_trainers, self.plan.num_trainers + self.plan.num_workers)
        self.gloo = GlooTransport(member_of(self.plan, self.rank, port), store)
        self.outbox = self.gloo.outbox(max(map(chunk_bytes, self.chunks)), list(workers))
        self.receivers = list(workers)

    def send_whole(self) -> None:
        """Gather every tensor whole on every rank, over both groups; rank 0 sends it to every worker."""
        for chunk in self.chunks:
            views = []
            if self.rank == 0:
                slot = self.outbox.slot()[: chunk_bytes(chunk)]
                views = cut(slot, [prod(shape) * DTYPE.itemsize for _, shape in chunk])
            for index, (name, full) in enumerate(self._gathered(chunk)):
                if views:
                    views[index].view(DTYPE).view(full.shape).copy_(full)
                assert name == chunk[index][0]
            if views:
                self.outbox.send([(slot, worker) for worker in self.receivers])
        if self.rank == 0:
            self.outbox.flush()

    def _gathered(self, chunk: Chunk) -> Iterator[tuple[str, Tensor]]:
        """Each tensor of `chunk`; fused parameters are gathered once for all that stand in them."""
        shards: dict[tuple[int, str], list[Tensor]] = {}
        for name, shape in chunk:
            stage, pieces = self.owner(name)
            full = torch.empty(shape, dtype=DTYPE)
            if stage == self.pp_rank:
                for tp_rank, piece in pieces:
                    key = (piece.chunk, piece.param)
                    if key not in shards:
                        shards[key] = self._gather(self.params[piece.chunk][piece.param], piece)
                    place, part = full, shards[key][tp_rank]
                    if piece.hf_dim is not None and piece.param_dim is not None:
                        place = full.narrow(piece.hf_dim, piece.hf_start, piece.length)
                        part = part.narrow(piece.param_dim, piece.param_start, piece.length)
                    place.copy_(part)
            if self.layout.pp > 1:
                dist.broadcast(full, self.layout.rank(tp=self.tp_rank, dp=0, pp=stage), group=self.pp_group)
            yield name, full

    def _gather(self, shard: Tensor, piece: Piece) -> list[Tensor]:
        if self.layout.tp == 1 or piece.param_dim is None:
            return [shard] * self.layout.tp
        shards = [torch.empty_like(shard) for _ in range(self.layout.tp)]
        dist.all_gather(shards, shard, group=self.tp_group)
        return shards

    def owner(self, name: str) -> tuple[int, list[tuple[int, Piece]]]:
        """The first pipeline stage that holds a tensor, and its pieces there by tensor-parallel rank."""
        if not hasattr(self, "_owners"):
            self._owners: dict[str, tuple[int, list[tuple[int, Piece]]]] = {}
            for stage in range(self.layout.pp):
                found = defaultdict(list)
                for tp_rank in range(self.layout.tp):
                    rank = self.layout.rank(tp=tp_rank, dp=0, pp=stage)
                    for piece in source_pieces(self.plan.spec, self.layout, rank=rank):
                        found[piece.hf_name].append((tp_rank, piece))
                for hf_name, pieces in found.items():
                    self._owners.setdefault(hf_name, (stage, pieces))
        return self._owners[name]


def read_shards(spec: ModelSpec, layout: ParallelLayout, rank: int, file: Path) -> list[dict[str, Tensor]]:
    """The parameters of a rank, per chunk, cut from a HF file as the tables say; padding is zero."""
    pieces = source_pieces(spec, layout, rank=rank)
    ends: dict[tuple[int, str], int] = defaultdict(int)
    for piece in pieces:
        ends[piece.chunk, piece.param] = max(ends[piece.chunk, piece.param], piece.param_start + piece.length)
    chunks: list[dict[str, Tensor]] = [{} for _ in range(layout.vpp)]
    with safe_open(file, framework="pt") as tensors:
        for piece in pieces:
            source, params = tensors.get_slice(piece.hf_name), chunks[piece.chunk]
            if piece.param_dim is None:
                params[piece.param] = source[:].clone()
                continue
            if piece.param not in params:
                shape = source.get_shape()
                shape[piece.param_dim] = ends[piece.chunk, piece.param]
                if "embedding" in piece.param or "output_layer" in piece.param:
                    shape[0] = padded_vocab(spec.vocab_size, layout.tp) // layout.tp
                params[piece.param] = torch.zeros(shape, dtype=DTYPE)
            end = piece.hf_start + piece.length
            part = source[piece.hf_start : end] if piece.hf_dim == 0 else source[:, piece.hf_start : end]
            params[piece.param].narrow(piece.param_dim, piece.param_start, piece.length).copy_(part)
    return chunks


def run_source(rank: int, plan: ReshardPlan, model: Path, pipe: Connection) -> None:
    """Serve the coordinator until it says `end`."""
    torch.set_num_threads(1)
    source, store = Source(rank, plan, model), None

    def open_meeting(_: Any) -> int:
        nonlocal store
        store = open_store(LOOPBACK, 0, timeout_s=TIMEOUT_S)
        return store.port

    serve(
        pipe,
        {
            "open": open_meeting,
            "join_sources": source.join_sources,
            "join": lambda argument: source.join(*argument, store),
            "join_raw": lambda port: source.join_raw(port, store),
            "join_whole": lambda port: source.join_whole(
                port, store or join_store(member_of(plan, rank, port))
            ),
            "plan": lambda argument: source.send_plan(*argument),
            "raw": lambda _: source.send_raw(),
            "whole": lambda _: source.send_whole(),
            "forget_peak": lambda _: [forget_peak()],
            "peak": lambda _: [status_bytes("VmHWM")],
            "cpu": lambda _: [time.process_time()],
        },
    )


def serve(pipe: Connection, commands: dict[str, Callable[[Any], Any]]) -> None:
    """Answer (command, argument) with (result, error) until `end`."""
    pipe.send((None, None))
    while True:
        command, argument = pipe.recv()
        if command == "end":
            return
        try:
            pipe.send((commands[command](argument), None))
        except Exception as error:  # the coordinator tells it
            pipe.send((None, f"{command}: {type(error).__name__}: {error}"))

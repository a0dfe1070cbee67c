"""The reshard plan: which interval goes from which trainer rank to which engine worker. No tensors.

Every process builds the plan alone from the same few numbers and gets the same one (`digest` proves it). A
plan that `plan_reshard` returns is complete: each worker's need is tiled exactly, with no gap and no overlap.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, fields
from functools import cached_property
from math import prod
from typing import Any

from megatron_rl.errors import ReshardError
from megatron_rl.model.hf_tables import Piece, hf_tensors, source_pieces
from megatron_rl.model.spec import ModelSpec
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.reshard.tables import Need, target_needs


@dataclass(frozen=True, slots=True)
class Transfer:
    """One interval of one HF tensor on its way from a trainer rank to an engine worker.

    Elements `hf_start : hf_start + length` along `hf_dim` of the HF tensor are read from `param_start` on
    along `param_dim` of `param` in model chunk `chunk` of rank `source`. `hf_dim` None: the whole tensor,
    `length` 0.
    """

    source: int
    target: int  # worker index: replica * target_tp + tensor-parallel rank of the worker
    hf_name: str
    hf_dim: int | None
    hf_start: int
    length: int
    chunk: int
    param: str
    param_dim: int | None
    param_start: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class ReshardPlan:
    """Transfers from the trainer layout `source` to `replicas` engines of `target_tp` workers, in order.

    The order of `sends` and `recvs` is the order of bytes in the one buffer between a rank and a worker.
    """

    spec: ModelSpec
    source: ParallelLayout
    target_tp: int
    replicas: int
    element_bytes: int
    transfers: tuple[Transfer, ...] = field(repr=False)

    @property
    def num_workers(self) -> int:
        return self.target_tp * self.replicas

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Full shape of every HF tensor, in the order in which engines load them."""
        return hf_tensors(self.spec)

    @cached_property
    def _by_source(self) -> Mapping[int, list[Transfer]]:
        return by_peer(self.transfers, "source")

    @cached_property
    def _by_target(self) -> Mapping[int, list[Transfer]]:
        return by_peer(self.transfers, "target")

    def sends(self, rank: int) -> list[Transfer]:
        """What a trainer rank sends, all workers mixed, in plan order."""
        return self._by_source.get(rank, [])

    def recvs(self, worker: int) -> list[Transfer]:
        """What a worker receives, all sources mixed, in plan order."""
        return self._by_target.get(worker, [])

    def bytes_moved(self) -> int:
        return sum(t.bytes for t in self.transfers)

    def piece_shape(self, transfer: Transfer) -> tuple[int, ...]:
        """Shape of the moved interval: the HF shape, cut along `hf_dim`."""
        shape = list(self.shapes[transfer.hf_name])
        if transfer.hf_dim is not None:
            shape[transfer.hf_dim] = transfer.length
        return tuple(shape)

    def summary(self) -> dict[str, Any]:
        """Sizes and balance; `broadcast_bytes` is what sending whole tensors to every worker would move."""
        sent = {rank: sum(t.bytes for t in self.sends(rank)) for rank in range(self.source.world_size)}
        received = {w: sum(t.bytes for t in self.recvs(w)) for w in range(self.num_workers)}
        model_bytes = sum(prod(shape) for shape in self.shapes.values()) * self.element_bytes
        mean = sum(sent.values()) / len(sent)
        return {
            "source": asdict(self.source),
            "target": {"tp": self.target_tp, "replicas": self.replicas},
            "transfers": len(self.transfers),
            "model_bytes": model_bytes,
            "bytes_moved": self.bytes_moved(),
            "broadcast_bytes": model_bytes * self.num_workers,
            "sent_bytes": sent,
            "received_bytes": received,
            "send_imbalance": max(sent.values()) / mean if mean else 1.0,
        }

    def explain(self) -> str:
        """A short table for a person: totals, then bytes per trainer rank and per worker."""
        facts = self.summary()
        lines = [
            f"reshard plan: {self.source} -> {self.replicas} engine(s) of tp={self.target_tp}",
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

    def to_json(self) -> str:
        """The whole plan, one row per transfer; canonical, so two equal plans are equal texts."""
        return json.dumps(
            {
                **self.inputs(),
                "columns": [f.name for f in fields(Transfer)],
                "transfers": [astuple(t) for t in self.transfers],
            },
            separators=(",", ":"),
        )

    @cached_property
    def _digest(self) -> str:
        return hashlib.blake2b(self.to_json().encode(), digest_size=16).hexdigest()

    def digest(self) -> str:
        """128 bits in hex; equal on every process that built the same plan."""
        return self._digest

    def inputs(self) -> dict[str, Any]:
        """The few numbers from which `plan_from_inputs` builds the same plan elsewhere; JSON-able."""
        return {
            "spec": asdict(self.spec),
            "source": asdict(self.source),
            "target_tp": self.target_tp,
            "replicas": self.replicas,
            "element_bytes": self.element_bytes,
        }


def plan_reshard(
    spec: ModelSpec, source: ParallelLayout, *, target_tp: int, replicas: int, element_bytes: int
) -> ReshardPlan:
    """Plan a full weight transfer, choosing the least loaded holder of each interval (ties: lowest rank).

    `element_bytes` is the width on the wire. Raises LayoutError if the engine cannot hold the model,
    ReshardError naming the tensor if the source does not hold all of it.
    """
    holders = _holders(spec, source)
    shapes = hf_tensors(spec)
    load: dict[int, int] = defaultdict(int)
    transfers: list[Transfer] = []
    for replica in range(replicas):
        for tp_rank in range(target_tp):
            worker = replica * target_tp + tp_rank
            for name, need in target_needs(spec, tp=target_tp, rank=tp_rank).items():
                cover = _cover(name, shapes[name], need, holders[name], load, worker, element_bytes)
                check_exact(name, shapes[name], need, cover, element_bytes)
                transfers += cover
    return ReshardPlan(
        spec=spec,
        source=source,
        target_tp=target_tp,
        replicas=replicas,
        element_bytes=element_bytes,
        transfers=tuple(transfers),
    )


def plan_from_inputs(inputs: Mapping[str, Any], *, digest: str) -> ReshardPlan:
    """Rebuild a plan from `ReshardPlan.inputs`. Raises ReshardError when it is not the plan with `digest`."""
    plan = plan_reshard(
        ModelSpec.from_plain(inputs["spec"]),
        ParallelLayout(**inputs["source"]),
        target_tp=inputs["target_tp"],
        replicas=inputs["replicas"],
        element_bytes=inputs["element_bytes"],
    )
    if plan.digest() != digest:
        raise ReshardError(
            f"reshard plan: this process planned {plan.digest()}, the trainer {digest}; "
            f"both must run the same version of megatron_rl"
        )
    return plan


def check_exact(
    name: str, shape: tuple[int, ...], need: Need, cover: list[Transfer], element_bytes: int
) -> None:
    """Prove that `cover` tiles `need` once. Raises ReshardError naming tensor and first wrong place."""
    dim, start, length = need
    if dim is None:
        if len(cover) != 1 or cover[0].hf_dim is not None:
            raise ReshardError(
                f"reshard plan: {name} is needed whole, but is covered by {len(cover)} transfers"
            )
        expected = prod(shape) * element_bytes
    else:
        cursor = start
        for transfer in sorted(cover, key=lambda t: t.hf_start):
            if transfer.hf_start != cursor or transfer.length <= 0:
                kind = "a gap" if transfer.hf_start > cursor else "an overlap"
                raise ReshardError(
                    f"reshard plan: {kind} in {name} along dim {dim}: index {cursor} expected, "
                    f"the next transfer starts at {transfer.hf_start} from rank {transfer.source}"
                )
            cursor += transfer.length
        if cursor != start + length:
            raise ReshardError(
                f"reshard plan: {name} along dim {dim} ends at {cursor}, needed up to {start + length}"
            )
        expected = length * prod(n for i, n in enumerate(shape) if i != dim) * element_bytes
    moved = sum(t.bytes for t in cover)
    if moved != expected:
        raise ReshardError(f"reshard plan: {name} moves {moved} bytes, its interval has {expected}")


_Holder = tuple[int, Piece]  # (trainer rank, what it holds)


def _holders(spec: ModelSpec, source: ParallelLayout) -> dict[str, dict[tuple[int, int], list[_Holder]]]:
    """HF name -> (start, end) -> every rank's piece of exactly that interval, lowest rank first."""
    table: dict[str, dict[tuple[int, int], list[_Holder]]] = defaultdict(lambda: defaultdict(list))
    for rank in range(source.world_size):
        for piece in source_pieces(spec, source, rank=rank):
            table[piece.hf_name][piece.hf_start, piece.hf_start + piece.length].append((rank, piece))
    return table


def _cover(
    name: str,
    shape: tuple[int, ...],
    need: Need,
    holders: Mapping[tuple[int, int], list[_Holder]],
    load: dict[int, int],
    worker: int,
    element_bytes: int,
) -> list[Transfer]:
    """Walk the need from its start; at each point take the longest stretch from the least loaded holder."""
    dim, cursor, length = need
    if dim is None:
        whole = [holder for group in holders.values() for holder in group]
        return [
            _take(name, prod(shape) * element_bytes, need, _least_loaded(name, whole, load), load, worker)
        ]
    row_bytes = prod(n for i, n in enumerate(shape) if i != dim) * element_bytes
    end, cover = cursor + length, []
    while cursor < end:
        here = [
            h for (lo, hi), group in holders.items() if lo <= cursor < hi for h in group if h[1].hf_dim == dim
        ]
        if not here:
            raise ReshardError(
                f"reshard plan: a gap in {name}: no trainer rank holds index {cursor} along dim {dim}"
            )
        holder = _least_loaded(name, here, load)
        stop = min(end, holder[1].hf_start + holder[1].length)
        cover.append(
            _take(name, (stop - cursor) * row_bytes, (dim, cursor, stop - cursor), holder, load, worker)
        )
        cursor = stop
    return cover


def _least_loaded(name: str, holders: list[_Holder], load: Mapping[int, int]) -> _Holder:
    if not holders:
        raise ReshardError(f"reshard plan: no trainer rank holds {name}")
    return min(holders, key=lambda holder: (load.get(holder[0], 0), holder[0]))


def _take(name: str, size: int, span: Need, holder: _Holder, load: dict[int, int], worker: int) -> Transfer:
    dim, start, length = span
    rank, piece = holder
    load[rank] += size
    offset = start - piece.hf_start if dim is not None else 0
    return Transfer(
        source=rank,
        target=worker,
        hf_name=name,
        hf_dim=dim,
        hf_start=start,
        length=length,
        chunk=piece.chunk,
        param=piece.param,
        param_dim=piece.param_dim,
        param_start=piece.param_start + offset,
        bytes=size,
    )


def by_peer(transfers: Sequence[Transfer], key: str) -> dict[int, list[Transfer]]:
    """Transfers of each `source` or `target` (`key`), lowest first, in the order in which they came."""
    groups: dict[int, list[Transfer]] = defaultdict(list)
    for transfer in transfers:
        groups[getattr(transfer, key)].append(transfer)
    return dict(sorted(groups.items()))


def _mib(size: int) -> str:
    return f"{size / 2**20:,.2f} MiB"

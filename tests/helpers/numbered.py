"""Models whose every element has its own number, so that a wrong one cannot pass for a right one; and a plan
carried out on them without any transport.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_rl.model.hf_tables import hf_tensors, padded_vocab, source_pieces
from megatron_rl.model.spec import ModelSpec
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.reshard.plan import Message, ReshardPlan, Transfer

Array = NDArray[Any]


def numbered_tensors(spec: ModelSpec) -> dict[str, Array]:
    """HF name -> float64 tensor, numbered from 1 over the whole model."""
    tensors, first = {}, 1
    for name, shape in hf_tensors(spec).items():
        tensors[name] = np.arange(first, first + prod(shape), dtype=np.float64).reshape(shape)
        first += prod(shape)
    return tensors


def megatron_params(
    spec: ModelSpec, layout: ParallelLayout, rank: int, hf: Mapping[str, Array]
) -> list[dict[str, Array]]:
    """Parameters of one rank per model chunk, built from the source table; padding rows are -1."""
    pieces = source_pieces(spec, layout, rank=rank)
    sizes: dict[tuple[int, str], int] = {}
    for piece in pieces:
        key, end = (piece.chunk, piece.param), piece.param_start + piece.length
        sizes[key] = max(sizes.get(key, 0), end)
    chunks: list[dict[str, Array]] = [{} for _ in range(layout.vpp)]
    for piece in pieces:
        tensor, params = hf[piece.hf_name], chunks[piece.chunk]
        if piece.hf_dim is None:
            params[piece.param] = tensor.copy()
            continue
        assert piece.param_dim is not None
        if piece.param not in params:
            shape = list(tensor.shape)
            shape[piece.param_dim] = sizes[piece.chunk, piece.param]
            if "embedding" in piece.param or "output_layer" in piece.param:
                shape[0] = padded_vocab(spec.vocab_size, layout.tp) // layout.tp
            params[piece.param] = np.full(shape, -1.0)
        place = cut(params[piece.param], piece.param_dim, piece.param_start, piece.length)
        place[...] = cut(tensor, piece.hf_dim, piece.hf_start, piece.length)
    return chunks


def cut(tensor: Array, dim: int | None, start: int, length: int) -> Array:
    """A view of `start : start + length` along `dim`; None: all of it."""
    if dim is None:
        return tensor
    return tensor[(slice(None),) * dim + (slice(start, start + length),)]


class Delivery:
    """All workers of a plan, receiving bucket by bucket. Elements that did not arrive are NaN.

    `arrivals[worker][name]` counts how often each element was written. `entered[node, name]` counts how often
    each element came into a node from another one.
    """

    def __init__(self, plan: ReshardPlan, params: Sequence[Sequence[Mapping[str, Array]]]) -> None:
        self.plan, self.params, workers = plan, params, range(plan.num_workers)
        self.tensors = [{n: np.full(s, np.nan) for n, s in plan.shapes.items()} for _ in workers]
        self.arrivals = [{n: np.zeros(s, dtype=int) for n, s in plan.shapes.items()} for _ in workers]
        self.entered: dict[tuple[int, str], Array] = {}

    def run(self) -> None:
        """Carry out every message, and check that tensors are whole when the plan says that they are."""
        plan = self.plan
        members = range(plan.num_trainers + plan.num_workers)
        sent = [message for member in members for message in plan.messages_from(member)]
        received = [message for member in members for message in plan.messages_to(member)]
        by_pair = sorted(received, key=lambda message: (message.sender, message.bucket, message.receiver))
        assert sent == by_pair
        finished: list[str] = []
        # what a worker passes on has to come from a trainer rank first
        sent.sort(key=lambda message: (message.bucket, message.sender >= plan.num_trainers))
        for bucket in range(plan.num_buckets):
            while sent and sent[0].bucket == bucket:
                self._deliver(sent.pop(0))
            done = plan.completes(bucket)
            assert list(done) == sorted(done, key=plan.names.index)
            finished += done
            self._check_whole(done)
        assert sorted(finished) == sorted(plan.names)

    def _deliver(self, message: Message) -> None:
        plan = self.plan
        worker = message.receiver - plan.num_trainers
        assert message.bytes == sum(transfer.bytes for transfer in message.transfers)
        node = plan.placement.node(message.receiver)
        is_entering = plan.placement.node(message.sender) != node
        for transfer in message.transfers:
            name, piece = transfer.hf_name, self._piece(message.sender, transfer)
            assert piece.shape == plan.piece_shape(transfer)
            assert piece.size * plan.element_bytes == transfer.bytes
            _place(self.tensors[worker][name], transfer)[...] = piece
            _place(self.arrivals[worker][name], transfer)[...] += 1
            if is_entering:
                count = self.entered.setdefault((node, name), np.zeros(plan.shapes[name], dtype=int))
                _place(count, transfer)[...] += 1

    def _piece(self, sender: int, transfer: Transfer) -> Array:
        """From a trainer rank's parameters, or from what a worker has received itself."""
        if sender >= self.plan.num_trainers:
            piece = _place(self.tensors[sender - self.plan.num_trainers][transfer.hf_name], transfer)
            assert not np.isnan(piece).any(), f"{transfer} is passed on before it arrived"
            return piece
        param = self.params[sender][transfer.chunk][transfer.param]
        return cut(param, transfer.param_dim, transfer.param_start, transfer.length)

    def _check_whole(self, names: Sequence[str]) -> None:
        for worker in range(self.plan.num_workers):
            for name in names:
                need = self.plan.needs[worker % self.plan.target_tp][name]
                arrived = cut(self.tensors[worker][name], *need)
                assert not np.isnan(arrived).any(), f"worker {worker} misses a part of {name}"


def _place(tensor: Array, transfer: Transfer) -> Array:
    return cut(tensor, transfer.hf_dim, transfer.hf_start, transfer.length)

"""Every gradient and every weight of a layout under Hugging Face names, against those of one process.

Each rank compares what it holds with a file that the one process wrote, so no gradient travels and every copy of a
replicated tensor is looked at.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_rl.model.build import unwrapped
from megatron_rl.model.hf_experts import table_name
from megatron_rl.model.hf_tables import hf_tensors, source_pieces
from megatron_rl.model.pieces import Piece
from megatron_rl.parallel.collectives import all_gather_object
from megatron_rl.train.policy import Policy
from megatron_rl.verify.layouts import GRADIENT_FLOOR, TensorGap


def gradients(policy: Policy) -> list[dict[str, Tensor]]:
    """Gradients of each model chunk of this rank under the names of the tables, float32, whole. Collective.

    The distributed optimizer leaves each dp rank with the sums of its own shard alone: the others' are fetched.
    """
    for chunk in policy.ddp_chunks:
        for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                shards = list(bucket.grad_data.chunk(group.size()))
                dist.all_gather(shards, shards[group.rank()].clone(), group=group)
    return [
        {table_name(name): param.main_grad for name, param in unwrapped(chunk).named_parameters()}
        for chunk in policy.ddp_chunks
    ]


def write_reference(policy: Policy, path: Path) -> None:
    """The gradients of one process, which holds every tensor whole, as a safetensors file."""
    tensors = {name: torch.empty(shape) for name, shape in hf_tensors(policy.spec).items()}
    for piece, values in _held(policy, gradients(policy)):
        _narrowed(tensors[piece.hf_name], piece).copy_(values)
    save_file(tensors, path)


def compare_gradients(policy: Policy, path: Path) -> tuple[TensorGap, ...]:
    """The gap of every tensor of the model, over all ranks; the same on every rank. Collective."""
    mine: dict[str, float] = {}
    with safe_open(str(path), framework="pt") as reference:
        names = list(hf_tensors(policy.spec))
        scales = {name: float(reference.get_tensor(name).abs().max()) for name in names}
        for piece, values in _held(policy, gradients(policy)):
            want = _narrowed(reference.get_slice(piece.hf_name), piece)
            gap = float((values.cpu().float() - want).abs().max())
            mine[piece.hf_name] = _larger(mine.get(piece.hf_name, 0.0), gap)
    by_rank = all_gather_object(mine)
    floor = GRADIENT_FLOOR * max(scales.values())
    return tuple(_gap_of(name, by_rank, scale=max(scales[name], floor)) for name in names)


def _gap_of(name: str, by_rank: list[dict[str, float]], *, scale: float) -> TensorGap:
    held = [(_larger(0.0, gap), rank) for rank, of in enumerate(by_rank) if (gap := of.get(name)) is not None]
    # held by no rank: as wrong as can be
    difference, rank = max(held, key=lambda pair: pair[0], default=(math.inf, 0))
    return TensorGap(name=name, difference=difference, scale=scale, rank=rank)


def unequal_replicas(policy: Policy) -> tuple[str, ...]:
    """Tensors of which two ranks, or two ends of a pipeline, hold the same interval with other bytes. Collective."""
    mine: dict[tuple[str, int, int], set[str]] = defaultdict(set)
    for piece, values in _held(policy, policy.named_params()):
        digest = hashlib.sha256(
            values.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
        ).hexdigest()
        mine[piece.hf_name, piece.hf_start, piece.length].add(digest)
    every: dict[tuple[str, int, int], set[str]] = defaultdict(set)
    for of_rank in all_gather_object(dict(mine)):
        for key, digests in of_rank.items():
            every[key] |= digests
    return tuple(sorted({name for (name, _, _), digests in every.items() if len(digests) > 1}))


def _held(policy: Policy, tensors: Sequence[Mapping[str, Tensor]]) -> Iterator[tuple[Piece, Tensor]]:
    """Each interval of a Hugging Face tensor that this rank holds, and its values."""
    for piece in source_pieces(policy.spec, policy.layout, rank=dist.get_rank()):
        values = tensors[piece.chunk][piece.param]
        if piece.param_dim is not None:
            values = values.narrow(piece.param_dim, piece.param_start, piece.length)
        yield piece, values


def _narrowed(tensor: Any, piece: Piece) -> Any:
    """The part of a whole tensor, or of a slice of a file, that the piece describes."""
    if piece.hf_dim is None:
        return tensor[:]
    return tensor[(slice(None),) * piece.hf_dim + (slice(piece.hf_start, piece.hf_start + piece.length),)]


def _larger(a: float, b: float) -> float:
    """The larger one; infinite if `b` is not a number."""
    return math.inf if math.isnan(b) else max(a, b)

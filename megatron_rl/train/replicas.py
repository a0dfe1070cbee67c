"""Parameters that several ranks hold must be the same bits on all of them, and so must their summed gradients.

A gradient that is not summed over the ranks that share a parameter makes its copies drift apart without any error:
the loss still falls. The first optimizer steps show it, so they are checked, by digest and one gather.

What cannot be seen here: a gradient that is not summed over dp. Each element has one owner there, whose update all
ranks receive, so that the copies agree on a wrong value; `megatron-rl verify layout` compares gradients themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
import xxhash
from torch import Tensor

from megatron_rl.errors import TrainingError
from megatron_rl.model.hf_experts import table_name
from megatron_rl.model.hf_tables import Piece, source_pieces
from megatron_rl.model.spec import ModelSpec
from megatron_rl.parallel.collectives import all_gather_object
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.reshard.seal import device_digest

NUM_CHECKED_STEPS = 3  # of a stage, and again after each resume
_NUM_NAMED = 4  # parameters in a message

# what a parameter holds: intervals of Hugging Face tensors and where they stand in it
_Content = tuple[tuple[object, ...], ...]

_CAUSES = {
    "tp": "their gradients were not summed over the tensor-parallel ranks (norms under sequence parallelism, q and k "
    "norms, routers)",
    "pp": "the gradients of the tied embedding and head were not summed over the first and the last pipeline stage",
    "dp": "what each data-parallel rank updated was not gathered by the others",
}


def check_replicas(
    chunks: Sequence[torch.nn.Module], spec: ModelSpec, layout: ParallelLayout, *, rank: int, step: int
) -> None:
    """Compare all copies of every parameter after optimizer step `step` (from 1). Collective over all ranks.

    Gradients are compared too, between the ranks that hold the same sums: those of one dp rank. Raises
    TrainingError on every rank that names parameters, ranks and the likely cause.
    """
    if layout.world_size == 1:
        return
    every = all_gather_object(_digests(chunks, spec, layout, rank))
    for kind, index in (("gradients", 1), ("weights", 0)):
        copies: dict[tuple[object, ...], dict[int, bytes]] = {}
        for holder, digests in enumerate(every):
            owner = layout.coord(holder)[1] if kind == "gradients" else None
            for (_, _, content), pair in zip(_held(spec, layout, holder), digests, strict=True):
                if (digest := pair[index]) is not None:
                    copies.setdefault((content, owner), {})[holder] = digest
        apart = {key: found for key, found in copies.items() if len(set(found.values())) > 1}
        if apart:
            raise TrainingError(_complaint(kind, apart, layout, step=step))


def _digests(
    chunks: Sequence[torch.nn.Module], spec: ModelSpec, layout: ParallelLayout, rank: int
) -> list[tuple[bytes, bytes | None]]:
    """(weight, gradient) of every parameter in the order of `_held`; no gradient of experts, which ep ranks share."""
    params = [{table_name(name): param for name, param in chunk.named_parameters()} for chunk in chunks]
    digests = []
    for chunk, name, _ in _held(spec, layout, rank):
        param = params[chunk][name]
        gradient = None if ".experts." in name else getattr(param, "main_grad", None)
        digests.append((_digest(param.data), None if gradient is None else _digest(gradient)))
    return digests


def _digest(tensor: Tensor) -> bytes:
    """128 bits of the elements; ranks of one run keep them on the same kind of device."""
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if data.device.type == "cpu":
        return xxhash.xxh3_128_digest(data.numpy().data)
    return device_digest(torch.nn.functional.pad(data, (0, -data.numel() % 8))).cpu().numpy().tobytes()


def _held(spec: ModelSpec, layout: ParallelLayout, rank: int) -> tuple[tuple[int, str, _Content], ...]:
    """(chunk, parameter, content) of everything a rank holds; ranks of equal coordinates hold the same."""
    tp_rank, _, pp_rank = layout.coord(rank)
    return _held_at(spec, layout, rank if spec.moe else layout.rank(tp=tp_rank, dp=0, pp=pp_rank))


@lru_cache(maxsize=4096)
def _held_at(spec: ModelSpec, layout: ParallelLayout, rank: int) -> tuple[tuple[int, str, _Content], ...]:
    found: dict[tuple[int, str], list[Piece]] = {}
    for piece in source_pieces(spec, layout, rank=rank):
        found.setdefault((piece.chunk, piece.param), []).append(piece)
    return tuple(
        (chunk, param, tuple(_place(piece) for piece in pieces)) for (chunk, param), pieces in found.items()
    )


def _place(piece: Piece) -> tuple[object, ...]:
    return piece.hf_name, piece.hf_dim, piece.hf_start, piece.length, piece.param_dim, piece.param_start


def _complaint(
    kind: str, apart: dict[tuple[object, ...], dict[int, bytes]], layout: ParallelLayout, *, step: int
) -> str:
    named = [f"{_name(key[0])} (ranks {_sides(found)})" for key, found in list(apart.items())[:_NUM_NAMED]]
    more = f" and {len(apart) - _NUM_NAMED} more" if len(apart) > _NUM_NAMED else ""
    axes = dict.fromkeys(axis for found in apart.values() for axis in _axes(found, layout))
    causes = "; or ".join(_CAUSES[axis] for axis in axes)
    return (
        f"replicas: after optimizer step {step} of the stage the {kind} of {len(apart)} parameters differ between "
        f"ranks that hold copies of them: {', '.join(named)}{more}; most likely {causes}; nothing trained since the "
        "start of this stage can be trusted: run `megatron-rl verify layout` on the recipe, and report this"
    )


def _name(content: object) -> str:
    assert isinstance(content, tuple)
    return " + ".join(dict.fromkeys(place[0] for place in content))


def _sides(found: dict[int, bytes]) -> str:
    """Ranks of equal bits together: `0 2 | 1 3`."""
    sides: dict[bytes, list[int]] = {}
    for rank, digest in found.items():
        sides.setdefault(digest, []).append(rank)
    return " | ".join(" ".join(map(str, ranks)) for ranks in sides.values())


def _axes(found: dict[int, bytes], layout: ParallelLayout) -> Iterator[str]:
    """Axes along which two copies are neighbours (equal in the other two coordinates) and differ."""
    for name, index in (("tp", 0), ("pp", 2), ("dp", 1)):
        lines: dict[tuple[int, ...], set[bytes]] = {}
        for rank, digest in found.items():
            coord = layout.coord(rank)
            lines.setdefault(coord[:index] + coord[index + 1 :], set()).add(digest)
        if any(len(line) > 1 for line in lines.values()):
            yield name

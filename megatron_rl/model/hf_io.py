"""Hugging Face checkpoints straight into model shards and back, through the intervals of `hf_tables`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_rl.errors import ModelError
from megatron_rl.model.build import table_params
from megatron_rl.model.hf_export import MAX_FILE_BYTES, HfWriter
from megatron_rl.model.hf_files import HfCheckpoint, check_redundant_head, check_tensors, open_checkpoint
from megatron_rl.model.hf_tables import (
    EMBEDDING,
    EMBEDDING_PARAM,
    HEAD_PARAM,
    Piece,
    hf_tensors,
    padded_vocab,
    source_pieces,
)
from megatron_rl.model.spec import ModelSpec
from megatron_rl.model.tensor_files import Scratch
from megatron_rl.parallel.collectives import all_gather_object
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.platform import device

VOCAB_PARAMS = (EMBEDDING_PARAM, HEAD_PARAM)


@torch.no_grad()
def load_hf(
    chunks: Sequence[nn.Module],
    spec: ModelSpec,
    layout: ParallelLayout,
    *,
    hf_path: str | Path,
    rank: int,
) -> None:
    """Fill the chunks of one rank from a HF directory, reading only the slices this rank holds.

    Values are cast to the parameters' dtype; padded vocabulary rows become zero. No communication.
    Raises ModelError naming every missing, unexpected or mis-shaped tensor and every missing file at once.
    """
    params = _named_params(chunks)
    pieces = source_pieces(spec, layout, rank=rank)
    tp_rank, _, _ = layout.coord(rank)
    shapes = {key: tuple(param.shape) for key, param in params.items()}
    check_coverage(shapes, pieces, spec, layout, tp_rank=tp_rank)
    with open_checkpoint(hf_path) as checkpoint:
        check_tensors(checkpoint, spec)
        for piece in pieces:
            _load_piece(checkpoint, params[piece.chunk, piece.param], piece, check_head=spec.tied)
    for (_, name), param in params.items():
        if name in VOCAB_PARAMS:
            param[_real_rows(spec, layout.tp, tp_rank) :].zero_()


def _load_piece(checkpoint: HfCheckpoint, param: Tensor, piece: Piece, *, check_head: bool) -> None:
    if check_head and piece.hf_name == EMBEDDING:
        check_redundant_head(checkpoint, start=piece.hf_start, length=piece.length)
    checkpoint.read_into(piece.hf_name, _param_view(param, piece), dim=piece.hf_dim, start=piece.hf_start)


def _param_view(param: Tensor, piece: Piece) -> Tensor:
    """The part of the parameter that the piece describes; shares its memory."""
    if piece.param_dim is None:
        return param
    return param.narrow(piece.param_dim, piece.param_start, piece.length)


def _named_params(chunks: Sequence[nn.Module]) -> dict[tuple[int, str], Tensor]:
    """(chunk, name in the tables) -> parameter, with DDP and mixed-precision wrappers taken off."""
    return {
        (number, name): param
        for number, chunk in enumerate(chunks)
        for name, param in table_params(chunk).items()
    }


def _real_rows(spec: ModelSpec, tp: int, tp_rank: int) -> int:
    """Rows of a vocabulary shard that are tokens; the rest is padding."""
    rows = padded_vocab(spec.vocab_size, tp) // tp
    return min(max(spec.vocab_size - tp_rank * rows, 0), rows)


def check_coverage(
    shapes: dict[tuple[int, str], tuple[int, ...]],
    pieces: Sequence[Piece],
    spec: ModelSpec,
    layout: ParallelLayout,
    *,
    tp_rank: int,
) -> None:
    """Prove that the pieces fill every element of every parameter exactly once, vocabulary padding aside.

    `shapes` are those of the model. Raises ModelError naming each parameter that is not covered.
    """
    by_param: dict[tuple[int, str], list[Piece]] = defaultdict(list)
    for piece in pieces:
        by_param[piece.chunk, piece.param].append(piece)
    hf_shapes = hf_tensors(spec)
    wrong = sorted(
        f"{name} of chunk {chunk}"
        for chunk, name in shapes.keys() ^ by_param.keys()
        if not _is_all_padding(name, spec, layout.tp, tp_rank)
    )
    for (chunk, name), held in by_param.items():
        shape, rows = shapes.get((chunk, name)), _rows_wanted(name, spec, layout.tp, tp_rank)
        if shape is not None and not _is_covered(shape, held, hf_shapes, rows):
            wrong.append(f"{name} {list(shape)} of chunk {chunk}")
    if wrong:
        raise ModelError(
            f"model: the import table does not fit {', '.join(wrong)} of a {spec.family} model; "
            "this megatron-core lays parameters out differently from 0.16.1"
        )


def _is_all_padding(name: str, spec: ModelSpec, tp: int, tp_rank: int) -> bool:
    """A vocabulary shard behind the last token has no piece."""
    return name in VOCAB_PARAMS and _real_rows(spec, tp, tp_rank) == 0


def _rows_wanted(name: str, spec: ModelSpec, tp: int, tp_rank: int) -> int | None:
    """Rows of a vocabulary shard that must be covered; None: all of the parameter."""
    return _real_rows(spec, tp, tp_rank) if name in VOCAB_PARAMS else None


def _is_covered(
    shape: tuple[int, ...], pieces: Sequence[Piece], hf_shapes: dict[str, tuple[int, ...]], rows: int | None
) -> bool:
    first = pieces[0]
    if first.param_dim is None:
        return len(pieces) == 1 and hf_shapes[first.hf_name] == shape
    end = 0
    for piece in sorted(pieces, key=lambda p: p.param_start):
        # same shape across the cut, and each interval starts where the one before ends
        hf_shape, dim = hf_shapes[piece.hf_name], piece.param_dim
        if dim is None or dim != piece.hf_dim or piece.param_start != end:
            return False
        if hf_shape[:dim] + hf_shape[dim + 1 :] != shape[:dim] + shape[dim + 1 :]:
            return False
        end += piece.length
    assert first.param_dim is not None
    return end == (shape[first.param_dim] if rows is None else rows)


@torch.no_grad()
def save_hf(
    chunks: Sequence[nn.Module],
    spec: ModelSpec,
    layout: ParallelLayout,
    *,
    hf_source: str | Path,
    out_dir: str | Path,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write a HF directory from live shards; every rank calls it, rank 0 writes.

    Shards travel point to point from the lowest rank that holds them, tensor by tensor in layer order, so
    rank 0 holds one tensor at a time. Config, tokenizer and generation files come from `hf_source`. A tied head is
    left out. `dtype` None: each tensor keeps the dtype of its parameter.
    `out_dir` appears only when complete. Raises ModelError on every rank when it exists and is not empty, or
    when writing fails.
    """
    params, rank = _named_params(chunks), dist.get_rank()
    held = _held_dtypes(params, source_pieces(spec, layout, rank=rank))
    dtypes = held if dtype is None else dict.fromkeys(held, dtype)
    writer: HfWriter | None = None

    def prepare() -> None:
        nonlocal writer
        writer = HfWriter(
            spec,
            hf_source=Path(hf_source),
            out_dir=Path(out_dir),
            dtypes=dtypes,
            max_file_bytes=max_file_bytes,
        )

    _on_rank_zero(prepare, place=out_dir)
    owners, scratch = _owners(spec, layout), Scratch()
    failure: Exception | None = None
    try:
        for name, shape in hf_tensors(spec).items():
            whole = _gather_tensor(owners[name], shape, params, dtype=held[name], rank=rank, scratch=scratch)
            if writer is None or whole is None or failure is not None:
                continue
            try:
                writer.add(name, whole)
            except OSError as error:
                # the other ranks go on sending, so go on receiving and tell them at the end
                failure = error
    except BaseException:
        # Ctrl-C, or a rank that is gone
        if writer is not None:
            writer.discard()
        raise

    def finish() -> None:
        assert writer is not None
        try:
            if failure is not None:
                raise failure
            writer.finish()
        except BaseException:
            writer.discard()
            raise

    _on_rank_zero(finish, place=out_dir)


def _on_rank_zero(action: Callable[[], None], *, place: str | Path) -> None:
    """Run `action` on rank 0 and tell every rank how it went: a failure must not leave others waiting."""
    outcome: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            action()
        except ModelError as error:
            outcome[0] = str(error)
        except OSError as error:
            outcome[0] = f"{place}: cannot be written: {error}"
    dist.broadcast_object_list(outcome, src=0, device=device.device())
    if outcome[0] is not None:
        raise ModelError(outcome[0])


def _owners(spec: ModelSpec, layout: ParallelLayout) -> dict[str, list[tuple[int, Piece]]]:
    """For each HF tensor the (rank, piece) pairs that make it up, each element once, on the lowest rank."""
    owners: dict[str, list[tuple[int, Piece]]] = {name: [] for name in hf_tensors(spec)}
    seen: set[tuple[str, int]] = set()
    for rank in range(layout.world_size):
        for piece in source_pieces(spec, layout, rank=rank):
            # replicas (every dp rank, norms on every tp rank, the tied embedding on both end stages) start alike
            if (piece.hf_name, piece.hf_start) not in seen:
                seen.add((piece.hf_name, piece.hf_start))
                owners[piece.hf_name].append((rank, piece))
    return owners


def _held_dtypes(params: Mapping[tuple[int, str], Tensor], pieces: Sequence[Piece]) -> dict[str, torch.dtype]:
    """Dtype of every HF tensor as the ranks hold it, the same dictionary on every rank. Collective."""
    mine = {piece.hf_name: params[piece.chunk, piece.param].dtype for piece in pieces}
    return {name: dtype for held in all_gather_object(mine) for name, dtype in held.items()}


def _gather_tensor(
    owners: list[tuple[int, Piece]],
    shape: tuple[int, ...],
    params: dict[tuple[int, str], Tensor],
    *,
    dtype: torch.dtype,
    rank: int,
    scratch: Scratch,
) -> Tensor | None:
    """Rank 0: the whole tensor on CPU, gone with the next call. Other ranks send the pieces they own and get None."""
    if rank != 0:
        for owner, piece in owners:
            if owner == rank:
                dist.send(_param_view(params[piece.chunk, piece.param], piece).contiguous(), dst=0)
        return None
    first, piece = owners[0]
    if len(owners) == 1 and first == 0:
        # nothing to put together, so nothing to copy
        return _param_view(params[piece.chunk, piece.param], piece).cpu()
    whole = scratch.tensor(shape, dtype)
    for owner, piece in owners:
        target = whole if piece.hf_dim is None else whole.narrow(piece.hf_dim, piece.hf_start, piece.length)
        if owner == 0:
            target.copy_(_param_view(params[piece.chunk, piece.param], piece))
            continue
        received = torch.empty(target.shape, dtype=dtype, device=device.device())
        dist.recv(received, src=owner)
        target.copy_(received)
    return whole

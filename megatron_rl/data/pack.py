"""From samples to micro-batches of packed sequences.

Owns the one shift of the project: inputs drop the last token of each sequence, labels and everything aligned
to them drop the first. Which samples share a micro-batch is decided by `data.balance`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from megatron_rl.data.balance import fill_bins
from megatron_rl.data.types import PackedBatch, RlFields, TrainSample
from megatron_rl.errors import DataError

# Valid in every vocabulary; nothing is ever trained on it.
_FILLER_ID = 0


def pack(
    samples: Sequence[TrainSample], *, tokens_per_microbatch: int, pad_multiple: int = 1
) -> list[PackedBatch]:
    """Pack all `samples` into as few micro-batches as best-fit-decreasing finds; deterministic.

    No micro-batch exceeds `tokens_per_microbatch` positions, padding to `pad_multiple` included. Raises
    DataError for a sample that cannot fit one, or has fewer than two tokens.
    """
    bins = fill_bins(
        samples,
        range(len(samples)),
        tokens_per_microbatch=tokens_per_microbatch,
        pad_multiple=pad_multiple,
    )
    return [pack_microbatch(samples, indices, pad_multiple=pad_multiple) for indices in bins]


def pack_microbatch(
    samples: Sequence[TrainSample], indices: Sequence[int], *, pad_multiple: int = 1
) -> PackedBatch:
    """Pack `samples[i] for i in indices` into one micro-batch, in that order; `sample_index` is `indices`.

    No index at all gives the zero-weight `empty_batch` (with `rl` when the samples carry it).
    Raises DataError when some of the samples carry rollout log-probs and others do not.
    """
    with_rl = bool(samples) and samples[0].rollout_logprobs is not None
    if not indices:
        return empty_batch(pad_multiple=pad_multiple, rl=with_rl)
    chosen = [samples[i] for i in indices]
    lengths = [sample.packed_length for sample in chosen]
    padding = -sum(lengths) % pad_multiple
    return PackedBatch(
        input_ids=_concat([s.token_ids[:-1] for s in chosen], torch.int64, fill=_FILLER_ID, padding=padding),
        labels=_concat([s.token_ids[1:] for s in chosen], torch.int64, fill=_FILLER_ID, padding=padding),
        position_ids=_positions(lengths, padding),
        cu_seqlens=_cu_seqlens(lengths, padding),
        loss_mask=_concat([s.loss_mask[1:] for s in chosen], torch.bool, fill=False, padding=padding),
        sample_index=tuple(indices),
        rl=_rl_fields(chosen, padding),
    )


def empty_batch(*, pad_multiple: int = 1, rl: bool = False) -> PackedBatch:
    """A micro-batch of zero weight, for a rank that has fewer micro-batches than the others.

    One short sequence (a multiple of `pad_multiple`) whose mask is all False; it stands for no sample.
    """
    length = max(2, pad_multiple)
    ids = torch.full((length,), _FILLER_ID, dtype=torch.int64)
    zeros = torch.zeros(length)
    fields = RlFields(advantages=zeros, rollout_logprobs=zeros, old_logprobs=zeros, positives=zeros)
    return PackedBatch(
        input_ids=ids,
        labels=ids.clone(),
        position_ids=torch.arange(length),
        cu_seqlens=torch.tensor([0, length], dtype=torch.int32),
        loss_mask=torch.zeros(length, dtype=torch.bool),
        rl=fields if rl else None,
    )


def with_old_logprobs(batch: PackedBatch, logprobs: Tensor) -> PackedBatch:
    """The same micro-batch with `old_logprobs` set to `logprobs` [T] where trained on, 0 elsewhere; float32.

    Raises DataError for a batch without `rl` fields, or a tensor that is not [T].
    """
    fields, kept = _rl_of(batch), _kept(batch, logprobs)
    return replace(batch, rl=replace(fields, old_logprobs=kept))


def with_ref_logprobs(batch: PackedBatch, logprobs: Tensor) -> PackedBatch:
    """The same micro-batch with `ref_logprobs`, as `with_old_logprobs` sets the old ones."""
    fields, kept = _rl_of(batch), _kept(batch, logprobs)
    return replace(batch, rl=replace(fields, ref_logprobs=kept))


def with_correction(batch: PackedBatch, weights: Tensor) -> PackedBatch:
    """The same micro-batch with `correction`, as `with_old_logprobs` sets the old log-probs."""
    fields, kept = _rl_of(batch), _kept(batch, weights)
    return replace(batch, rl=replace(fields, correction=kept))


def with_advantages(batch: PackedBatch, samples: Sequence[TrainSample]) -> PackedBatch:
    """The same micro-batch with the advantages of `samples`, the list that it was packed from."""
    fields, lengths = _rl_of(batch), batch.cu_seqlens.long().diff()
    values = [samples[index].advantage for index in batch.sample_index]
    # padding is one more sequence, and an empty micro-batch is one that stands for no sample
    values += [0.0] * (len(lengths) - len(values))
    spread = torch.tensor(values, dtype=torch.float32).repeat_interleave(lengths)
    return replace(batch, rl=replace(fields, advantages=_kept(batch, spread)))


def _rl_of(batch: PackedBatch) -> RlFields:
    if batch.rl is None:
        raise DataError(
            "pack: got a micro-batch of supervised samples, old log-probs belong to rollouts only"
        )
    return batch.rl


def _kept(batch: PackedBatch, values: Tensor) -> Tensor:
    """Where trained on; 0 elsewhere."""
    _check_per_token(batch, values)
    return values.detach().float().masked_fill(~batch.loss_mask, 0.0)


def unpack_per_token(batch: PackedBatch, values: Tensor) -> list[Tensor]:
    """Split `values` [T] into one [L - 1] tensor per real sequence, in the order of `batch.sample_index`.

    Padding is left out, so an empty micro-batch gives an empty list. Raises DataError for another shape.
    """
    _check_per_token(batch, values)
    bounds = batch.cu_seqlens.tolist()[: len(batch.sample_index) + 1]
    return [values[start:end] for start, end in pairwise(bounds)]


def _check_per_token(batch: PackedBatch, values: Tensor) -> None:
    if values.shape != (batch.num_tokens,):
        raise DataError(
            f"pack: got values of shape {tuple(values.shape)}, need ({batch.num_tokens},), one per label"
        )


def _concat(parts: Sequence[Sequence[float]], dtype: torch.dtype, *, fill: float, padding: int) -> Tensor:
    flat = [value for part in parts for value in part]
    return torch.tensor(flat + [fill] * padding, dtype=dtype)


def _positions(lengths: Sequence[int], padding: int) -> Tensor:
    return torch.cat([torch.arange(n) for n in (*lengths, padding)])


def _cu_seqlens(lengths: Sequence[int], padding: int) -> Tensor:
    every = (*lengths, padding) if padding else tuple(lengths)
    return torch.tensor([0, *accumulate(every)], dtype=torch.int32)


def _rl_fields(chosen: Sequence[TrainSample], padding: int) -> RlFields | None:
    carrying = sum(sample.rollout_logprobs is not None for sample in chosen)
    if not carrying:
        return None
    if carrying < len(chosen):
        raise DataError(
            f"pack: {carrying} of {len(chosen)} samples carry rollout log-probs; "
            "a micro-batch holds either rollouts or supervised samples, not both"
        )
    mask = _concat([s.loss_mask[1:] for s in chosen], torch.float32, fill=0.0, padding=padding)
    logprobs = _concat(
        [(s.rollout_logprobs or ())[1:] for s in chosen], torch.float32, fill=0.0, padding=padding
    )
    # The mask is multiplied in by selection: a stray inf outside the response must not become NaN.
    return RlFields(
        advantages=_per_sample([s.advantage for s in chosen], chosen, padding) * mask,
        rollout_logprobs=logprobs.masked_fill(mask == 0, 0.0),
        old_logprobs=torch.zeros_like(logprobs),
        positives=_per_sample([float(s.is_positive) for s in chosen], chosen, padding) * mask,
    )


def _per_sample(values: Sequence[float], chosen: Sequence[TrainSample], padding: int) -> Tensor:
    spread = [[value] * sample.packed_length for value, sample in zip(values, chosen, strict=True)]
    return _concat(spread, torch.float32, fill=0.0, padding=padding)

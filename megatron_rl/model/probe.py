"""Logits of a distributed checkpoint as megatron-core itself loads and computes them.

An export is held against them: they owe nothing to the tables that the export was made with.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from megatron_rl.data.types import PackedBatch
from megatron_rl.model.build import build_model, packed_seq_params
from megatron_rl.model.checkpoint_tensors import read_sharded
from megatron_rl.model.spec import ModelSpec
from megatron_rl.parallel.groups import destroy_process_groups, init_process_groups
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.platform import device

_TIMEOUT_S = 600.0


@torch.no_grad()
def checkpoint_logits(
    directory: Path,
    spec: ModelSpec,
    sequences: Sequence[Sequence[int]],
    *,
    port: int,
    rounded_to: torch.dtype | None = None,
) -> Tensor:
    """[T, V] float32 of all sequences, one after the other; the model is held in float32 by this process alone.

    `rounded_to` rounds the weights first, as an export to that dtype does. `port`: a free one of this machine.
    Raises CheckpointError for a directory that does not hold this model.
    """
    layout = ParallelLayout()
    init_process_groups(
        layout, rank=0, world_size=1, master_addr="127.0.0.1", master_port=port, timeout_s=_TIMEOUT_S
    )
    try:
        (model,) = build_model(spec, layout, dtype=torch.float32, spec_kind="local")
        loaded, _ = read_sharded({"model": model.sharded_state_dict()}, directory)
        model.load_state_dict(loaded["model"])
        if rounded_to is not None:
            for param in model.parameters():
                param.copy_(param.to(rounded_to))
        batch = _packed(sequences).to(device.device())
        hidden = model.eval()(
            batch.input_ids[None],
            batch.position_ids[None],
            None,
            packed_seq_params=packed_seq_params(batch, dtype=torch.float32),
        )
        return (hidden[:, 0] @ model.head_weight().T)[:, : spec.vocab_size].cpu()
    finally:
        destroy_process_groups()


def _packed(sequences: Sequence[Sequence[int]]) -> PackedBatch:
    tokens = torch.tensor([token for sequence in sequences for token in sequence])
    return PackedBatch(
        input_ids=tokens,
        labels=tokens,
        position_ids=torch.cat([torch.arange(len(sequence)) for sequence in sequences]),
        cu_seqlens=torch.tensor([0, *accumulate(map(len, sequences))], dtype=torch.int32),
        loss_mask=torch.ones_like(tokens, dtype=torch.bool),
    )

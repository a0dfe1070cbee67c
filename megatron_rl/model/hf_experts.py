"""The experts' part of `hf_tables`: what a checkpoint holds of them, and which of it a Megatron rank holds.

Layout facts (megatron-core 0.16.1): expert parallelism gives each ep rank a run of consecutive experts, numbered
from 0 inside the rank; each expert is split over the etp ranks like a dense MLP; the router is replicated. The
parameters of an expert are named in two ways, for experts computed one after the other
(`local_experts.3.linear_fc1.weight`) and in one grouped product of TransformerEngine (`linear_fc1.weight3`). The
tables speak the first; `table_name` translates. The legacy grouped form, one tensor for all experts, is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from megatron_rl.errors import ModelError
from megatron_rl.model.pieces import Piece, whole
from megatron_rl.model.spec import ModelSpec
from megatron_rl.parallel.layout import ParallelLayout

_GROUPED = re.compile(r"(?P<layer>.*\.mlp\.experts\.)(?P<linear>linear_fc[12])\.weight(?P<expert>\d+)")
_LEGACY = re.compile(r".*\.mlp\.experts\.weight[12]")


def table_name(param: str) -> str:
    """The name by which the tables know a parameter of the model.

    Raises ModelError for the legacy grouped layout, whose tensors hold all experts, transposed.
    """
    if _LEGACY.fullmatch(param):
        raise ModelError(
            f"model: parameter {param} is of megatron-core's legacy grouped experts, whose layout is not supported; "
            "build the model with TransformerEngine's grouped experts or with sequential ones"
        )
    if grouped := _GROUPED.fullmatch(param):
        return f"{grouped['layer']}local_experts.{grouped['expert']}.{grouped['linear']}.weight"
    return param


def expert_tensors(spec: ModelSpec, layer: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of the router and of every expert of one layer, which checkpoints store one by one."""
    assert spec.moe is not None
    hidden, ffn = spec.hidden_size, spec.moe.expert_ffn_size
    yield layer + "mlp.gate.weight", (spec.moe.num_experts, hidden)
    for expert in range(spec.moe.num_experts):
        prefix = f"{layer}mlp.experts.{expert}."
        yield prefix + "gate_proj.weight", (ffn, hidden)
        yield prefix + "up_proj.weight", (ffn, hidden)
        yield prefix + "down_proj.weight", (hidden, ffn)


def expert_pieces(
    spec: ModelSpec, layout: ParallelLayout, *, rank: int, chunk: int, hf: str, local: str
) -> Iterator[Piece]:
    """The router and the expert shards of one layer that stand on `rank`."""
    assert spec.moe is not None
    etp_rank, ep_rank, _ = layout.expert_coord(rank)
    yield whole(hf + "mlp.gate.weight", chunk, local + "mlp.router.weight")
    experts, ffn = spec.moe.num_experts // layout.ep, spec.moe.expert_ffn_size // layout.expert_tp
    for index in range(experts):
        yield from mlp_pieces(
            f"{hf}mlp.experts.{ep_rank * experts + index}.",
            f"{local}mlp.experts.local_experts.{index}.",
            chunk=chunk,
            ffn=ffn,
            tp_rank=etp_rank,
        )


def mlp_pieces(hf: str, local: str, *, chunk: int, ffn: int, tp_rank: int) -> Iterator[Piece]:
    """One gated MLP, dense or an expert: `ffn` of its columns stand on each tensor-parallel rank."""
    start = tp_rank * ffn
    fused = local + "linear_fc1.weight"
    yield Piece(hf + "gate_proj.weight", 0, start, ffn, chunk, fused, 0, 0)
    yield Piece(hf + "up_proj.weight", 0, start, ffn, chunk, fused, 0, ffn)
    yield Piece(hf + "down_proj.weight", 1, start, ffn, chunk, local + "linear_fc2.weight", 1, 0)

"""Weights, gradients and optimizer state of one rank, as `Policy` and megatron-core 0.16.1 allocate them.

Weights and gradients each stand in one buffer per kind of parameter (`_ParamAndGradBuffer`): weights in the model's
dtype, gradients in float32 (`grad_reduce_in_fp32`). The distributed optimizer keeps this rank's share of float32
moments, and of float32 masters where weights are bfloat16 (`DistributedOptimizer._build_model_and_main_param_groups`).
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.model.hf_tables import padded_vocab
from megatron_rl.model.spec import ModelSpec
from megatron_rl.parallel.layout import ParallelLayout

FLOAT_BYTES = 4
_MOMENTS = 2
MASTERED_STATES = _MOMENTS + 1  # per weight that is not its own master


@dataclass(frozen=True, kw_only=True, slots=True)
class RankParameters:
    """Parameters of one rank: those that dp ranks hold copies of, and those of experts, which fewer ranks do."""

    dense: int
    experts: int
    vocabulary: (
        int  # of the dense ones, rows of an embedding or of a head times the hidden size; 0 for neither
    )
    largest: int  # the largest single tensor, whose gradient exists beside the buffer for a moment

    @property
    def total(self) -> int:
        return self.dense + self.experts


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedBytes:
    """What a rank holds for as long as a stage lasts."""

    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer


def rank_parameters(spec: ModelSpec, layout: ParallelLayout, *, pp_rank: int) -> RankParameters:
    """Of a rank of pipeline stage `pp_rank`, all its model chunks together; rows of padding count."""
    tp, hidden = layout.tp, spec.hidden_size
    layers = layout.stage_layers(spec.num_layers)[pp_rank]
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    attention = (q + 2 * kv) // tp * (hidden + spec.qkv_bias) + q // tp * hidden
    layer = attention + 2 * hidden + 2 * spec.head_dim * spec.qk_norm
    experts = 0
    if spec.moe is None:
        largest = 2 * spec.ffn_size // tp * hidden
        layer += 3 * spec.ffn_size // tp * hidden
    else:
        columns = spec.moe.expert_ffn_size // layout.expert_tp
        largest = max(2 * columns * hidden, (q + 2 * kv) // tp * hidden)
        layer += spec.moe.num_experts * hidden
        experts = layers * spec.moe.num_experts // layout.ep * 3 * columns * hidden
    vocabulary = padded_vocab(spec.vocab_size, tp) // tp * hidden
    dense = layers * layer
    is_first, is_last = pp_rank == 0, pp_rank == layout.pp - 1
    if is_first:
        dense += vocabulary
    if is_last:
        dense += hidden
        if not (spec.tied and is_first):
            dense += vocabulary
    has_any = is_first or is_last
    return RankParameters(
        dense=dense,
        experts=experts,
        vocabulary=vocabulary if has_any else 0,
        largest=max(largest, vocabulary if has_any else 0),
    )


def load_bytes(params: RankParameters, layout: ParallelLayout, *, element_bytes: int) -> int:
    """Weights while they move into the buffers: all parameters, and the last buffer that is being filled from them."""
    buffer = params.experts or params.dense / layout.vpp
    before = params.total + buffer
    if params.experts:
        # the dense ones come first, when gradients of experts have no buffer yet
        without = params.total + params.dense - FLOAT_BYTES / element_bytes * params.experts
        before = max(before, without)
    return int(before * element_bytes)


def gather_bytes(
    params: RankParameters, spec: ModelSpec, layout: ParallelLayout, *, element_bytes: int
) -> int:
    """A copy of the largest bucket of weights; a tied embedding on several stages has a bucket of its own."""
    dense = params.dense
    if spec.tied and layout.pp > 1:
        dense = max(dense - params.vocabulary, params.vocabulary)
    return max(dense // layout.vpp, params.experts) * element_bytes


def fixed_bytes(params: RankParameters, layout: ParallelLayout, *, element_bytes: int) -> FixedBytes:
    """`element_bytes`: 4 for float32, whose weights are their own masters; 2 for bfloat16."""
    state = FLOAT_BYTES * (_MOMENTS if element_bytes == FLOAT_BYTES else MASTERED_STATES)
    return FixedBytes(
        weights=params.total * element_bytes,
        gradients=params.total * FLOAT_BYTES,
        optimizer=params.dense * state // layout.dp + params.experts * state // layout.expert_dp,
    )

"""Activations: what a layer keeps for its backward pass, and what stands beside that at the worst moment.

Counted tensor by tensor from what our layer spec (`model.layers`) hands to autograd, as Korthikanti et al. (2022,
arXiv 2205.05198) count those of the GPT layer; theirs has dropout, an MLP without a gate and as many kv heads as heads,
so its 34 bytes per token and hidden unit are not these. In flight are the micro-batches of the 1F1B schedules of
Narayanan et al. (2021, arXiv 2104.04473), as `get_pp_rank_microbatches` of megatron-core counts them.

The two devices differ: on CPU the `portable` kernels run and attention works on right-padded copies of queries, keys
and values (`model.attention.padded_attention`); on GPUs attention keeps the packed ones, the MLP keeps its product and
no silu, and no scores exist on either.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.estimate.memory_types import Device
from megatron_rl.model.spec import ModelSpec
from megatron_rl.parallel.layout import ParallelLayout

_FLOAT = 4
# routing of experts: probabilities, indices and maps of a token for each of its experts, measured
_ROUTE_BYTES = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerBytes:
    """Per token of a micro-batch, on one rank; bytes."""

    input: float  # of the layer: all that full recomputation keeps
    kept: float  # for backward, the input included
    backward: float  # gradients beside what is kept, where most of them exist
    forward: float  # without a gradient: what exists at once


def layer_bytes(
    spec: ModelSpec, layout: ParallelLayout, *, element_bytes: int, device: Device, padding: float = 1.0
) -> LayerBytes:
    """One layer. `padding`: tokens of attention on CPU after padding, per real one."""
    e, tp = element_bytes, layout.tp
    shard = tp if layout.sp else 1
    hidden = spec.hidden_size / shard
    q, kv = spec.num_heads * spec.head_dim / tp, max(1, spec.num_kv_heads // tp) * spec.head_dim
    heads = spec.num_heads / tp
    # both norms: input, output, one float per row
    norms = e * 4 * hidden + _FLOAT * 2 / shard
    # cosines and sines of queries and keys; where attention rotates by itself all layers share one set
    shares_angles = device == "cpu" and e == _FLOAT
    rotary = 0 if shares_angles else e * 4 * spec.head_dim
    head_norms = 0.0
    if spec.qk_norm:
        head_norms = e * q + _FLOAT * (heads + kv / spec.head_dim)
    if device == "cpu":
        attention = padding * (e * (2 * q + 2 * kv) + _FLOAT * heads) + e * q
        # keys that a norm looks at are a view of the fused projection, which lives as long
        attention += e * (q + 2 * kv) if spec.qk_norm else 0.0
    else:
        # values are such a view too; the output serves attention and the projection behind it
        attention = e * (q + 2 * kv) + e * (q + kv) + e * q + _FLOAT * heads
    mlp, widest = _mlp(spec, layout, e, device)
    kept = norms + rotary + head_norms + attention + mlp
    return LayerBytes(
        input=e * hidden,
        kept=kept,
        backward=e * (2 * hidden + 2 * widest),
        forward=e
        * (5 * hidden + max((4 if device == "cpu" else 3) * widest, _attention_columns(q, kv, device))),
    )


def _attention_columns(q: float, kv: float, device: Device) -> float:
    """Numbers per token that exist at once in attention without a gradient: projections, turned and padded copies."""
    return 6 * q + 5 * kv if device == "cpu" else 3 * q + 3 * kv


def _mlp(spec: ModelSpec, layout: ParallelLayout, e: int, device: Device) -> tuple[float, float]:
    """Bytes per token that the MLP keeps, and the columns of its activation over which gradients spread."""
    # the product and the activation behind it; portable swiglu keeps silu(gate) as well
    per_column = 4 if device == "cpu" else 3
    if spec.moe is None:
        columns = spec.ffn_size / layout.tp
        return e * per_column * columns, columns
    # with sequence parallelism a token is dispatched by one tp rank; experts see it whole over their etp ranks
    routed = spec.moe.experts_per_token * layout.expert_tp / layout.tp
    columns = spec.moe.expert_ffn_size / layout.expert_tp * routed
    # the activation is multiplied by the router's weight before the second product
    kept = e * ((per_column + 1) * columns + spec.hidden_size * routed)
    return kept + _ROUTE_BYTES * spec.moe.experts_per_token + _FLOAT * spec.moe.num_experts, columns


def in_flight(layout: ParallelLayout, *, pp_rank: int, microbatches: int) -> list[int]:
    """Forwards whose backward is to come, at most, of each model chunk of a stage; first chunk first.

    1F1B: pp - pp_rank. Interleaved: chunks take turns in groups of pp micro-batches, warm-up is as in megatron-core.
    """
    if layout.vpp == 1:
        return [min(microbatches, layout.pp - pp_rank)]
    total = microbatches * layout.vpp
    warm_up = (layout.pp - pp_rank - 1) * 2 + (layout.vpp - 1) * layout.pp
    alive = min(total, warm_up + 1)
    counts = [0] * layout.vpp
    for forward in range(alive):
        counts[forward // layout.pp % layout.vpp] += 1
    return counts

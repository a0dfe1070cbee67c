"""Seconds that engines take to generate: a roofline over the decode steps of the busiest one."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

from megatron_rl.estimate.hardware import Hardware
from megatron_rl.estimate.lengths import Lengths
from megatron_rl.estimate.work import ModelWork

_BF16 = 2
_GROUPS = 128  # sequences of about the same length are followed together


@dataclass(frozen=True, kw_only=True, slots=True)
class Engines:
    """Replicas of one engine over tp GPUs each."""

    work: ModelWork
    hardware: Hardware
    tp: int
    replicas: int
    max_concurrent: int  # sequences decoded at once by one engine
    kv_tokens: float = math.inf  # that the KV cache of one engine holds


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationTime:
    """Seconds of one engine; the parts add up."""

    prefill_s: float
    weights_s: float  # decode: reading weights, or the products where those take longer
    kv_s: float  # decode: reading keys and values
    overhead_s: float  # decode: scheduling, launching, sampling, sums between tp ranks
    steps: float  # decode steps
    mean_batch: float  # sequences decoded at once, over the steps

    @property
    def total_s(self) -> float:
        return self.prefill_s + self.weights_s + self.kv_s + self.overhead_s


def generation_time(
    engines: Engines, *, sequences: float, prompt_tokens: float, lengths: Lengths
) -> GenerationTime:
    """`sequences` responses in all, dealt evenly to the engines.

    A step reads every weight once and the keys and values of all sequences in it, and is bound by that or by its
    products (roofline: Williams et al. 2009; for decoding: Pope et al. 2022, arXiv 2211.05102, section 2). As
    sequences end, waiting ones take their places; then the batch shrinks along the tail of the lengths.
    """
    work, hardware = engines.work, engines.hardware
    own = math.ceil(sequences / engines.replicas)
    held = max(1.0, engines.kv_tokens / (prompt_tokens + lengths.mean))
    places = int(min(engines.max_concurrent, held, own))
    bf16 = hardware.bf16_tflops * 1e12 * hardware.matmul_frac * engines.tp
    context = prompt_tokens * work.attention_flops / 2 * work.num_layers
    prefill = own * prompt_tokens * (_prompt_flops(work, hardware) + context) / bf16
    weights = kv = overhead = steps = steps_by_batch = 0.0
    for segment in _segments(own, places, prompt_tokens, lengths):
        step_weights, step_kv, step_overhead = _step_s(engines, segment.batch, segment.context)
        weights += segment.steps * step_weights
        kv += segment.steps * step_kv
        overhead += segment.steps * step_overhead
        steps += segment.steps
        steps_by_batch += segment.steps * segment.batch
    return GenerationTime(
        prefill_s=prefill,
        weights_s=weights,
        kv_s=kv,
        overhead_s=overhead,
        steps=steps,
        mean_batch=steps_by_batch / steps,
    )


def _prompt_flops(work: ModelWork, hardware: Hardware) -> float:
    layers = work.dense_flops + work.expert_flops / hardware.expert_frac
    return layers * work.num_layers


def _step_s(engines: Engines, batch: float, context: float) -> tuple[float, float, float]:
    """(weights or products, keys and values, the rest) of one decode step; `context` positions of all sequences."""
    work, hardware = engines.work, engines.hardware
    hbm = hardware.hbm_gb_per_s * 1e9 * hardware.hbm_frac * engines.tp
    layer = work.dense_weights + work.expert_weights * work.experts_met(batch)
    read_s = (layer * work.num_layers + work.head_weights) * _BF16 / hbm
    product_rate = hardware.bf16_tflops * 1e12 * hardware.matmul_frac * engines.tp
    products_s = batch * work.model_flops / product_rate
    kv_s = context * work.kv_elements * work.num_layers * _BF16 / hbm
    overhead = hardware.decode_step_ms / 1e3 + batch * hardware.decode_sequence_us / 1e6
    if engines.tp > 1:
        # two sums per layer; a ring carries each twice, but for its own share
        sent = 2 * batch * work.hidden_size * _BF16 * (engines.tp - 1) / engines.tp
        wire = hardware.link_gb_per_s * 1e9 * hardware.link_frac
        if engines.tp > hardware.gpus_per_node:
            wire = hardware.network_gb_per_s * 1e9 * hardware.network_frac
        overhead += 2 * work.num_layers * (hardware.collective_us / 1e6 + sent / wire)
    return max(read_s, products_s), kv_s, overhead


@dataclass(frozen=True, slots=True)
class _Segment:
    """Decode steps between two endings: how many, how many sequences, their positions in all (in the middle)."""

    steps: float
    batch: float
    context: float


def _segments(own: int, places: int, prompt_tokens: float, lengths: Lengths) -> list[_Segment]:
    """The steps of one engine with `own` sequences and `places` for them at once."""
    count = min(own, _GROUPS)
    weight = own / count
    room = max(1, round(places / weight))
    ascending = lengths.quantiles(count)
    # an order without a trend, the same every time: the golden ratio's multiples, sorted
    golden = (math.sqrt(5) - 1) / 2
    order = sorted(range(count), key=lambda i: i * golden % 1.0)
    waiting = [ascending[i] for i in order]
    now = 0.0
    active: list[tuple[float, float]] = []  # (when it ends, when it began), in steps
    segments = []
    while waiting or active:
        while waiting and len(active) < room:
            heapq.heappush(active, (now + waiting.pop(), now))
        end = active[0][0]
        middle = (now + end) / 2
        positions = sum(prompt_tokens + middle - began for _, began in active)
        segments.append(_Segment(end - now, len(active) * weight, positions * weight))
        now = end
        while active and active[0][0] <= now:
            heapq.heappop(active)
    return segments

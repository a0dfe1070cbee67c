"""Seconds of passes over tokens by the trainer: forward alone, or forward and backward with an optimizer step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_rl.estimate.hardware import Hardware
from megatron_rl.estimate.work import ModelWork
from megatron_rl.parallel.layout import ParallelLayout

_BF16 = 2  # bytes of an activation or a weight in use


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """How often a pass does what one forward does.

    Backward is two forwards of matrix products and 2.5 of attention (FlashAttention-2, arXiv 2307.08691, section
    4.1: it computes the scores again). Full recompute adds one more forward of the layers. Sequence parallelism
    gathers its inputs once more on the way back (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2).
    """

    products: float
    attention: float
    moved: float
    head: float
    exchanges: float  # of activations between tp and expert ranks
    gathers_again: bool = False


FORWARD = Pass(products=1, attention=1, moved=1, head=1, exchanges=1)
TRAIN = Pass(products=3, attention=3.5, moved=3, head=3, exchanges=2, gathers_again=True)
TRAIN_RECOMPUTED = Pass(products=4, attention=4.5, moved=4, head=3, exchanges=3, gathers_again=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trainer:
    """Where passes run."""

    work: ModelWork
    layout: ParallelLayout
    hardware: Hardware
    microbatch_tokens: int  # of one dp rank
    fp8: bool = False  # matrix products of the layers
    hides_reduction: bool = False  # gradients and weights travel between dp ranks while layers are computed


@dataclass(frozen=True, kw_only=True, slots=True)
class PassTime:
    """Seconds of one pass; the parts add up."""

    compute_s: float  # products, attention, element by element, of the slowest pipeline stage
    exchange_s: float  # of activations, as far as computing does not hide it
    bubble_s: float

    @property
    def total_s(self) -> float:
        return self.compute_s + self.exchange_s + self.bubble_s


def pass_time(trainer: Trainer, cost: Pass, *, tokens: float, context: float) -> PassTime:
    """One pass over `tokens` tokens of all dp ranks, each of which attends to `context` positions on average.

    A stage does m micro-batches one after the other and idles (pp - 1) / vpp of them at the ends (Narayanan et al.
    2021, arXiv 2104.04473, section 2.2).
    """
    layout = trainer.layout
    own = tokens / layout.dp
    num_micro = max(1, math.ceil(own / trainer.microbatch_tokens))
    layer_s, head_s = _compute_s(trainer, cost, context)
    layers = layout.stage_layers(trainer.work.num_layers)
    stages = [count * layer_s for count in layers]
    stages[-1] += head_s
    compute = max(stages) * own / layout.tp
    exchange = _exchange_s(trainer, cost) * max(layers) * own
    if layout.pp > 1:
        exchange += _stage_border_s(trainer, cost) * own
    bubble = (compute + exchange) / num_micro * (layout.pp - 1) / layout.vpp
    return PassTime(compute_s=compute, exchange_s=exchange, bubble_s=bubble)


def _compute_s(trainer: Trainer, cost: Pass, context: float) -> tuple[float, float]:
    """(one layer, the head): seconds of one GPU for one token, at the shares of the peaks that software reaches."""
    work, hardware = trainer.work, trainer.hardware
    bf16 = hardware.bf16_tflops * 1e12
    dense = (hardware.fp8_tflops * 1e12 if trainer.fp8 else bf16) * hardware.matmul_frac
    # FP8 has not made these smaller products faster in what is published
    expert = bf16 * hardware.matmul_frac * hardware.expert_frac
    layer = cost.products * (work.dense_flops / dense + work.expert_flops / expert)
    layer += cost.attention * work.attention_flops * context / (bf16 * hardware.attention_frac)
    moved_bytes = cost.moved * work.moved_elements * _BF16
    layer += moved_bytes / (hardware.hbm_gb_per_s * 1e9 * hardware.hbm_frac)
    return layer, cost.head * work.head_flops / (bf16 * hardware.matmul_frac)


def _exchange_s(trainer: Trainer, cost: Pass) -> float:
    """Seconds per token and layer between tp ranks, and between expert ranks.

    Tensor parallelism sums twice in a forward: two all-reduces, or with sequence parallelism as many bytes in two
    gathers and two scatters: 4 * hidden * (tp - 1) / tp elements per rank on a ring (Shoeybi et al. 2019, arXiv
    1909.08053; Korthikanti et al. 2022). Experts: to them and back, of the tokens that a rank holds.
    """
    work, layout, hardware = trainer.work, trainer.layout, trainer.hardware
    visible = 1 - hardware.hidden_frac
    per_forward = 4 * work.hidden_size * _BF16 * (layout.tp - 1) / layout.tp
    times = cost.exchanges + (0.5 if layout.sp and cost.gathers_again else 0)
    seconds = times * per_forward / bandwidth(hardware, layout.tp)
    if layout.ep > 1:
        routed = 2 * work.routed_elements * _BF16 * (layout.ep - 1) / layout.ep / layout.tp
        seconds += cost.exchanges * routed / bandwidth(hardware, layout.ep * layout.expert_tp)
    return seconds * visible


def _stage_border_s(trainer: Trainer, cost: Pass) -> float:
    """Seconds per token to hand activations, and gradients back, to the next stage, once for each of its chunks."""
    layout, hardware = trainer.layout, trainer.hardware
    ways = 2 if cost.gathers_again else 1
    part = trainer.work.hidden_size * _BF16 * layout.vpp * ways / (layout.tp if layout.sp else 1)
    return part / bandwidth(hardware, layout.tp * layout.dp * 2) * (1 - hardware.hidden_frac)


def update_s(trainer: Trainer) -> float:
    """Seconds of one optimizer step: gradients reduced, the own share of Adam, weights gathered.

    The distributed optimizer moves (dp - 1) / dp of 4 bytes of gradient and 2 of weight per parameter of the rank
    (Rajbhandari et al. 2020, arXiv 1910.02054, section 7), and reads or writes 34 bytes of its own share: gradient
    twice, for its norm and its use, master weight and two moments both ways, the weight once.
    """
    work, layout, hardware = trainer.work, trainer.layout, trainer.hardware
    dense = (work.dense_weights * work.num_layers) / (layout.tp * layout.pp)
    ends = max(work.head_weights, work.embedding_weights) / layout.tp
    if layout.pp == 1:
        ends = (work.head_weights + work.embedding_weights) / layout.tp
    experts = (
        work.expert_weights * work.num_experts * work.num_layers / (layout.pp * layout.ep * layout.expert_tp)
    )
    seconds = 0.0
    for weights, replicas in ((dense + ends, layout.dp), (experts, layout.expert_dp)):
        moved = weights * 6 * (replicas - 1) / replicas
        reduction = moved / bandwidth(hardware, layout.tp * layout.dp)
        seconds += reduction * ((1 - hardware.hidden_frac) if trainer.hides_reduction else 1)
        seconds += weights / replicas * 34 / (hardware.hbm_gb_per_s * 1e9 * hardware.hbm_frac)
    return seconds


def bandwidth(hardware: Hardware, num_ranks: int) -> float:
    """Bytes per second that one rank sends in a collective over so many neighbouring ranks."""
    if num_ranks <= hardware.gpus_per_node:
        return hardware.link_gb_per_s * 1e9 * hardware.link_frac
    return hardware.network_gb_per_s * 1e9 * hardware.network_frac

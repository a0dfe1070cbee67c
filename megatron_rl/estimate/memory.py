"""Memory of every phase of a stage on every pipeline stage's ranks, in bytes, before anything starts.

`stage_memory` adds up what the other modules of this name count; each says which code or paper its formula follows.
README.md compares the sums with measured peaks.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.estimate.memory_activations import LayerBytes, in_flight, layer_bytes
from megatron_rl.estimate.memory_engine import engine_memory
from megatron_rl.estimate.memory_head import logprob_head_bytes, loss_head_bytes
from megatron_rl.estimate.memory_types import GIB, Device, PhaseMemory, RankMemory, StageMemory
from megatron_rl.estimate.memory_weights import (
    FLOAT_BYTES,
    MASTERED_STATES,
    FixedBytes,
    RankParameters,
    fixed_bytes,
    gather_bytes,
    load_bytes,
    rank_parameters,
)
from megatron_rl.model.spec import ModelSpec
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.recipe.resolve import longest_sample, samples_per_step
from megatron_rl.recipe.schema import ModelConfig
from megatron_rl.recipe.stages import RlStage, Stage
from megatron_rl.recipe.transfer import RANKS_PER_NODE, engine_ranks, is_colocated

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}

# per token of an optimizer step on its dp rank: ids, labels, positions, mask, and the float32 fields of RL
_BATCH_BYTES, _RL_BYTES = 25, 24
# allowances, not measured here: CUDA context and libraries; buffers of NCCL's communicators; what the caching
# allocator cannot hand out, as a share of what comes and goes
_CONTEXT_BYTES, _NCCL_BYTES, _FRAGMENTED = 3 * GIB // 4, GIB, 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainShape:
    """What decides the memory of the trainer, of a recipe's stage or of a measurement."""

    spec: ModelSpec
    layout: ParallelLayout
    element_bytes: int
    recompute: str  # none | full
    device: Device
    tokens: int  # of a micro-batch, on one dp rank
    microbatches: int  # of an optimizer step, on one dp rank
    # tokens of a micro-batch that are trained on; without the prompts, so less than all, but nothing says how many
    trained: int
    is_rl: bool = False
    padding: float = (
        4 / 3
    )  # of attention on CPU: lengths spread evenly over a class, of which the longest is 1


def train_shape(
    stage: Stage, model: ModelConfig, spec: ModelSpec, layout: ParallelLayout, *, device: Device
) -> TrainShape:
    """Full micro-batches, as many as samples of the greatest length need."""
    is_rl = isinstance(stage, RlStage)
    budget = stage.tokens_per_microbatch
    tokens = budget // layout.tp * layout.tp if layout.sp else budget
    per_dp = max(1, samples_per_step(stage) // layout.dp)
    return TrainShape(
        spec=spec,
        layout=layout,
        element_bytes=ELEMENT_BYTES[model.dtype],
        recompute=model.recompute,
        device=device,
        tokens=tokens,
        trained=tokens - 1,
        microbatches=-(-per_dp // max(1, budget // longest_sample(stage))),
        is_rl=is_rl,
    )


def stage_memory(
    stage: Stage,
    model: ModelConfig,
    spec: ModelSpec,
    layout: ParallelLayout,
    *,
    device: Device = "gpu",
    sleeps: bool = False,
    gpus_per_node: int = RANKS_PER_NODE,
) -> StageMemory:
    """Of one stage in one layout that splits the model. `sleeps`: engines and trainer take turns on shared GPUs."""
    shape = train_shape(stage, model, spec, layout, device=device)
    engine, shared = None, frozenset[int]()
    if isinstance(stage, RlStage) and device == "gpu":
        engine = engine_memory(spec, stage.engine, element_bytes=shape.element_bytes)
        shared = engine_ranks(stage, layout, gpus_per_node=gpus_per_node)
    return StageMemory(
        kind=stage.kind,
        tokens_per_microbatch=shape.tokens,
        longest=longest_sample(stage),
        ranks=[rank_memory(shape, pp_rank=pp_rank, stage=stage) for pp_rank in range(layout.pp)],
        engine=engine,
        shared_pp=frozenset(rank // (layout.tp * layout.dp) for rank in shared),
        sleeps=sleeps,
    )


def takes_turns(stage: Stage) -> bool:
    """Whether engines on the trainer's GPUs give their memory back while it works."""
    return isinstance(stage, RlStage) and is_colocated(stage) and stage.engine.sleep


def rank_memory(shape: TrainShape, *, pp_rank: int, stage: Stage | None = None) -> RankMemory:
    """Of the ranks of one pipeline stage. Without `stage`: the phases of training alone."""
    params = rank_parameters(shape.spec, shape.layout, pp_rank=pp_rank)
    fixed = fixed_bytes(params, shape.layout, element_bytes=shape.element_bytes)
    held = _held_bytes(shape, pp_rank)
    layer = layer_bytes(
        shape.spec,
        shape.layout,
        element_bytes=shape.element_bytes,
        device=shape.device,
        padding=shape.padding,
    )
    base = _named(fixed) | {"batches": _batch_bytes(shape)}
    kept, working = _train_bytes(shape, layer, params, pp_rank)
    copies = 0
    if shape.device == "cpu":
        # gloo sums gradients from a copy of them, and gathers updated weights into a buffer of its own
        working = max(working, fixed.gradients - kept)
        copies = gather_bytes(params, shape.spec, shape.layout, element_bytes=shape.element_bytes)
    loading = load_bytes(params, shape.layout, element_bytes=shape.element_bytes)
    phases = {
        "load": max(
            {"weights": loading, "gradients": fixed.gradients},
            _starting(shape, fixed, params),
            key=lambda parts: sum(parts.values()),
        ),
        "logprob": base | {"held": held // 2, "working": _logprob_bytes(shape, layer, pp_rank)},
        "train": base | {"held": held, "activations": kept, "working": working},
        "step": base | {"held": held, "working": copies},
        "save": _named(fixed),
    }
    if isinstance(stage, RlStage):
        idle = _named(fixed) | {"held": held}
        phases |= {"generate": idle, "sync": idle | {"buckets": 2 * stage.engine.bucket_mib * 2**20}}
    elif stage is not None:
        del phases["logprob"]
    order = ("load", "generate", "logprob", "train", "step", "sync", "save")
    return RankMemory(
        pp_rank=pp_rank,
        phases=[
            PhaseMemory(phase=name, parts=_with_reserve(phases[name], shape))
            for name in order
            if name in phases
        ],
        host_bytes=_host_bytes(stage, fixed),
    )


def _starting(shape: TrainShape, fixed: FixedBytes, params: RankParameters) -> dict[str, int]:
    """A stage begins: masters of bfloat16 weights are made, each by way of a copy of this rank's share."""
    if shape.element_bytes == FLOAT_BYTES:
        return {}
    copy = min(params.largest, params.total // shape.layout.dp) * shape.element_bytes
    masters = fixed.optimizer // MASTERED_STATES
    return {"weights": fixed.weights, "gradients": fixed.gradients, "optimizer": masters, "working": copy}


def _named(fixed: FixedBytes) -> dict[str, int]:
    return {"weights": fixed.weights, "gradients": fixed.gradients, "optimizer": fixed.optimizer}


def _batch_bytes(shape: TrainShape) -> int:
    """All micro-batches of an optimizer step are on the device (`Policy._run_schedule`)."""
    return shape.microbatches * shape.tokens * (_BATCH_BYTES + _RL_BYTES * shape.is_rl)


def _held_bytes(shape: TrainShape, pp_rank: int) -> int:
    """What stays between steps: the gather buffer of sequence parallelism (`GlobalMemoryBuffer`), and on pipeline
    stages behind the first the last input of each chunk and its gradient, which the model keeps."""
    layout, hidden = shape.layout, shape.element_bytes * shape.tokens * shape.spec.hidden_size
    own = hidden // layout.tp if layout.sp else hidden
    behind = layout.vpp - (pp_rank == 0)
    return (hidden if layout.sp else 0) + (2 * own * behind if layout.pp > 1 else 0)


def _train_bytes(
    shape: TrainShape, layer: LayerBytes, params: RankParameters, pp_rank: int
) -> tuple[int, int]:
    """Activations kept for backward at the busiest moment, and what exists beside them then."""
    layout, tokens = shape.layout, shape.tokens
    alive = in_flight(layout, pp_rank=pp_rank, microbatches=shape.microbatches)
    per_chunk = layout.stage_layers(shape.spec.num_layers)[pp_rank] // layout.vpp
    of_layer = layer.input if shape.recompute == "full" else layer.kept
    kept = int(sum(alive) * per_chunk * of_layer * tokens)
    # the last pass of a layer: its gradients; computed anew first where only its input was kept
    gradients = int(layer.backward * tokens)
    largest = shape.element_bytes * params.largest
    backward = max(gradients, largest + int((2 * layer.input + layer.backward - layer.kept) * tokens))
    if shape.recompute == "full":
        backward += int(layer.kept * tokens)
    if pp_rank < layout.pp - 1:
        return kept, backward
    shard = layout.tp if layout.sp else 1
    hidden = shape.element_bytes * tokens * shape.spec.hidden_size // shard
    head = loss_head_bytes(
        shape.spec,
        layout,
        tokens=tokens,
        trained=shape.trained,
        element_bytes=shape.element_bytes,
        device=shape.device,
    )
    # input and output of the final norm
    return kept, max(2 * hidden + head, backward)


def _logprob_bytes(shape: TrainShape, layer: LayerBytes, pp_rank: int) -> int:
    layout, tokens = shape.layout, shape.tokens
    forward = int(layer.forward * tokens)
    if pp_rank < layout.pp - 1:
        return forward
    shard = layout.tp if layout.sp else 1
    hidden = shape.element_bytes * tokens * shape.spec.hidden_size // shard
    head = logprob_head_bytes(
        shape.spec, layout, tokens=tokens, element_bytes=shape.element_bytes, device=shape.device
    )
    return max(forward, 2 * hidden + head)


def _with_reserve(parts: dict[str, int], shape: TrainShape) -> dict[str, int]:
    reserve = 0
    if shape.device == "gpu":
        comes_and_goes = parts.get("activations", 0) + parts.get("working", 0)
        reserve = _CONTEXT_BYTES + int(_FRAGMENTED * comes_and_goes)
        reserve += _NCCL_BYTES if shape.layout.world_size > 1 else 0
    return {name: size for name, size in (parts | {"reserve": reserve}).items() if size}


def _host_bytes(stage: Stage | None, fixed: FixedBytes) -> int:
    """The reference policy: its weights, and the trained ones while it scores (`train.reference`)."""
    has_reference = isinstance(stage, RlStage) and stage.algorithm.kl is not None
    return 2 * fixed.weights if has_reference else 0

"""What one worker of a vLLM engine holds, from the same tables that weight transfers are planned by."""

from __future__ import annotations

import math
from functools import lru_cache

from megatron_rl.estimate.memory_types import GIB, EngineMemory
from megatron_rl.model.hf_tables import hf_tensors
from megatron_rl.model.spec import ModelSpec
from megatron_rl.recipe.stages import EngineConfig
from megatron_rl.reshard.buckets import need_bytes
from megatron_rl.reshard.tables import target_needs

# CUDA context, workspaces and captured graphs of a worker: an allowance, not measured here
_RUNTIME_BYTES = 3 * GIB // 2
# vLLM's default for offline use on large GPUs (0.32): tokens of one step, whose activations it sets aside
_STEP_TOKENS = 16384
_SAMPLER_COPIES, _FLOAT = 3, 4  # logits of one step, in float32
_BUCKETS = 2  # see reshard/receive.py


@lru_cache(maxsize=64)
def engine_memory(spec: ModelSpec, engine: EngineConfig, *, element_bytes: int) -> EngineMemory:
    """`engine.tp` must be able to hold the model (`check_target`)."""
    shapes = hf_tensors(spec)
    needs = target_needs(spec, tp=engine.tp, rank=0)
    weights = sum(need_bytes(shape, needs[name], element_bytes) for name, shape in shapes.items())
    heads = max(1, spec.num_kv_heads // engine.tp)
    ffn = spec.ffn_size if spec.moe is None else spec.moe.expert_ffn_size * spec.moe.experts_per_token
    step = _STEP_TOKENS * (2 * spec.hidden_size + 3 * ffn // engine.tp) * element_bytes
    sampler = _SAMPLER_COPIES * engine.max_concurrent * spec.vocab_size * _FLOAT
    return EngineMemory(
        weights=weights,
        kv_token_bytes=2 * spec.num_layers * heads * spec.head_dim * element_bytes,
        overhead=_RUNTIME_BYTES + step + sampler,
        sync=_BUCKETS * engine.bucket_mib * 2**20 + _reload_bytes(spec, element_bytes),
    )


def _reload_bytes(spec: ModelSpec, element_bytes: int) -> int:
    """Tensors arrive in full shape and vLLM keeps those of a layer until it has all: see weight_receiver.py."""
    layers: dict[str, int] = {}
    for name, shape in hf_tensors(spec).items():
        parts = name.split(".")
        unit = ".".join(parts[:3]) if "layers" in parts else name
        layers[unit] = layers.get(unit, 0) + math.prod(shape) * element_bytes
    return max(layers.values())

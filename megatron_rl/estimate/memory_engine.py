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


def engine_memory(spec: ModelSpec, engine: EngineConfig, *, element_bytes: int) -> EngineMemory:
    """`engine.tp` must be able to hold the model (`check_target`)."""
    weights, whole_tensors = _weight_bytes(spec, engine.tp, element_bytes)
    heads = max(1, spec.num_kv_heads // engine.tp)
    ffn = spec.ffn_size if spec.moe is None else spec.moe.expert_ffn_size * spec.moe.experts_per_token
    tokens = int(engine.vllm.get("max_num_batched_tokens", _STEP_TOKENS))
    step = tokens * (2 * spec.hidden_size + 3 * ffn // engine.tp) * element_bytes
    sampler = _SAMPLER_COPIES * engine.max_concurrent * spec.vocab_size * _FLOAT
    is_fp8 = str(engine.vllm.get("kv_cache_dtype", "auto")).startswith("fp8")
    return EngineMemory(
        weights=weights,
        kv_token_bytes=2 * spec.num_layers * heads * spec.head_dim * (1 if is_fp8 else element_bytes),
        overhead=_RUNTIME_BYTES + step + sampler,
        sync=_BUCKETS * engine.bucket_mib * 2**20 + whole_tensors,
    )


@lru_cache(maxsize=64)
def _weight_bytes(spec: ModelSpec, tp: int, element_bytes: int) -> tuple[int, int]:
    """Weights of one worker, and the whole tensors that it holds while they arrive."""
    shapes = hf_tensors(spec)
    needs = target_needs(spec, tp=tp, rank=0)
    weights = sum(need_bytes(shape, needs[name], element_bytes) for name, shape in shapes.items())
    return weights, _reload_bytes(spec, element_bytes)


def _reload_bytes(spec: ModelSpec, element_bytes: int) -> int:
    """Tensors arrive in full shape and vLLM keeps those of a layer until it has all: see weight_receiver.py."""
    layers: dict[str, int] = {}
    for name, shape in hf_tensors(spec).items():
        parts = name.split(".")
        unit = ".".join(parts[:3]) if "layers" in parts else name
        layers[unit] = layers.get(unit, 0) + math.prod(shape) * element_bytes
    return max(layers.values())

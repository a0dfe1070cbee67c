"""How much KV cache an engine on CPU can make use of: what it reserves it also fills with zeros when it starts."""

from __future__ import annotations

from megatron_rl.model.spec import ModelSpec

GIB = 1 << 30
BLOCK_TOKENS = 32  # vLLM on CPU wants blocks in multiples of 32 tokens


def kv_cache_bytes(
    spec: ModelSpec,
    *,
    tp: int,
    element_bytes: int,
    max_model_len: int,
    max_concurrent: int,
    limit_gib: int,
) -> int:
    """Bytes for one worker: what `max_concurrent` sequences of `max_model_len` tokens fill, at most `limit_gib`.

    A block is keys and values of BLOCK_TOKENS tokens in all layers, of the worker's kv heads. Each sequence has one
    to spare, so that prompts which others share outlive those that end; vLLM keeps one more to itself.
    """
    # kv heads are held several times where there are fewer than workers
    heads = max(1, spec.num_kv_heads // tp)
    block = 2 * spec.num_layers * heads * spec.head_dim * BLOCK_TOKENS * element_bytes
    blocks = max_concurrent * (-(-max_model_len // BLOCK_TOKENS) + 1) + 1
    return min(blocks * block, limit_gib * GIB)

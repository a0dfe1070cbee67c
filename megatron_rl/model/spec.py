"""What a model is, read from a Hugging Face `config.json`: sizes and switches, no tensors, no framework."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeScaling:
    """Llama-3 frequency scaling (the only kind megatron-core expresses): low 1, high 4, original length 8192."""

    factor: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """A dense decoder of one of the supported families."""

    family: str                 # qwen2 | qwen3 | llama
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    rope_theta: float
    norm_eps: float
    tied: bool                  # the head is the embedding
    qkv_bias: bool
    qk_norm: bool
    rope_scaling: RopeScaling | None = None

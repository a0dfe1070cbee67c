"""Tiny Hugging Face models with random weights, written by transformers itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def make_tiny_hf(
    directory: str | Path,
    *,
    family: str = "qwen2",
    tied: bool = False,
    num_layers: int = 4,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    ffn: int = 96,
    vocab: int = 251,
    rope_factor: float | None = None,
    rope_theta: float = 10000.0,
    experts: int = 8,
    experts_per_token: int = 2,
    expert_ffn: int = 32,
    norm_topk_prob: bool = True,
    seed: int = 0,
) -> Path:
    """Write a float32 model of `family` into `directory`; `rope_factor` asks for llama3 scaling.

    The numbers of experts are those of a `qwen3_moe`.

    Biases and norm weights are random too, so that one that is dropped or swapped shows in the logits.
    """
    import transformers

    prefix = {"qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe", "llama": "Llama"}[family]
    config_class = getattr(transformers, f"{prefix}Config")
    model_class = getattr(transformers, f"{prefix}ForCausalLM")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": rope_theta}
    if rope_factor is not None:
        rope = {
            "rope_type": "llama3",
            "rope_theta": rope_theta,
            "factor": rope_factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    of_experts = {
        "num_experts": experts,
        "num_experts_per_tok": experts_per_token,
        "moe_intermediate_size": expert_ffn,
        "norm_topk_prob": norm_topk_prob,
    }
    config = config_class(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=512 if rope_factor is None else 65536,
        tie_word_embeddings=tied,
        rope_parameters=rope,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        **(of_experts if family == "qwen3_moe" else {}),
    )
    torch.manual_seed(seed)
    model = model_class(config).float()
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith("norm.weight"):
                param.uniform_(0.5, 1.5)
            else:
                param.normal_(0.0, 0.1)
    model.save_pretrained(directory)
    return Path(directory)

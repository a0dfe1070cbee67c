"""Tiny Hugging Face models, what HF says about them, and their weights as Megatron ranks hold them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from megatron_rl.model.hf_tables import padded_vocab, source_pieces
from megatron_rl.model.spec import ModelSpec
from megatron_rl.parallel.layout import ParallelLayout


def qwen2_spec(*, tied: bool) -> ModelSpec:
    """Two layers, two heads over one kv head of 32 (vLLM on CPU takes no smaller), an odd vocabulary."""
    return ModelSpec(
        family="qwen2",
        num_layers=2,
        hidden_size=64,
        ffn_size=128,
        num_heads=2,
        num_kv_heads=1,
        head_dim=32,
        vocab_size=251,
        max_positions=512,
        rope_theta=1e4,
        norm_eps=1e-6,
        tied=tied,
        qkv_bias=True,
        qk_norm=False,
    )


def write_qwen2(path: Path, *, seed: int, tied: bool) -> Path:
    """A random model of `qwen2_spec` whose biases and norms are away from their neutral values."""
    from transformers import Qwen2Config, Qwen2ForCausalLM  # slow to import, and most callers need none of it

    spec = qwen2_spec(tied=tied)
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.ffn_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        max_position_embeddings=spec.max_positions,
        rms_norm_eps=spec.norm_eps,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(torch.randn_like(param) * 0.2 + (1 if "norm" in name else 0))
    model.save_pretrained(path)
    return path


def hf_logprobs(path: Path, token_ids: list[int], *, temperature: float = 1.0) -> list[float]:
    """Log-probabilities of `token_ids[1:]` by transformers in float32."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        rows = (reference(torch.tensor([token_ids])).logits[0].double() / temperature).log_softmax(-1)
    return [rows[i, token].item() for i, token in enumerate(token_ids[1:])]


def hf_weights(path: Path) -> dict[str, Tensor]:
    """Every tensor of the model, float32; a tied head is there twice."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return {name: tensor.detach().clone() for name, tensor in reference.state_dict().items()}


def rank_params(
    spec: ModelSpec, layout: ParallelLayout, rank: int, weights: dict[str, Tensor]
) -> list[dict[str, Tensor]]:
    """The parameters that `rank` would hold, per chunk; vocabulary padding is NaN, so that a leak is seen."""
    pieces = source_pieces(spec, layout, rank=rank)
    chunks: list[dict[str, Tensor]] = [{} for _ in range(layout.vpp)]
    for piece in pieces:
        tensor, params = weights[piece.hf_name], chunks[piece.chunk]
        if piece.param_dim is None or piece.hf_dim is None:
            params[piece.param] = tensor.clone()
            continue
        if piece.param not in params:
            shape = list(tensor.shape)
            shape[piece.param_dim] = max(
                p.param_start + p.length for p in pieces if (p.chunk, p.param) == (piece.chunk, piece.param)
            )
            if "embedding" in piece.param or "output_layer" in piece.param:
                shape[0] = padded_vocab(spec.vocab_size, layout.tp) // layout.tp
            params[piece.param] = torch.full(shape, float("nan"), dtype=tensor.dtype)
        params[piece.param].narrow(piece.param_dim, piece.param_start, piece.length).copy_(
            tensor.narrow(piece.hf_dim, piece.hf_start, piece.length)
        )
    return chunks

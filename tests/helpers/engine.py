"""Tiny Hugging Face models for the engine, what HF says about them, and their parameters as one Megatron
rank's.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron_rl.model.hf_tables import padded_vocab, source_pieces
from megatron_rl.model.spec import ModelSpec
from megatron_rl.parallel.layout import ParallelLayout


@dataclass(frozen=True)
class TinyModel:
    """An HF directory with the spec that describes it."""

    path: Path
    spec: ModelSpec


def write_qwen2(
    path: Path,
    *,
    seed: int,
    tied: bool,
    vocab_size: int = 251,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 2,
    kv_heads: int = 1,
) -> TinyModel:
    """A random Qwen2 of head_dim hidden / heads with biases and norms away from neutral values."""
    from transformers import Qwen2Config, Qwen2ForCausalLM  # slow to import, and most callers need none of it

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(
                1 + 0.2 * torch.randn_like(param) if "norm" in name else 0.15 * torch.randn_like(param)
            )
    model.save_pretrained(path)
    spec = ModelSpec(
        family="qwen2",
        num_layers=layers,
        hidden_size=hidden,
        ffn_size=2 * hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=hidden // heads,
        vocab_size=vocab_size,
        max_positions=512,
        rope_theta=1e4,
        norm_eps=config.rms_norm_eps,
        tied=tied,
        qkv_bias=True,
        qk_norm=False,
    )
    return TinyModel(path, spec)


def hf_logprobs(model: TinyModel, token_ids: list[int], *, temperature: float = 1.0) -> list[float]:
    """Log-probabilities of `token_ids[1:]` by transformers in float32."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float32).eval()
    with torch.no_grad():
        rows = (reference(torch.tensor([token_ids])).logits[0].double() / temperature).log_softmax(-1)
    return [rows[i, token].item() for i, token in enumerate(token_ids[1:])]


def hf_weights(model: TinyModel) -> dict[str, Tensor]:
    """Every tensor of the checkpoint, float32."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float32)
    return {name: tensor.detach().clone() for name, tensor in reference.state_dict().items()}


def rank_params(
    spec: ModelSpec, layout: ParallelLayout, rank: int, weights: dict[str, Tensor]
) -> list[dict[str, Tensor]]:
    """The parameters that `rank` would hold, per chunk; vocabulary padding is NaN, so that a leak is seen."""
    tp_rank, _, pp_rank = layout.coord(rank)
    pieces = source_pieces(spec, layout, tp_rank=tp_rank, pp_rank=pp_rank)
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
            params[piece.param] = torch.full(shape, float("nan"))
        params[piece.param].narrow(piece.param_dim, piece.param_start, piece.length).copy_(
            tensor.narrow(piece.hf_dim, piece.hf_start, piece.length)
        )
    return chunks

"""A small model of the same kind: fewer and smaller parts, and everything that makes bugs kept.

Kept: architecture, tied or not, biases, q/k norms, form of the rotary positions, query heads per kv head, a lone kv
head, a head size of its own, vocabulary and tokenizer. Weights are random, from a seed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron_rl.data.seeds import derive_seed
from megatron_rl.model.hf_export import CONFIG_FILE, copy_side_files, exported_config
from megatron_rl.model.hf_files import SINGLE_FILE
from megatron_rl.model.hf_tables import hf_tensors
from megatron_rl.model.spec import ModelSpec

_LAYERS, _KV_HEADS, _HEAD_DIM, _HIDDEN, _EXPERTS, _EXPERT_FFN = 4, 2, 32, 64, 4, 32
_ROUND = 8  # sizes that are split are multiples of this in each part


@dataclass(frozen=True, kw_only=True, slots=True)
class Degrees:
    """What the small model must still be split by: all degrees that the proof uses."""

    tp: tuple[int, ...] = (1,)  # of trainer and engines
    stages: int = 1  # least common multiple of pp * vpp
    ep: int = 1
    expert_tp: int = 1


def small_config(config: Mapping[str, Any], spec: ModelSpec, degrees: Degrees) -> dict[str, Any]:
    """`config` with smaller sizes, never larger ones; `spec` is what it says. Pure."""
    kv_heads, heads = _heads(spec, degrees.tp)
    head_dim = min(spec.head_dim, _HEAD_DIM)
    hidden = _hidden(spec, heads * head_dim)
    split = _ROUND * math.lcm(*degrees.tp)
    small: dict[str, Any] = {
        "num_hidden_layers": _multiple(_LAYERS, spec.num_layers, degrees.stages),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": hidden,
        "head_dim": head_dim,
        "intermediate_size": _multiple(2 * hidden, config["intermediate_size"], split),
    }
    if "head_dim" not in config and head_dim * heads == hidden:
        # a reader that derives it goes on deriving it
        del small["head_dim"]
    if config.get("layer_types"):
        small["layer_types"] = list(config["layer_types"])[: small["num_hidden_layers"]]
    if spec.moe is not None:
        moe = spec.moe
        experts = _multiple(max(_EXPERTS, degrees.ep), moe.num_experts, degrees.ep)
        small |= {key: experts for key in ("num_experts", "num_local_experts") if config.get(key) is not None}
        small["num_experts_per_tok"] = min(moe.experts_per_token, max(2, experts // 2), experts)
        small["moe_intermediate_size"] = _multiple(
            _EXPERT_FFN, moe.expert_ffn_size, _ROUND * degrees.expert_tp
        )
    return {**config, **small}


def _heads(spec: ModelSpec, tps: Sequence[int]) -> tuple[int, int]:
    """(kv heads, query heads) in the model's own ratio, as few as all degrees can split."""
    ratio = spec.num_heads // spec.num_kv_heads
    for kv_heads in range(min(_KV_HEADS, spec.num_kv_heads), spec.num_kv_heads + 1):
        heads = ratio * kv_heads
        if all(heads % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0) for tp in tps):
            return kv_heads, heads
    return spec.num_kv_heads, spec.num_heads


def _hidden(spec: ModelSpec, q_width: int) -> int:
    """As wide as the heads together where the model is, of another width where it is not."""
    if spec.hidden_size == spec.num_heads * spec.head_dim:
        return q_width
    hidden = min(spec.hidden_size, _HIDDEN)
    return hidden if hidden != q_width else min(spec.hidden_size, hidden + hidden // 2)


def _multiple(wanted: int, limit: int, of: int) -> int:
    """The multiple of `of` at or above `wanted` or `limit`, whichever is less; `limit` if that is too much."""
    value = -(-min(wanted, limit) // of) * of
    return value if value <= limit else limit


def write_small_model(source: Path, out: Path, degrees: Degrees, *, seed: int) -> list[str]:
    """Write the small model into the new directory `out`; what changed, in words. `source` needs no weights."""
    spec = ModelSpec.from_hf(source)
    config = json.loads((source / CONFIG_FILE).read_text(encoding="utf-8"))
    small = exported_config(small_config(config, spec, degrees), dtype=torch.float32)
    out.mkdir()
    copy_side_files(source, out)
    (out / CONFIG_FILE).write_text(json.dumps(small, indent=2) + "\n", encoding="utf-8")
    small_spec = ModelSpec.from_hf(out)
    save_file(random_weights(small_spec, seed=seed), out / SINGLE_FILE, metadata={"format": "pt"})
    return [f"weights: random, from seed {seed}", *_changes(config, small)]


def random_weights(spec: ModelSpec, *, seed: int) -> dict[str, Tensor]:
    """Every tensor float32; norm weights and biases are random too, so that one that is dropped shows."""
    weights = {}
    for name, shape in hf_tensors(spec).items():
        draw = torch.Generator().manual_seed(derive_seed(seed, name))
        if name.endswith("norm.weight"):
            weights[name] = torch.rand(shape, generator=draw) + 0.5
        else:
            spread = shape[-1] ** -0.5 if len(shape) > 1 else 0.1
            weights[name] = torch.randn(shape, generator=draw) * spread
    return weights


def _changes(config: Mapping[str, Any], small: Mapping[str, Any]) -> Iterator[str]:
    for key, value in small.items():
        before = config.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and before != value:
            yield f"{key}: {before} -> {value}"

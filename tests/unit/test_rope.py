"""Rotary frequencies of the model we build are those of transformers for every config we accept, or it is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.errors import ModelError
from megatron_rl.model.spec import ModelSpec
from megatron_rl.parallel.groups import destroy_process_groups, init_process_groups
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.train.launcher import free_port

FAMILIES = {
    "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3", "Qwen3MoeForCausalLM": "qwen3_moe",
    "LlamaForCausalLM": "llama",
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
DEFAULT = {"rope_type": "default"}
ACCEPTED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "base 4": {"rope_theta": 1000000},
    "base 5": {"rope_parameters": {**DEFAULT, "rope_theta": 1e6}},
    "base 5 without a type": {"rope_parameters": {"rope_theta": 1e6}},
    "base beside rope_parameters": {"rope_theta": 5e5, "rope_parameters": DEFAULT},
    "null": {"rope_theta": 1e6, "rope_scaling": None},
    "empty": {"rope_theta": 1e6, "rope_scaling": {}},
    "both empty": {"rope_theta": 1e6, "rope_scaling": {}, "rope_parameters": {}},
    "default, old key": {"rope_theta": 1e6, "rope_scaling": {"type": "default"}},
    "default": {"rope_theta": 1e6, "rope_scaling": DEFAULT},
    "llama3 4": {"rope_theta": 5e5, "rope_scaling": LLAMA3},
    "llama3 4, old key": {"rope_theta": 5e5, "rope_scaling": {**LLAMA3, "type": "llama3"}},
    "llama3 5": {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
    "llama3 of 32": {"rope_parameters": {**LLAMA3, "rope_theta": 5e5, "factor": 32}},
    "both spellings": {
        "rope_theta": 5e5, "rope_scaling": LLAMA3, "rope_parameters": {**LLAMA3, "rope_theta": 5e5},
    },
    "both spellings of no scaling": {
        "rope_theta": 1e6, "rope_scaling": DEFAULT, "rope_parameters": {**DEFAULT, "rope_theta": 1e6},
    },
}  # fmt: skip
REFUSED: dict[str, dict[str, Any]] = {
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "linear, old key": {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "dynamic": {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}},
    "longrope": {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
    "llama3 of 4096": {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 4096}},
    "llama3 of another low": {"rope_scaling": {**LLAMA3, "low_freq_factor": 2.0}},
    "llama3 of another high": {"rope_scaling": {**LLAMA3, "high_freq_factor": 8.0}},
    "llama3 without numbers": {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
    "two scalings": {"rope_scaling": LLAMA3, "rope_parameters": {**DEFAULT, "rope_theta": 1e4}},
    "two bases": {"rope_theta": 1e4, "rope_parameters": {**DEFAULT, "rope_theta": 1e6}},
    # transformers reads rope_scaling then, whose base it takes to be 10000
    "a base that transformers skips": {
        "rope_scaling": DEFAULT,
        "rope_parameters": {**DEFAULT, "rope_theta": 1e6},
    },
    "part of a head": {"rope_parameters": {**DEFAULT, "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
}


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    layout = ParallelLayout()
    init_process_groups(
        layout, rank=0, world_size=1, master_addr="127.0.0.1", master_port=free_port(), timeout_s=30.0
    )
    yield
    destroy_process_groups()


def write_config(directory: Path, architecture: str, rope: dict[str, Any]) -> Path:
    config = {
        "architectures": [architecture], "model_type": FAMILIES[architecture], "hidden_size": 32,
        "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "vocab_size": 32, "max_position_embeddings": 131072, "num_experts": 2,
        "num_experts_per_tok": 2, "moe_intermediate_size": 8, "norm_topk_prob": True,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config | rope))
    return directory


def our_frequencies(path: Path) -> torch.Tensor:
    from megatron_rl.model.build import build_model

    (chunk,) = build_model(ModelSpec.from_hf(path), ParallelLayout(), dtype=torch.float32, spec_kind="local")
    return chunk.rotary_pos_emb.inv_freq


def hf_frequencies(path: Path) -> torch.Tensor:
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    frequencies: torch.Tensor = LlamaRotaryEmbedding(AutoConfig.from_pretrained(path)).inv_freq
    return frequencies


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("rope", ACCEPTED.values(), ids=ACCEPTED.keys())
def test_frequencies_are_those_of_transformers(
    rope: dict[str, Any], architecture: str, tmp_path: Path
) -> None:
    path = write_config(tmp_path, architecture, rope)
    ours = our_frequencies(path)
    assert ours.shape == (8,)
    torch.testing.assert_close(ours, hf_frequencies(path), rtol=2e-7, atol=0.0)


@pytest.mark.parametrize("rope", REFUSED.values(), ids=REFUSED.keys())
def test_other_forms_are_refused_by_key(rope: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json: rope_\w+(\.\w+)?: got .*, must be"):
        ModelSpec.from_hf(write_config(tmp_path, "LlamaForCausalLM", rope))


def test_what_is_refused_would_have_been_another_model(tmp_path: Path) -> None:
    """Control: a base or a scaling taken for another shows in the frequencies by far more than the tolerance."""
    frequencies = []
    for number, rope in enumerate((ACCEPTED["base 4"], ACCEPTED["nothing"], ACCEPTED["llama3 4"])):
        (tmp_path / str(number)).mkdir()
        frequencies.append(our_frequencies(write_config(tmp_path / str(number), "LlamaForCausalLM", rope)))
    for other in frequencies[1:]:
        assert ((other - frequencies[0]).abs() / frequencies[0]).max() > 0.5

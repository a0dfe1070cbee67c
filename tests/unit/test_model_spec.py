"""`config.json` to `ModelSpec`: both spellings, all families, and what is refused."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.errors import LayoutError, ModelError
from megatron_rl.model.spec import ModelSpec, MoeSpec, RopeScaling
from megatron_rl.parallel.layout import ParallelLayout
from tests.helpers.models import make_tiny_hf

# Qwen2.5-Math-7B as transformers 4 wrote it
QWEN2: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 4096,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 152064,
}
# Qwen3-8B
QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
LLAMA3_ROPE: dict[str, Any] = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
# Llama-3.1-8B
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": LLAMA3_ROPE,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}

# Qwen3-30B-A3B
QWEN3_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def read(tmp_path: Path, config: dict[str, Any]) -> ModelSpec:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return ModelSpec.from_hf(tmp_path)


def test_qwen2_has_biases_and_derives_its_head_size(tmp_path: Path) -> None:
    assert read(tmp_path, QWEN2) == ModelSpec(
        family="qwen2",
        num_layers=28,
        hidden_size=3584,
        ffn_size=18944,
        num_heads=28,
        num_kv_heads=4,
        head_dim=128,
        vocab_size=152064,
        max_positions=4096,
        rope_theta=10000.0,
        norm_eps=1e-6,
        tied=False,
        qkv_bias=True,
        qk_norm=False,
    )


def test_qwen3_has_head_norms_and_no_biases(tmp_path: Path) -> None:
    spec = read(tmp_path, QWEN3)
    assert (spec.family, spec.qkv_bias, spec.qk_norm, spec.head_dim) == ("qwen3", False, True, 128)
    assert spec.rope_theta == 1e6 and spec.rope_scaling is None


def test_llama3_scaling_keeps_its_factor(tmp_path: Path) -> None:
    spec = read(tmp_path, LLAMA)
    assert (spec.family, spec.qkv_bias, spec.qk_norm) == ("llama", False, False)
    assert spec.rope_scaling == RopeScaling(factor=8.0)
    assert (spec.rope_theta, spec.norm_eps) == (500000.0, 1e-5)


def test_qwen3_moe_has_experts_in_every_layer(tmp_path: Path) -> None:
    spec = read(tmp_path, QWEN3_MOE)
    assert (spec.family, spec.qkv_bias, spec.qk_norm, spec.head_dim) == ("qwen3_moe", False, True, 128)
    assert spec.moe == MoeSpec(
        num_experts=128, experts_per_token=8, expert_ffn_size=768, normalise_top_k=True
    )
    modern = {k: v for k, v in QWEN3_MOE.items() if k not in ("num_experts", "mlp_only_layers")}
    assert read(tmp_path, modern | {"num_local_experts": 128, "mlp_only_layers": None}) == spec
    # transformers leaves the weights of chosen experts as they are unless told
    del modern["norm_topk_prob"]
    plain = read(tmp_path, modern | {"num_local_experts": 128}).moe
    assert plain is not None and not plain.normalise_top_k


def test_head_size_of_qwen3_moe_is_derived_where_it_is_not_given(tmp_path: Path) -> None:
    """As transformers does; only the dense Qwen3 has a fixed default."""
    assert read(tmp_path, {k: v for k, v in QWEN3_MOE.items() if k != "head_dim"}).head_dim == 64


@pytest.mark.parametrize("config", [QWEN2, QWEN3_MOE, LLAMA], ids=["qwen2", "qwen3_moe", "llama"])
def test_a_spec_survives_json(config: dict[str, Any], tmp_path: Path) -> None:
    spec = read(tmp_path, config)
    assert ModelSpec.from_plain(json.loads(json.dumps(asdict(spec)))) == spec


@pytest.mark.parametrize("config", [QWEN2, QWEN3, LLAMA], ids=["qwen2", "qwen3", "llama"])
def test_both_transformers_spellings_give_one_spec(config: dict[str, Any], tmp_path: Path) -> None:
    modern = {k: v for k, v in config.items() if k not in ("rope_theta", "rope_scaling", "torch_dtype")}
    modern["rope_parameters"] = {
        "rope_type": "default",
        **(config.get("rope_scaling") or {}),
        "rope_theta": config["rope_theta"],
    }
    modern["dtype"] = "bfloat16"
    assert read(tmp_path, modern) == read(tmp_path, config)


@pytest.mark.parametrize("config", [QWEN2, LLAMA], ids=["qwen2", "llama"])
def test_both_spellings_in_one_config_must_agree(config: dict[str, Any], tmp_path: Path) -> None:
    rope = {"rope_type": "default", **(config.get("rope_scaling") or {}), "rope_theta": config["rope_theta"]}
    assert read(tmp_path, config | {"rope_parameters": rope}) == read(tmp_path, config)
    with pytest.raises(ModelError, match=r"rope_scaling: got .*, must be as rope_parameters says, or absent"):
        read(tmp_path, config | {"rope_parameters": rope, "rope_scaling": LLAMA3_ROPE | {"factor": 3.0}})
    with pytest.raises(ModelError, match="rope_theta: got"):
        read(tmp_path, config | {"rope_parameters": rope, "rope_theta": 1.0})


@pytest.mark.parametrize("scaling", [None, {}, {"type": "default"}, {"rope_type": "default"}], ids=str)
def test_default_scaling_is_no_scaling(scaling: Any, tmp_path: Path) -> None:
    assert read(tmp_path, LLAMA | {"rope_scaling": scaling}).rope_scaling is None


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen3_moe", "llama"])
def test_what_the_installed_transformers_writes_is_read(family: str, tmp_path: Path) -> None:
    spec = ModelSpec.from_hf(make_tiny_hf(tmp_path, family=family, tied=True))
    assert (spec.family, spec.tied, spec.head_dim, spec.rope_theta) == (family, True, 32, 10000.0)


@pytest.mark.parametrize(
    ("base", "change", "key", "got"),
    [
        (QWEN2, {"architectures": ["Qwen2MoeForCausalLM"]}, "architectures", "Qwen2MoeForCausalLM"),
        (QWEN2, {"architectures": None}, "architectures", "nothing"),
        (QWEN2, {"hidden_act": "gelu"}, "hidden_act", "gelu"),
        (QWEN2, {"use_sliding_window": True}, "use_sliding_window", "true"),
        (QWEN3, {"attention_bias": True}, "attention_bias", "true"),
        (QWEN3, {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types", "sliding_attention"),
        (QWEN3, {"layer_types": 3}, "layer_types", "3"),
        (QWEN3, {"layer_types": [["full_attention"]]}, "layer_types", "full_attention"),
        (QWEN3, {"architectures": [["Qwen3ForCausalLM"]]}, "architectures", "Qwen3ForCausalLM"),
        (QWEN3, {"rope_theta": math.inf}, "rope_theta", "Infinity"),
        (QWEN3, {"rope_theta": 10**400}, "rope_theta", "1000"),
        (QWEN3_MOE, {"decoder_sparse_step": 2}, "decoder_sparse_step", "2"),
        (QWEN3_MOE, {"mlp_only_layers": [0, 1]}, "mlp_only_layers", "[0, 1]"),
        (QWEN3_MOE, {"num_experts": None}, "num_local_experts", "nothing"),
        (QWEN3_MOE, {"num_experts": 4}, "num_experts_per_tok", "8"),
        (QWEN3_MOE, {"num_experts_per_tok": 1}, "num_experts_per_tok", "1"),
        (QWEN3_MOE, {"moe_intermediate_size": 0}, "moe_intermediate_size", "0"),
        (QWEN3_MOE, {"norm_topk_prob": "yes"}, "norm_topk_prob", '"yes"'),
        (LLAMA, {"attention_bias": True}, "attention_bias", "true"),
        (LLAMA, {"mlp_bias": True}, "mlp_bias", "true"),
        (LLAMA, {"sliding_window": 4096}, "sliding_window", "4096"),
        (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor", "0.5"),
        (LLAMA, {"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "rope_scaling.rope_type", "yarn"),
        (LLAMA, {"rope_scaling": {"type": "linear", "factor": 4}}, "rope_scaling.rope_type", "linear"),
        (LLAMA, {"rope_scaling": "llama3"}, "rope_scaling", "llama3"),
        (
            LLAMA,
            {"rope_scaling": LLAMA3_ROPE | {"low_freq_factor": 2.0}},
            "rope_scaling.low_freq_factor",
            "2.0",
        ),
        (
            LLAMA,
            {"rope_scaling": LLAMA3_ROPE | {"high_freq_factor": 8}},
            "rope_scaling.high_freq_factor",
            "8",
        ),
        (
            LLAMA,
            {"rope_scaling": LLAMA3_ROPE | {"original_max_position_embeddings": 4096}},
            "rope_scaling.original_max_position_embeddings",
            "4096",
        ),
        (LLAMA, {"rope_scaling": LLAMA3_ROPE | {"factor": None}}, "rope_scaling.factor", "nothing"),
        (LLAMA, {"rope_theta": -1}, "rope_theta", "-1"),
        (QWEN2, {"num_hidden_layers": 0}, "num_hidden_layers", "0"),
        (QWEN2, {"vocab_size": None}, "vocab_size", "nothing"),
        (QWEN2, {"hidden_size": "3584"}, "hidden_size", '"3584"'),
        (QWEN2, {"hidden_size": 3585}, "hidden_size", "3585"),
        (QWEN2, {"num_key_value_heads": 5}, "num_key_value_heads", "5"),
        (QWEN2, {"tie_word_embeddings": "no"}, "tie_word_embeddings", '"no"'),
        (QWEN2, {"quantization_config": {"quant_method": "gptq"}}, "quantization_config", "gptq"),
        (QWEN2, {"num_hidden_layers": 100_000}, "num_hidden_layers", "100000"),
        (QWEN2, {"hidden_size": 3584 * 1000}, "hidden_size", "3584000"),
        (QWEN2, {"vocab_size": 10**4000}, "vocab_size", "1000"),
        (QWEN3_MOE, {"num_experts": 5000}, "num_experts", "5000"),
        (QWEN3_MOE, {"num_hidden_layers": 512}, "num_experts * num_hidden_layers", "65,536 experts"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else str(value),
)
def test_what_cannot_be_built_exactly_is_refused_by_file_and_key(
    base: dict[str, Any], change: dict[str, Any], key: str, got: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError) as caught:
        read(tmp_path, base | change)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'config.json'}: {key}: got ")
    assert got in message and "must be" in message
    assert len(message) < 1000


def test_sizes_that_are_too_many_together_are_refused(tmp_path: Path) -> None:
    large = {"hidden_size": 2**15, "intermediate_size": 2**17, "num_hidden_layers": 1000}
    with pytest.raises(ModelError, match=r"got sizes of 2\.16e\+13 parameters, must be at most 1e\+13"):
        read(tmp_path, QWEN3 | large | {"num_attention_heads": 1024})


@pytest.mark.parametrize("text", ["", "{", "[1]", "\x80", "[" * 100_000, f'{{"vocab_size": 1{"0" * 5000}}}'])
def test_a_file_that_is_no_json_object_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelError, match=r"config\.json"):
        ModelSpec.from_hf(tmp_path)


def test_a_directory_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such file"):
        ModelSpec.from_hf(tmp_path / "absent")


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        (ParallelLayout(tp=3), r"layout\.tp: got 3.*28 attention heads; use 2 or 4"),
        (ParallelLayout(tp=14), r"layout\.tp: got 14.*18944 ffn_size; use 4$"),
        (ParallelLayout(tp=7), r"layout\.tp: got 7.*18944 ffn_size"),
        (ParallelLayout(pp=3), r"layout\.pp: got pp\*vpp = 3\*1 = 3.*28 layers; make pp\*vpp 2 or 4"),
        (ParallelLayout(pp=4, vpp=2), r"4\*2 = 8.*28 layers; make pp\*vpp 7 or 14"),
        (ParallelLayout(pp=56), r"56.*make pp\*vpp 28$"),
    ],
    ids=str,
)
def test_a_layout_that_does_not_split_the_model_is_refused_with_its_neighbours(
    layout: ParallelLayout, said: str, tmp_path: Path
) -> None:
    with pytest.raises(LayoutError, match=said):
        read(tmp_path, QWEN2).check_layout(layout)


def test_kv_heads_must_divide_tp_or_be_divided_by_it(tmp_path: Path) -> None:
    heads = {"num_attention_heads": 24, "num_key_value_heads": 4}
    spec = read(tmp_path, LLAMA | heads | {"hidden_size": 3072, "intermediate_size": 6144})
    with pytest.raises(LayoutError, match=r"got 6, but the model's 4 kv heads .* use 4 or 8"):
        spec.check_layout(ParallelLayout(tp=6))
    for tp in (1, 2, 4, 8):
        spec.check_layout(ParallelLayout(tp=tp))


def test_layouts_that_fit_pass(tmp_path: Path) -> None:
    spec = read(tmp_path, QWEN3)
    for layout in (ParallelLayout(), ParallelLayout(tp=16, pp=9), ParallelLayout(tp=8, pp=4, vpp=3, sp=True)):
        spec.check_layout(layout)


def test_a_hint_names_only_degrees_that_fit_heads_and_kv_heads():
    spec = ModelSpec(
        family="qwen2", num_layers=4, hidden_size=160, ffn_size=240, num_heads=40, num_kv_heads=8, head_dim=4,
        vocab_size=100, max_positions=64, rope_theta=1e4, norm_eps=1e-6, tied=False, qkv_bias=True, qk_norm=False,
    )  # fmt: skip
    with pytest.raises(LayoutError, match=r"layout.tp: got 7, .* 40 attention heads; use 4 or 8$"):
        spec.check_layout(ParallelLayout(tp=7))


def test_all_sizes_that_are_missing_are_named_at_once(tmp_path: Path) -> None:
    half = {key: value for key, value in QWEN3.items() if key not in ("hidden_size", "vocab_size")}
    (tmp_path / "config.json").write_text(json.dumps(half))
    with pytest.raises(
        ModelError, match=r"hidden_size, vocab_size: missing, each must be a positive integer"
    ):
        ModelSpec.from_hf(tmp_path)

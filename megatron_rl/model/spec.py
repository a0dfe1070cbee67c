"""What a model is, read from a Hugging Face `config.json`: sizes and switches, no tensors, no framework."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_rl.errors import LayoutError, ModelError
from megatron_rl.model.splits import split_problems
from megatron_rl.parallel.layout import ParallelLayout

FAMILIES = {
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "LlamaForCausalLM": "llama",
}
_REQUIRED = (
    "hidden_size",
    "num_attention_heads",
    "num_hidden_layers",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
)
# far beyond public models, and where planning one tensor after the other still takes seconds
_LARGEST = {
    "num_hidden_layers": 1024,
    "hidden_size": 2**17,
    "num_attention_heads": 2**12,
    "num_key_value_heads": 2**12,
    "head_dim": 2**12,
    "intermediate_size": 2**19,
    "moe_intermediate_size": 2**19,
    "num_experts": 2**12,
    "num_local_experts": 2**12,
    "vocab_size": 2**24,
    "max_position_embeddings": 2**27,
}
_MOST_EXPERTS, _MOST_PARAMETERS = 2**15, 10**13  # of all layers
LLAMA3_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeScaling:
    """Llama-3 frequency scaling, the only kind megatron-core expresses: low 1, high 4, original 8192."""

    factor: float


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeSpec:
    """The routed experts of every layer; they stand in place of its MLP."""

    num_experts: int
    experts_per_token: int
    expert_ffn_size: int
    normalise_top_k: bool  # weights of the chosen experts are scaled to sum to one


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """A decoder of one of the supported families."""

    family: str  # qwen2 | qwen3 | qwen3_moe | llama
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
    tied: bool  # the head is the embedding
    qkv_bias: bool
    qk_norm: bool
    rope_scaling: RopeScaling | None = None
    moe: MoeSpec | None = None

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> ModelSpec:
        """The inverse of `dataclasses.asdict`, also after a trip through JSON."""
        nested = {"rope_scaling": RopeScaling, "moe": MoeSpec}
        return cls(
            **{
                key: nested[key](**value) if key in nested and value is not None else value
                for key, value in plain.items()
            }
        )

    @classmethod
    def from_hf(cls, hf_path: str | Path, *, max_positions: int | None = None) -> ModelSpec:
        """Read `config.json` of a Hugging Face directory (or that file itself), as transformers 4 or 5 writes it.

        `max_positions` stands in place of its max_position_embeddings; rotary frequencies stay as they are.
        Raises ModelError that names the file and the key for whatever cannot be built exactly.
        """
        path = Path(hf_path)
        is_file = path.is_file() or path.name == "config.json"
        spec = _ConfigReader(path if is_file else path / "config.json").spec()
        return spec if max_positions is None else replace(spec, max_positions=max_positions)

    def check_layout(self, layout: ParallelLayout) -> None:
        """Raise LayoutError, naming the nearest degrees that work, when `layout` cannot split this model."""
        for problem in split_problems(self, layout):
            raise LayoutError(problem)


class _ConfigReader:
    """Reads one `config.json` key by key; each complaint carries the file and the key."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ModelError(f"{path}: no such file; name a Hugging Face directory, which has one") from None
        # a number of thousands of digits is a ValueError of its own
        except (OSError, ValueError, RecursionError) as error:
            raise ModelError(f"{path}: cannot be read as json: {error}") from None
        if not isinstance(config, dict):
            raise ModelError(f"{path}: got a json {type(config).__name__}, must be an object")
        self.config: Mapping[str, Any] = config

    def spec(self) -> ModelSpec:
        family = self._family()
        self._refuse_unsupported(family)
        absent = [key for key in _REQUIRED if self.config.get(key) is None]
        if len(absent) > 1:
            raise ModelError(f"{self.path}: {', '.join(absent)}: missing, each must be a positive integer")
        moe = self._moe() if family == "qwen3_moe" else None
        hidden, heads = self._integer("hidden_size"), self._integer("num_attention_heads")
        kv_heads = self._integer("num_key_value_heads", default=heads)
        if heads % kv_heads:
            raise self._error("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads = {heads}")
        if self.config.get("head_dim") is None and hidden % heads:
            raise self._error("hidden_size", hidden, f"a multiple of num_attention_heads = {heads}")
        theta, scaling = self._rope()
        spec = ModelSpec(
            family=family,
            num_layers=self._integer("num_hidden_layers"),
            hidden_size=hidden,
            ffn_size=self._integer("intermediate_size"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            # dense Qwen3 fixes it at 128 whatever the hidden size; the others derive it
            head_dim=self._integer("head_dim", default=128 if family == "qwen3" else hidden // heads),
            vocab_size=self._integer("vocab_size"),
            max_positions=self._integer("max_position_embeddings"),
            rope_theta=theta,
            norm_eps=self._positive(self.config, "rms_norm_eps", default=1e-6),
            tied=self._switch("tie_word_embeddings"),
            qkv_bias=family == "qwen2",
            qk_norm=family in ("qwen3", "qwen3_moe"),
            rope_scaling=scaling,
            moe=moe,
        )
        self._check_size(spec)
        return spec

    def _check_size(self, spec: ModelSpec) -> None:
        """Sizes that are each allowed may be too many together."""
        moe, hidden = spec.moe, spec.hidden_size
        experts = spec.num_layers * moe.num_experts if moe else 0
        if experts > _MOST_EXPERTS:
            raise ModelError(
                f"{self.path}: num_experts * num_hidden_layers: got {experts:,} experts in all, must be at most "
                f"{_MOST_EXPERTS:,}"
            )
        mlp = moe.expert_ffn_size * moe.num_experts if moe else spec.ffn_size
        layer = 2 * hidden * (spec.num_heads + spec.num_kv_heads) * spec.head_dim + 3 * hidden * mlp
        parameters = spec.num_layers * layer + hidden * spec.vocab_size * (1 if spec.tied else 2)
        if parameters > _MOST_PARAMETERS:
            raise ModelError(
                f"{self.path}: got sizes of {parameters:.2e} parameters, must be at most {_MOST_PARAMETERS:.0e}; "
                f"look at num_hidden_layers, hidden_size, intermediate_size and vocab_size"
            )

    def _family(self) -> str:
        names = self.config.get("architectures")
        if not isinstance(names, list) or len(names) != 1 or str(names[0]) not in FAMILIES:
            raise self._error("architectures", names, "one of " + ", ".join(FAMILIES))
        return FAMILIES[names[0]]

    def _refuse_unsupported(self, family: str) -> None:
        activation = self.config.get("hidden_act", "silu")
        if activation != "silu":
            raise self._error("hidden_act", activation, '"silu"')
        for key in ("attention_bias", "mlp_bias", "use_sliding_window"):
            if self.config.get(key):
                raise self._error(key, self.config[key], "false")
        for key in ("quantization_config", "pruned_heads"):
            if self.config.get(key):
                raise self._error(key, self.config[key], "absent; use the unquantised, unpruned checkpoint")
        # a window without the switch is ignored by Qwen2 and Qwen3
        if family == "llama" and self.config.get("sliding_window"):
            raise self._error("sliding_window", self.config["sliding_window"], "null")
        kinds = self.config.get("layer_types") or ["full_attention"]
        if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
            raise self._error("layer_types", kinds, 'a list of "full_attention" alone')
        rotated = self.config.get("partial_rotary_factor", 1.0)
        if rotated not in (None, 1.0):
            raise self._error("partial_rotary_factor", rotated, "1.0")

    def _moe(self) -> MoeSpec:
        step = self._integer("decoder_sparse_step", default=1)
        if step != 1:
            raise self._error("decoder_sparse_step", step, "1: experts in every layer")
        if self.config.get("mlp_only_layers"):
            raise self._error("mlp_only_layers", self.config["mlp_only_layers"], "[]: experts in every layer")
        # transformers 5 has the second name
        key = "num_experts" if self.config.get("num_experts") is not None else "num_local_experts"
        experts, chosen = self._integer(key), self._integer("num_experts_per_tok")
        normalise = self._switch("norm_topk_prob")
        if chosen > experts:
            raise self._error("num_experts_per_tok", chosen, f"at most {key} = {experts}")
        if chosen == 1 and normalise:
            allowed = (
                "at least 2 with norm_topk_prob: the weight of a lone expert is always 1, so no router learns"
            )
            raise self._error("num_experts_per_tok", chosen, allowed)
        return MoeSpec(
            num_experts=experts,
            experts_per_token=chosen,
            expert_ffn_size=self._integer("moe_intermediate_size"),
            normalise_top_k=normalise,
        )

    def _rope(self) -> tuple[float, RopeScaling | None]:
        """Base and scaling: transformers 5 has `rope_parameters`, 4 has `rope_theta` and `rope_scaling`."""
        key = "rope_parameters" if self.config.get("rope_parameters") else "rope_scaling"
        rope = self.config.get(key) or {}
        if not isinstance(rope, dict):
            raise self._error(key, rope, "an object or null")
        other_spelling = self.config.get("rope_scaling")
        if key == "rope_parameters" and other_spelling and _settings(other_spelling) != _settings(rope):
            raise self._error("rope_scaling", other_spelling, "as rope_parameters says, or absent")
        holder = rope if "rope_theta" in rope else self.config
        prefix = f"{key}." if holder is rope else ""
        theta = self._positive(holder, "rope_theta", prefix=prefix, default=10000.0)
        beside = self.config.get("rope_theta")
        if beside not in (None, theta):
            raise self._error("rope_theta", beside, f"{theta:g} as in {key}, or absent")
        if key == "rope_parameters" and other_spelling:
            # transformers 5 reads rope_scaling alone then
            base = other_spelling.get("rope_theta", beside)
            if (10000.0 if base is None else base) != theta:
                raise self._error("rope_theta", base, f"{theta:g} as in rope_parameters, beside rope_scaling")
        partial = rope.get("partial_rotary_factor", 1.0)
        if partial not in (None, 1.0):
            raise self._error(f"{key}.partial_rotary_factor", partial, "1.0")
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind == "default":
            return theta, None
        if kind != "llama3":
            raise self._error(f"{key}.rope_type", kind, '"default" or "llama3"')
        for name, wanted in LLAMA3_SCALING.items():
            if rope.get(name) != wanted:
                allowed = f"{wanted:g}, which megatron-core has built in"
                raise self._error(f"{key}.{name}", rope.get(name), allowed)
        return theta, RopeScaling(factor=self._positive(rope, "factor", prefix=f"{key}."))

    def _integer(self, key: str, *, default: int | None = None) -> int:
        value = self.config.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self._error(key, value, "a positive integer")
        largest = _LARGEST.get(key, sys.maxsize)
        if value > largest:
            raise self._error(key, value, f"at most {largest:,}")
        return value

    def _positive(
        self, holder: Mapping[str, Any], key: str, *, prefix: str = "", default: float | None = None
    ) -> float:
        value = holder.get(key)
        if value is None and default is not None:
            return default
        if (
            not isinstance(value, int | float)
            or isinstance(value, bool)
            or not 0 < value <= sys.float_info.max
        ):
            raise self._error(prefix + key, value, "a positive number")
        return float(value)

    def _switch(self, key: str) -> bool:
        value = self.config.get(key, False)
        if not isinstance(value, bool):
            raise self._error(key, value, "true or false")
        return value

    def _error(self, key: str, got: Any, allowed: str) -> ModelError:
        shown = "nothing" if got is None else json.dumps(got)
        shown = shown if len(shown) <= 200 else f"{shown[:200]}..."
        return ModelError(f"{self.path}: {key}: got {shown}, must be {allowed}")


def _settings(rope: object) -> object:
    """Kind and numbers of a scaling, whichever spelling says them."""
    if not isinstance(rope, dict):
        return rope
    kind = rope.get("rope_type", rope.get("type", "default"))
    return {k: v for k, v in rope.items() if k not in ("rope_type", "type", "rope_theta")} | {"kind": kind}

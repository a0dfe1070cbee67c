"""Our norm, and the two layer specs: megatron-core's own modules (`local`) or TransformerEngine's (`te`).

Both specs keep the norms apart from the linear layers that follow them, so a model has the same parameter
names under either, and checkpoints, import, export and resharding need one set of tables. The one exception,
the names of experts, is translated in `hf_experts.table_name`: `local` computes them one after the other, `te` all
of a rank in one grouped product.
"""

from __future__ import annotations

import importlib.util

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn

from megatron_rl.errors import ModelError
from megatron_rl.model.attention import PackedCausalAttention
from megatron_rl.platform import device
from megatron_rl_kernels.rmsnorm import rmsnorm
from megatron_rl_kernels.swiglu import swiglu

SPEC_KINDS = ("auto", "local", "te")


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, normalised in float32 (as HF and vLLM do).

    megatron-core sums the weight's gradient over tensor parallel ranks because of `weight.sequence_parallel`.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device.device()))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return rmsnorm(x, self.weight, eps=self.eps)


class Swiglu(MegatronModule):
    """silu(gate) * up, the activation of the `local` spec, in megatron-core's place for one that takes both halves.

    That place is reached by `use_te_activation_func`; despite its name nothing of TransformerEngine is in it.
    """

    def forward(self, x: Tensor) -> Tensor:
        return swiglu(x)


class Router(TopKRouter):
    """megatron-core's router with logits in the model's dtype, as HF and vLLM compute them.

    Its own product for the logits does not run where TransformerEngine is missing.
    """

    def gating(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight)


def resolve_spec_kind(kind: str, *, dtype: torch.dtype) -> str:
    """`auto` becomes `te` where TransformerEngine can run packed sequences, else `local`.

    It can on CUDA in half precision. Raises ModelError for `te` elsewhere.
    """
    if kind not in SPEC_KINDS:
        raise ModelError(f"model.spec: got {kind!r}, must be one of {', '.join(SPEC_KINDS)}")
    has_te = (
        device.has_accelerator()
        and dtype is not torch.float32
        and importlib.util.find_spec("transformer_engine") is not None
    )
    if kind == "te" and not has_te:
        raise ModelError(
            "model.spec: got 'te', but TransformerEngine cannot be used here (it needs a CUDA device, model.dtype "
            "bfloat16 and the transformer-engine package); run launch/setup.sh --gpu, or set model.spec to "
            "auto or local"
        )
    if kind == "auto":
        return "te" if has_te else "local"
    return kind


def build_block_spec(kind: str, *, num_layers: int, qk_norm: bool, moe: bool) -> TransformerBlockSubmodules:
    """`num_layers` decoder layers and the final norm, from the modules of `kind` (`local` or `te`)."""
    if kind == "te":
        from megatron.core.extensions.transformer_engine import (
            TEColumnParallelGroupedLinear,
            TEColumnParallelLinear,
            TEDotProductAttention,
            TENorm,
            TERowParallelGroupedLinear,
            TERowParallelLinear,
        )
        from megatron.core.transformer.moe.experts import TEGroupedMLP

        modules = (TENorm, TEColumnParallelLinear, TEDotProductAttention, TERowParallelLinear)
        # its activation is a setting: `bias_activation_fusion` of the config
        activation = None
        experts = _mlp_spec(TEGroupedMLP, TEColumnParallelGroupedLinear, TERowParallelGroupedLinear)
    else:
        activation = Swiglu
        modules = (RMSNorm, ColumnParallelLinear, PackedCausalAttention, RowParallelLinear)
        experts = _mlp_spec(SequentialMLP, ColumnParallelLinear, RowParallelLinear, activation)
    norm, column, attention, row = modules
    mlp = (
        ModuleSpec(module=MoELayer, submodules=MoESubmodules(experts=experts, router=Router))
        if moe
        else _mlp_spec(MLP, column, row, activation)
    )
    layer = _layer_spec(norm, column, attention, row, mlp=mlp, qk_norm=qk_norm)
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=norm)


def _mlp_spec(module: type, column: type, row: type, activation: type | None = None) -> ModuleSpec:
    submodules = MLPSubmodules(linear_fc1=column, activation_func=activation, linear_fc2=row)
    return ModuleSpec(module=module, submodules=submodules)


def _layer_spec(
    norm: type, column: type, attention: type, row: type, *, mlp: ModuleSpec, qk_norm: bool
) -> ModuleSpec:
    head_norm = norm if qk_norm else IdentityOp
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=column,
                    core_attention=attention,
                    linear_proj=row,
                    q_layernorm=head_norm,
                    k_layernorm=head_norm,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=norm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
        ),
    )

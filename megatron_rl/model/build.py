"""From a `ModelSpec` to megatron-core's GPT model: one chunk per virtual pipeline stage of this rank.

The last chunk answers with hidden states, not logits: the fused log-prob head is applied outside, on
`head_weight()`, so that [T, V] never exists. Weights start at zero; `load_hf` or a checkpoint fills them.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_rl.model.attention import packed_seq_params
from megatron_rl.model.hf_experts import table_name
from megatron_rl.model.hf_tables import padded_vocab
from megatron_rl.model.layers import build_block_spec, resolve_spec_kind
from megatron_rl.model.spec import ModelSpec, MoeSpec
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.platform import device
from megatron_rl_kernels.rope import rope_angles

Recompute = Literal["none", "full"]
_FULL_RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}

__all__ = ["PolicyGPTModel", "build_model", "packed_seq_params", "table_params", "unwrapped"]


class PolicyGPTModel(GPTModel):
    """GPTModel whose last stage returns hidden states [T, 1, H], after the final norm.

    With sequence parallelism they are this rank's [T / tp, 1, H]. Other stages return what pipeline needs.
    """

    rotates_in_attention = False

    def _preprocess(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """megatron-core's, but where attention rotates itself it gets angles, made once for all layers, instead.

        In float32 both ways have the same bits; megatron-core's makes the angles anew in every layer, sequence by
        sequence.
        """
        decoder_input, rotary_pos_emb, *rest = super()._preprocess(*args, **kwargs)
        if self.rotates_in_attention:
            kwargs["packed_seq_params"].angles = rope_angles(
                kwargs["position_ids"].flatten(), self.rotary_pos_emb.inv_freq, dtype=self.config.params_dtype
            )
            rotary_pos_emb = None
        return decoder_input, rotary_pos_emb, *rest

    def _postprocess(self, hidden_states: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
        return hidden_states

    def head_weight(self) -> Tensor:
        """[V_padded / tp, H]: this rank's rows of the head, the embedding itself when tied on one stage."""
        assert self.post_process, "only the last stage has a head"
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight


def build_model(
    spec: ModelSpec,
    layout: ParallelLayout,
    *,
    dtype: torch.dtype,
    spec_kind: str = "auto",
    recompute: Recompute = "none",
) -> list[PolicyGPTModel]:
    """The model chunks of this rank, one per virtual stage, with zero weights on this process's device.

    `recompute` "full" keeps the inputs of layers alone for the backward pass. Process groups must exist. Raises
    LayoutError when `layout` cannot split the model and ModelError for a
    `spec_kind` that cannot run here.
    """
    spec.check_layout(layout)
    kind = resolve_spec_kind(spec_kind, dtype=dtype)
    config = transformer_config(spec, layout, dtype=dtype, kind=kind, recompute=recompute)
    pp_rank = parallel_state.get_pipeline_model_parallel_rank()
    return [
        _build_chunk(spec, layout, config, kind=kind, pp_rank=pp_rank, chunk=chunk)
        for chunk in range(layout.vpp)
    ]


def table_params(chunk: torch.nn.Module) -> dict[str, Tensor]:
    """Parameters of one chunk, wrapped or not, under the names of `hf_tables`; live tensors, not copies.

    Raises ModelError for experts whose layout the tables do not describe.
    """
    return {table_name(name): param.data for name, param in unwrapped(chunk).named_parameters()}


def unwrapped(chunk: torch.nn.Module) -> Any:
    """The model inside DDP and mixed precision."""
    while isinstance(inner := getattr(chunk, "module", None), torch.nn.Module):
        chunk = inner
    return chunk


def _build_chunk(
    spec: ModelSpec, layout: ParallelLayout, config: TransformerConfig, *, kind: str, pp_rank: int, chunk: int
) -> PolicyGPTModel:
    num_layers = len(layout.chunk_layers(spec.num_layers, pp_rank=pp_rank, chunk=chunk))
    model = PolicyGPTModel(
        config,
        build_block_spec(kind, num_layers=num_layers, qk_norm=spec.qk_norm, moe=spec.moe is not None),
        vocab_size=padded_vocab(spec.vocab_size, layout.tp),
        max_sequence_length=spec.max_positions,
        pre_process=layout.has_embedding(pp_rank=pp_rank, chunk=chunk),
        post_process=layout.has_head(pp_rank=pp_rank, chunk=chunk),
        share_embeddings_and_output_weights=spec.tied,
        position_embedding_type="rope",
        rotary_base=spec.rope_theta,
        rope_scaling=spec.rope_scaling is not None,
        rope_scaling_factor=spec.rope_scaling.factor if spec.rope_scaling else 1.0,
        vp_stage=chunk if layout.vpp > 1 else None,
    )
    # elsewhere the bits would differ: half precision rounds in other places, as a kernel of the device does
    model.rotates_in_attention = (
        kind == "local" and config.params_dtype is torch.float32 and not device.has_accelerator()
    )
    return model


def transformer_config(
    spec: ModelSpec, layout: ParallelLayout, *, dtype: torch.dtype, kind: str, recompute: Recompute = "none"
) -> TransformerConfig:
    """megatron-core's settings for `spec` under `layout`, built from the modules of `kind`."""
    fused = device.has_accelerator()
    return TransformerConfig(
        **_architecture(spec),
        **_placement(layout),
        **(_FULL_RECOMPUTE if recompute == "full" else {}),
        moe_grouped_gemm=spec.moe is not None and kind == "te",
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        pipeline_dtype=dtype,
        # must be known before DDP wraps the model, else gradients are divided by dp in silence
        calculate_per_token_loss=True,
        # micro-batches differ in length; for that megatron-core wants this dispatcher, even in a dense model
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        # two interleaved stages are each other's next and previous one: batched messages would be paired crosswise
        batch_p2p_comm=fused and not (layout.pp == 2 and layout.vpp > 1),
        deallocate_pipeline_outputs=True,
        use_cpu_initialization=False,
        # initialisation also marks parameters as sharded, so it stays on, but weights always come from a file
        init_method=torch.nn.init.zeros_,
        output_layer_init_method=torch.nn.init.zeros_,
        embedding_init_method=torch.nn.init.zeros_,
        # `local` brings an activation module of its own, which megatron-core builds under this name only
        use_te_activation_func=kind == "local",
        bias_activation_fusion=fused and kind != "local",
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        # no CUDA graphs; megatron-core's default says the same in a spelling that it warns about
        cuda_graph_scope=[],
        persist_layer_norm=False,
    )


def _placement(layout: ParallelLayout) -> dict[str, Any]:
    first, last = layout.first_stage_layers, layout.last_stage_layers
    return {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        "num_layers_in_first_pipeline_stage": first,
        # of two stages one says it all; given both, megatron-core divides by its zero stages between them
        "num_layers_in_last_pipeline_stage": None if layout.pp == 2 and first is not None else last,
        "sequence_parallel": layout.sp and layout.tp > 1,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.expert_tp,
    }


def _experts(moe: MoeSpec) -> dict[str, Any]:
    """Routing as Hugging Face and vLLM do it: logits in the model's dtype, softmax in float32, no token dropped.

    Since none is dropped, padding and neighbours in a pack change nothing for a token.
    """
    return {
        "num_moe_experts": moe.num_experts,
        "moe_router_topk": moe.experts_per_token,
        "moe_ffn_hidden_size": moe.expert_ffn_size,
        # no layer has a dense MLP; a size of its own would make megatron-core copy its settings per layer
        "ffn_hidden_size": moe.expert_ffn_size,
        # a softmax over the chosen logits alone is the whole softmax scaled to sum to one over them
        "moe_router_pre_softmax": not moe.normalise_top_k,
        # the objective is the caller's loss and nothing else
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
    }


def _architecture(spec: ModelSpec) -> dict[str, Any]:
    return {
        "num_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "ffn_hidden_size": spec.ffn_size,
        "num_attention_heads": spec.num_heads,
        "num_query_groups": spec.num_kv_heads,
        "kv_channels": spec.head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": spec.norm_eps,
        "qk_layernorm": spec.qk_norm,
        "add_bias_linear": False,
        "add_qkv_bias": spec.qkv_bias,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        **(_experts(spec.moe) if spec.moe is not None else {}),
    }

"""Launches the Triton kernels of `policy_loss`: two for token kinds, three for sequence kinds; nothing waits."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from megatron_rl_kernels.policy_loss.config import MAX_LOG_RATIO, PolicyLossConfig
from megatron_rl_kernels.policy_loss.terms import METRICS, TokenInputs, TokenTerms
from megatron_rl_kernels.policy_loss.triton_kernels import (
    NUM_ROWS,
    merge_parts_kernel,
    policy_loss_kernel,
    sequence_log_ratio_kernel,
)

# 8 tokens per thread: two 16-byte loads of each input in flight
BLOCK_TOKENS = 1024
_NUM_WARPS = 4


def triton_terms(inputs: TokenInputs, config: PolicyLossConfig, cu_seqlens: Tensor | None) -> TokenTerms:
    """As `portable.token_terms`, float32 alone; sums are float32 too. Also for a chunk of a batch.

    gspo and gmpo need `cu_seqlens` [S + 1] int32, unless `inputs.sequence_log_ratio` is given.
    """
    inputs = _prepared(inputs)
    num_tokens = inputs.logprob.numel()
    grad = torch.empty_like(inputs.logprob)
    has_entropy_term = inputs.entropy is not None and config.entropy_coefficient != 0
    grad_entropy = torch.empty_like(grad) if has_entropy_term else None
    sums = grad.new_zeros(NUM_ROWS.value)
    if num_tokens:
        if config.is_sequence_level and inputs.sequence_log_ratio is None:
            assert cu_seqlens is not None
            inputs = inputs.with_sequence_log_ratio(triton_sequence_log_ratio(inputs, cu_seqlens, config))
        num_blocks = triton.cdiv(num_tokens, BLOCK_TOKENS)
        # rows whose input is missing are not written by the kernel
        parts = grad.new_zeros((NUM_ROWS.value, num_blocks))
        _launch(inputs, config, grad, grad_entropy, parts)
        merge_parts_kernel[(1 + len(METRICS),)](
            parts,
            sums,
            num_blocks,
            MAX_ROW=1 + METRICS.index("ratio_max"),
            BLOCK=BLOCK_TOKENS,
            num_warps=_NUM_WARPS,
        )
    return TokenTerms(loss=sums[0], grad=grad, grad_entropy=grad_entropy, metrics=sums[1 : 1 + len(METRICS)])


def triton_sequence_log_ratio(inputs: TokenInputs, cu_seqlens: Tensor, config: PolicyLossConfig) -> Tensor:
    """As `portable.sequence_log_ratio`, summed in float32: in each of 1024 lanes by token order, then by a tree."""
    inputs = _prepared(inputs)
    # a token that no sequence covers gets a ratio of 1
    out = torch.zeros_like(inputs.logprob)
    if out.numel() and len(cu_seqlens) > 1:
        sequence_log_ratio_kernel[(len(cu_seqlens) - 1,)](
            inputs.logprob,
            inputs.old_logprob,
            inputs.advantage,
            inputs.mask,
            cu_seqlens.contiguous(),
            out,
            *_bounds(config),
            CLIP=config.surrogate == "gmpo",
            BLOCK=BLOCK_TOKENS,
            num_warps=_NUM_WARPS,
        )
    return out


def _launch(
    inputs: TokenInputs, config: PolicyLossConfig, grad: Tensor, grad_entropy: Tensor | None, parts: Tensor
) -> None:
    lower, upper = _bounds(config)
    # a whole number given as int would compile another kernel
    numbers = (
        lower,
        upper,
        lower * config.value_low,
        upper * config.value_high,
        lower * config.grad_low,
        upper * config.grad_high,
        config.dual_clip or 0.0,
        config.tau_positive,
        config.tau_negative,
        config.kl_coefficient,
        config.entropy_coefficient,
    )
    policy_loss_kernel[(parts.shape[1],)](
        inputs.logprob,
        inputs.old_logprob,
        inputs.advantage,
        inputs.mask,
        inputs.token_weight,
        inputs.entropy,
        inputs.ref_logprob,
        inputs.correction,
        inputs.nll_weight,
        inputs.sequence_log_ratio,
        grad,
        grad_entropy,
        parts,
        grad.numel(),
        *map(float, numbers),
        SURROGATE=config.surrogate,
        DUAL_CLIP=config.dual_clip is not None,
        CISPO_MASK=config.cispo_mask,
        KL=config.kl,
        MAX_LOG_RATIO=MAX_LOG_RATIO,
        BLOCK=BLOCK_TOKENS,
        num_warps=_NUM_WARPS,
    )


def _bounds(config: PolicyLossConfig) -> tuple[float, float]:
    """Of the ratio; of the log-ratio for gmpo."""
    low, high = float(config.low), float(config.high)
    return (-low, high) if config.surrogate == "gmpo" else (1.0 - low, 1.0 + high)


def _prepared(inputs: TokenInputs) -> TokenInputs:
    """Contiguous, without graph, the mask as bytes. Raises TypeError for float64."""
    if inputs.logprob.dtype != torch.float32:
        raise TypeError(
            f"policy_loss: impl 'triton' takes float32, got logprob of {inputs.logprob.dtype}; "
            "convert the inputs or pass impl='portable'"
        )
    return inputs.map(_plain)


def _plain(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().contiguous()
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor

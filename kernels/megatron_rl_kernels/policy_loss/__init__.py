"""Policy loss of packed tokens: value, gradient by the log-prob and all metrics in one pass.

`reference` defines the op, `portable` runs it on any device, `triton` in one kernel. README.md derives the formulas.
"""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch import Tensor

from megatron_rl_kernels.dispatch import Impl, choose_impl
from megatron_rl_kernels.policy_loss.config import PolicyLossConfig
from megatron_rl_kernels.policy_loss.portable import sequence_log_ratio, token_terms
from megatron_rl_kernels.policy_loss.reference import reference_terms
from megatron_rl_kernels.policy_loss.terms import (
    METRIC_MERGE,
    METRICS,
    PolicyLoss,
    TokenInputs,
    TokenTerms,
    attach_gradient,
    merge_metrics,
)

__all__ = [
    "METRICS",
    "METRIC_MERGE",
    "PolicyLoss",
    "PolicyLossConfig",
    "TokenInputs",
    "TokenTerms",
    "merge_metrics",
    "policy_loss",
    "sequence_log_ratio",
    "token_terms",
]

_DTYPES = (torch.float32, torch.float64)


def policy_loss(
    logprob: Tensor,
    old_logprob: Tensor,
    advantage: Tensor,
    mask: Tensor,
    config: PolicyLossConfig,
    *,
    token_weight: Tensor,
    entropy: Tensor | None = None,
    ref_logprob: Tensor | None = None,
    correction: Tensor | None = None,
    nll_weight: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    impl: Impl | None = None,
) -> PolicyLoss:
    """sum over trained tokens of token_weight (correction surrogate + kl_coefficient KL - entropy_coefficient
    entropy) + nll_weight (-logprob), with its closed-form gradient by `logprob` and `entropy`.

    All tensors [N] and of one dtype, float32 or float64 (Triton: float32); `mask` bool. Where it is False the
    others may hold anything, NaN included, and gradients are exact zeros; N = 0 and all masked give zeros. A NaN
    at a trained token gives NaN. `token_weight` is the aggregation weight already divided by the *global*
    normaliser: 1 / tokens for a token mean, 1 / (sequences * trained tokens of the sequence) for a sequence mean.
    No denominator is derived here, so shares of micro-batches add up. gspo and gmpo are defined with a sequence
    mean: their 1 / T is in `token_weight` and nowhere else. `nll_weight` is not multiplied by `token_weight`.

    `cu_seqlens` [S + 1] int32, from 0 to N without gaps, is required by gspo and gmpo, ignored by the others.
    Results, metrics and their meaning: `PolicyLoss`, `METRIC_MERGE`. Raises TypeError or ValueError for arguments
    that do not fit each other or the config. On CUDA nothing waits for the device.
    """
    inputs = TokenInputs(
        logprob=logprob,
        old_logprob=old_logprob,
        advantage=advantage,
        mask=mask,
        token_weight=token_weight,
        entropy=entropy,
        ref_logprob=ref_logprob,
        correction=correction,
        nll_weight=nll_weight,
    )
    _check_tensors(inputs)
    _check_config(inputs, config)
    _check_sequences(cu_seqlens, config, inputs.logprob)
    chosen = choose_impl("policy_loss", impl, device=logprob.device, offered=_offered())
    return attach_gradient(_terms(chosen, inputs, config, cu_seqlens), logprob, entropy)


def _terms(
    impl: Impl, inputs: TokenInputs, config: PolicyLossConfig, cu_seqlens: Tensor | None
) -> TokenTerms:
    inputs = inputs.map(lambda tensor: tensor.detach())
    if impl == "reference":
        return reference_terms(inputs, config, cu_seqlens)
    if impl == "triton":
        # heavy, and needed by this implementation alone
        from megatron_rl_kernels.policy_loss.triton_op import triton_terms

        return triton_terms(inputs, config, cu_seqlens)
    if config.is_sequence_level:
        assert cu_seqlens is not None
        inputs = inputs.with_sequence_log_ratio(sequence_log_ratio(inputs, cu_seqlens, config))
    if impl in ("cuda", "host"):
        # an optional part of the package
        from megatron_rl_kernels.policy_loss.native import native_terms

        return native_terms(inputs, config)
    return token_terms(inputs, config)


@functools.cache
def _offered() -> tuple[Impl, ...]:
    has_native = importlib.util.find_spec("megatron_rl_kernels.policy_loss.native") is not None
    return ("reference", "portable", "triton", *(("cuda", "host") if has_native else ()))


def _check_tensors(inputs: TokenInputs) -> None:
    logprob = inputs.logprob
    if logprob.ndim != 1 or logprob.dtype not in _DTYPES:
        raise TypeError(
            f"policy_loss: logprob {tuple(logprob.shape)} of {logprob.dtype}, must be [N] of float32 or float64; "
            "ratios of rounded log-probs are wrong, so keep them in float32 from the start"
        )
    for name, tensor in inputs.named():
        dtype = torch.bool if name == "mask" else logprob.dtype
        if tensor.dtype != dtype:
            raise TypeError(
                f"policy_loss: {name} of {tensor.dtype}, must be {dtype} here; pass {name}.to({dtype})"
            )
        if tensor.shape != logprob.shape or tensor.device != logprob.device:
            raise ValueError(
                f"policy_loss: {name} {tuple(tensor.shape)} on {tensor.device}, must be like logprob: "
                f"{tuple(logprob.shape)} on {logprob.device}"
            )
        if name not in ("logprob", "entropy") and tensor.requires_grad:
            raise ValueError(f"policy_loss: {name} requires a gradient but is a constant here; detach it")


def _check_config(inputs: TokenInputs, config: PolicyLossConfig) -> None:
    if config.kl != "none" and inputs.ref_logprob is None:
        raise ValueError(
            f"policy_loss: kl = {config.kl!r} needs ref_logprob [N]; pass it, or set kl to 'none'"
        )
    if config.entropy_coefficient and inputs.entropy is None:
        raise ValueError(
            f"policy_loss: entropy_coefficient = {config.entropy_coefficient} needs entropy [N]; pass it, or set 0"
        )


def _check_sequences(cu_seqlens: Tensor | None, config: PolicyLossConfig, logprob: Tensor) -> None:
    if not config.is_sequence_level:
        return
    if cu_seqlens is None:
        raise ValueError(
            f"policy_loss: surrogate {config.surrogate!r} is per sequence; pass cu_seqlens [S + 1] int32"
        )
    if cu_seqlens.ndim != 1 or cu_seqlens.dtype != torch.int32 or len(cu_seqlens) == 0:
        raise TypeError(
            f"policy_loss: cu_seqlens {tuple(cu_seqlens.shape)} of {cu_seqlens.dtype}, must be [S + 1] of int32"
        )
    if cu_seqlens.device != logprob.device:
        raise ValueError(
            f"policy_loss: cu_seqlens on {cu_seqlens.device}, logprob on {logprob.device}; move one"
        )
    # reading it on a device would wait for that device; there the caller answers for it
    if cu_seqlens.device.type == "cpu":
        first, last = int(cu_seqlens[0]), int(cu_seqlens[-1])
        if first != 0 or last != len(logprob) or bool((cu_seqlens.diff() < 0).any()):
            raise ValueError(
                f"policy_loss: cu_seqlens runs from {first} to {last}, must rise from 0 to N = {len(logprob)}"
            )

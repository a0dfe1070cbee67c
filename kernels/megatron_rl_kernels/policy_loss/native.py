"""`policy_loss` in C++: the bodies of kernels/csrc on the CPU (`host`) or as a CUDA kernel (`cuda`)."""

from __future__ import annotations

import ctypes
import functools

import torch

from megatron_rl_kernels import native
from megatron_rl_kernels.policy_loss.config import PolicyLossConfig
from megatron_rl_kernels.policy_loss.terms import METRICS, TokenInputs, TokenTerms, merge_metrics

# the numbers of enum Surrogate and enum Kl in kernels/csrc/policy_loss.h; gspo is the clip of the sequence's ratio
_SURROGATES = {
    "reinforce": 0,
    "weighted": 1,
    "topr": 2,
    "cispo": 3,
    "clip": 4,
    "gspo": 4,
    "sapo": 5,
    "gmpo": 6,
}
_KLS = {"none": 0, "k1": 1, "k2": 2, "k3": 3, "k3_straight_through": 4, "k3_unbiased": 5}
_SUMS = ("loss", *METRICS)

_HOST_BLOCK = 4096
_CUDA_THREADS = 256
# two or three blocks for each multiprocessor of a large device
_CUDA_BLOCKS = 384


class _Inputs(ctypes.Structure):
    """struct PolicyInputs."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in (
            "logprob", "old_logprob", "advantage", "token_weight", "entropy", "ref_logprob", "correction", "nll_weight",
            "sequence_log_ratio", "mask",
        )),
        ("size", ctypes.c_int64),
    ]  # fmt: skip


class _Config(ctypes.Structure):
    """struct PolicyConfig."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("surrogate", "kl", "cispo_mask")),
        *((name, ctypes.c_float) for name in (
            "lower", "upper", "low_value", "low_slope", "high_value", "high_slope", "dual_clip", "tau_positive",
            "tau_negative", "kl_coefficient", "entropy_coefficient",
        )),
    ]  # fmt: skip


def native_terms(inputs: TokenInputs, config: PolicyLossConfig) -> TokenTerms:
    """`policy_loss.portable.token_terms` for float32 tensors, on the CPU or on CUDA, wherever they are.

    The same arguments and results; for gspo and gmpo `inputs.sequence_log_ratio` is required. Sums are float32 within
    a block of tokens and float64 over blocks, in an order that depends on N alone. Raises TypeError for another dtype
    and `native.BuildError` where the library cannot be built.
    """
    device, num_tokens = inputs.logprob.device, inputs.logprob.numel()
    if inputs.logprob.dtype != torch.float32:
        raise TypeError(
            f"policy_loss: impl = 'host' and 'cuda' take float32, got logprob of {inputs.logprob.dtype}; use impl = "
            "'portable' or 'reference'"
        )
    inputs = inputs.map(lambda tensor: tensor.detach().contiguous())
    grad = torch.empty_like(inputs.logprob)
    has_entropy_term = inputs.entropy is not None and config.entropy_coefficient != 0
    grad_entropy = torch.empty_like(grad) if has_entropy_term else None
    per_block = _per_block(num_tokens, device)
    parts = torch.empty((-(-num_tokens // per_block), len(_SUMS)), dtype=torch.float32, device=device)
    if num_tokens:
        native.call(
            _library(device),
            "mrl_policy_loss",
            device,
            ctypes.byref(_inputs(inputs)),
            ctypes.byref(_config(config)),
            ctypes.c_int64(per_block),
            native.address(grad),
            native.address(grad_entropy),
            native.address(parts),
        )
    sums = parts.double()
    return TokenTerms(
        loss=sums[:, 0].sum(), grad=grad, grad_entropy=grad_entropy, metrics=merge_metrics(sums[:, 1:])
    )


def _per_block(num_tokens: int, device: torch.device) -> int:
    if device.type == "cpu":
        return _HOST_BLOCK
    even = -(-num_tokens // _CUDA_BLOCKS)
    return max(-(-even // _CUDA_THREADS), 1) * _CUDA_THREADS


def _inputs(inputs: TokenInputs) -> _Inputs:
    addresses: dict[str, int] = {name: tensor.data_ptr() for name, tensor in inputs.named()}
    return _Inputs(**addresses, size=inputs.logprob.numel())


def _config(config: PolicyLossConfig) -> _Config:
    lower, upper = 1.0 - config.low, 1.0 + config.high
    is_gmpo = config.surrogate == "gmpo"
    return _Config(
        surrogate=_SURROGATES[config.surrogate],
        kl=_KLS[config.kl],
        cispo_mask=config.cispo_mask,
        lower=-config.low if is_gmpo else lower,
        upper=config.high if is_gmpo else upper,
        low_value=lower * config.value_low,
        low_slope=lower * config.grad_low,
        high_value=upper * config.value_high,
        high_slope=upper * config.grad_high,
        dual_clip=config.dual_clip or 0.0,
        tau_positive=config.tau_positive,
        tau_negative=config.tau_negative,
        kl_coefficient=config.kl_coefficient,
        entropy_coefficient=config.entropy_coefficient,
    )


@functools.cache
def _library(device: torch.device) -> ctypes.CDLL:
    library = native.library_for(device)
    library.mrl_sum_names.restype = ctypes.c_char_p
    names = tuple(library.mrl_sum_names().decode().split())
    assert names == _SUMS, f"kernels/csrc sums up {names}, METRICS say {_SUMS}"
    return library

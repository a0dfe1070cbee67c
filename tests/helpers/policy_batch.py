"""Random batches for the RL head, and one run of it: values, gradients and metrics of any implementation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_rl_kernels.linear_policy_loss import PolicyInputs, linear_policy_loss
from megatron_rl_kernels.policy_loss import PolicyLossConfig

CONFIGS = {
    "reinforce": PolicyLossConfig(surrogate="reinforce"),
    "clip": PolicyLossConfig(surrogate="clip", high=0.28),
    "gppo": PolicyLossConfig(surrogate="clip", grad_low=1.0, grad_high=1.0),
    "cispo": PolicyLossConfig(surrogate="cispo", high=2.0),
    "clip, entropy bonus": PolicyLossConfig(surrogate="clip", entropy_coefficient=0.3),
    "clip, kl": PolicyLossConfig(surrogate="clip", kl="k3", kl_coefficient=0.2),
    "gspo": PolicyLossConfig(surrogate="gspo", low=0.05, high=0.05),
    "gmpo, entropy bonus": PolicyLossConfig(surrogate="gmpo", entropy_coefficient=0.1),
}


@dataclass(frozen=True, slots=True)
class Batch:
    """Tensors of one call. Old log-probs are near the real ones, so that ratios fall on both sides of the bounds."""

    hidden: Tensor  # [N, H]
    weight: Tensor  # [V, H]
    target: Tensor  # [N]
    inputs: PolicyInputs


@dataclass(frozen=True, slots=True)
class Run:
    """What a call gave and what its backward left; `grad_weight` is None where main_grad took it."""

    loss: Tensor
    logprob: Tensor
    entropy: Tensor
    metrics: Tensor
    grad_hidden: Tensor | None
    grad_weight: Tensor | None


def make_batch(
    num_tokens: int,
    vocab: int,
    *,
    hidden_size: int = 16,
    dtype: torch.dtype = torch.float32,
    temperature: float = 1.0,
    valid_vocab: int | None = None,
    seed: int = 0,
) -> Batch:
    """A third of the tokens is masked; four sequences, one of them empty, one fully masked where N allows."""
    draw = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_tokens, hidden_size, generator=draw).to(dtype)
    weight = (torch.randn(vocab, hidden_size, generator=draw) * 2 / hidden_size**0.5).to(dtype)
    real = vocab if valid_vocab is None else valid_vocab
    target = torch.randint(real, (num_tokens,), generator=draw)
    # first and last real row of the head
    target[:2] = torch.tensor([0, real - 1])[: len(target[:2])]
    logits = hidden.double() @ weight[:real].double().T / temperature
    logprob = logits.log_softmax(1).gather(1, target[:, None]).squeeze(1).float()
    mask = torch.rand(num_tokens, generator=draw) < 0.67
    mask[:2] = True
    second, third = num_tokens // 3, num_tokens // 3 + num_tokens // 8
    mask[second:third] = False
    inputs = PolicyInputs(
        advantage=torch.randn(num_tokens, generator=draw),
        mask=mask,
        token_weight=torch.rand(num_tokens, generator=draw) / max(num_tokens, 1),
        old_logprob=logprob + 0.4 * torch.randn(num_tokens, generator=draw),
        ref_logprob=logprob + 0.4 * torch.randn(num_tokens, generator=draw),
        correction=torch.rand(num_tokens, generator=draw) + 0.5,
        nll_weight=torch.rand(num_tokens, generator=draw) / max(num_tokens, 1),
        cu_seqlens=torch.tensor([0, second, second, third, num_tokens], dtype=torch.int32),
    )
    return Batch(hidden, weight, target, inputs)


def run(batch: Batch, config: PolicyLossConfig, *, upstream: float = 1.0, **options: Any) -> Run:
    """Forward and backward on fresh leaves; `upstream` is the gradient that the loss gets."""
    hidden = batch.hidden.detach().clone().requires_grad_()
    weight = batch.weight.detach().clone().requires_grad_()
    out = linear_policy_loss(hidden, weight, batch.target, batch.inputs, config, **options)
    (out.loss * upstream).backward()
    return Run(out.loss.detach(), out.logprob, out.entropy, out.metrics, hidden.grad, weight.grad)


def reference(batch: Batch, config: PolicyLossConfig, **options: Any) -> Run:
    """The definition in float64."""
    exact = replace(batch, hidden=batch.hidden.double(), weight=batch.weight.double())
    return run(exact, config, impl="reference", **options)


def relative_error(got: Tensor, want: Tensor) -> float:
    """Norm of the difference over the norm of what is wanted; NaN anywhere gives NaN, which is below no bound."""
    return float((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-12))


def assert_matches(got: Run, want: Run, *, value_atol: float, grad_rtol: float) -> None:
    """Values by their largest absolute error, gradients by their relative error in norm."""
    for name in ("loss", "logprob", "entropy"):
        error = (getattr(got, name).double() - getattr(want, name)).abs().max()
        assert error <= value_atol, f"{name}: largest error {error:.2e}"
    for name in ("grad_hidden", "grad_weight"):
        error = relative_error(getattr(got, name), getattr(want, name))
        assert error <= grad_rtol, f"{name}: relative error {error:.2e}"
    # counts of clipped tokens are whole numbers, so no ratio may fall on the other side of its bound
    metrics = (got.metrics.double() - want.metrics).abs() / want.metrics.abs().clamp(min=1.0)
    assert metrics.max() <= max(value_atol, 1e-5), f"metrics: {got.metrics} instead of {want.metrics}"


class LargestTensor(TorchDispatchMode):
    """Remembers the largest storage that any operator returned while active."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.num_bytes = max(self.num_bytes, leaf.untyped_storage().nbytes())
        return out

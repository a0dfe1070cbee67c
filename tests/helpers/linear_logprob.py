"""Inputs for tests of linear_logprob, its results with gradients, and the same from plain float64 torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from megatron_rl_kernels.linear_logprob import linear_logprob

Results = tuple[Tensor, Tensor, Tensor, Tensor]  # log-prob, entropy, gradients of hidden and weight


def inputs(
    num_tokens: int,
    vocab: int,
    *,
    hidden_size: int = 16,
    scale: float = 1.0,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """hidden, weight, target; logits have a standard deviation of `scale` * sqrt(hidden_size)."""
    draw = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_tokens, hidden_size, generator=draw).mul(scale).to(dtype)
    weight = torch.randn(vocab, hidden_size, generator=draw).to(dtype)
    target = torch.randint(vocab, (num_tokens,), generator=draw)
    return hidden, weight, target


def upstream_of(num_tokens: int, *, seed: int = 1) -> Tensor:
    """[2, N] gradients of both signs for log-prob and entropy; the first is 0, as on a masked token."""
    upstream = torch.randn(2, num_tokens + 1, generator=torch.Generator().manual_seed(seed))
    if num_tokens > 1:
        upstream[:, 0] = 0
    return upstream[:, :num_tokens]


def run(hidden: Tensor, weight: Tensor, target: Tensor, upstream: Tensor, **options: Any) -> Results:
    """Forward and backward of the op; the gradients belong to leaves that are the tensors given."""
    hidden, weight = (tensor.detach().requires_grad_() for tensor in (hidden, weight))
    out = linear_logprob(hidden, weight, target, **options)
    assert out.entropy is not None
    grads = torch.autograd.grad((out.logprob, out.entropy), (hidden, weight), (upstream[0], upstream[1]))
    return out.logprob.detach(), out.entropy.detach(), *grads


def exact(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    upstream: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    valid_vocab: int | None = None,
) -> Results:
    """What `run` should give, from torch's cross-entropy and softmax in float64."""
    hidden, weight = (tensor.double().detach().requires_grad_() for tensor in (hidden, weight))
    if isinstance(temperature, Tensor):
        temperature = temperature.double()[:, None]
    logits = hidden @ weight[:valid_vocab].T / temperature
    logprob = -functional.cross_entropy(logits, target, reduction="none")
    entropy = torch.logsumexp(logits, 1) - (torch.softmax(logits, 1) * logits).sum(1)
    (upstream[0] * logprob + upstream[1] * entropy).sum().backward()
    assert hidden.grad is not None and weight.grad is not None
    return logprob.detach(), entropy.detach(), hidden.grad, weight.grad


def assert_matches(got: Results, want: Results, *, value_atol: float, grad_rtol: float) -> None:
    for name, actual, expected in zip(("logprob", "entropy"), got[:2], want[:2], strict=True):
        torch.testing.assert_close(
            actual.double(), expected, rtol=0, atol=value_atol, msg=lambda m, n=name: f"{n}: {m}"
        )
    for name, actual, expected in zip(("grad hidden", "grad weight"), got[2:], want[2:], strict=True):
        # a vocabulary of one token has gradients of exactly 0
        error = (actual.double() - expected).norm() / expected.norm().clamp(min=1e-4)
        assert error < grad_rtol, f"{name}: relative error {error:.2e}"

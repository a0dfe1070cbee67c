"""Benchmark cases of the ops that memory decides: losses per token, norms, activation, rotation, optimizer, copies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from bench_kernels_cases import EAGER, Case, Contender, Least, Outputs, Shape, Source, Tensors
from bench_kernels_head import CLIP_HIGH, CLIP_LOW, eager_clip_loss
from bench_kernels_peers import ACTIVATION_PEERS, NORM_PEERS, available
from torch import Tensor
from torch.nn import functional

from megatron_rl_kernels.dispatch import Impl

NORM_EPS, GROUP, LR = 1e-6, 8, 1e-3


def policy_loss_cases(shape: Shape, source: Source, impls: Iterable[Impl]) -> Iterator[Case]:
    from megatron_rl_kernels.policy_loss import PolicyLossConfig, policy_loss

    config = PolicyLossConfig(surrogate="clip", low=CLIP_LOW, high=CLIP_HIGH)
    n = shape.loss_tokens
    logprob = source.normal(n) - 2.0
    tensors = {
        "logprob": logprob,
        "old_logprob": logprob + source.normal(n, scale=0.2),
        "advantage": source.normal(n),
        "mask": source.chance(0.9, n),
        "token_weight": torch.full((n,), 1.0 / n, device=source.device),
    }

    def ours(impl: Impl) -> Contender:
        def run(t: Tensors) -> Outputs:
            out = policy_loss(
                t["logprob"], t["old_logprob"], t["advantage"], t["mask"], config,
                token_weight=t["token_weight"], impl=impl,
            )  # fmt: skip
            return {"loss": out.loss}

        return Contender(run=run)

    yield Case(
        op="policy_loss",
        is_cheap=True,
        shape=shape,
        tensors=tensors,
        row_wise=tuple(tensors),
        leaves=("logprob",),
        upstream={"loss": torch.ones((), device=source.device)},
        contenders={**{impl: ours(impl) for impl in impls}, EAGER: Contender(run=_eager_policy_loss)},
        reference=ours("reference"),
        # four float32 and a mask are read, a gradient is written, and read and written once more in backward
        least=Least(num_bytes=(21.0 * n, 29.0 * n)),
        num_rows=n,
    )


def _eager_policy_loss(t: Tensors) -> Outputs:
    """The loss by autograd, with the metrics of a step: share of clipped tokens, KL, largest ratio."""
    loss = eager_clip_loss(t, t["logprob"])
    with torch.no_grad():
        mask, advantage = t["mask"], t["advantage"]
        log_ratio = torch.where(mask, t["logprob"] - t["old_logprob"], 0.0).clamp(-20.0, 20.0)
        ratio, tokens = log_ratio.exp(), mask.sum().clamp(min=1)
        metrics = (
            ((advantage > 0) & (ratio > 1.0 + CLIP_HIGH) & mask).sum() / tokens,
            ((advantage < 0) & (ratio < 1.0 - CLIP_LOW) & mask).sum() / tokens,
            (torch.expm1(log_ratio) - log_ratio).sum() / tokens,
            torch.where(mask, ratio, 0.0).sum() / tokens,
            torch.where(mask, ratio, 0.0).amax(),
        )
    return {"loss": loss, "metrics_eager": torch.stack(metrics)}


def group_advantage_cases(shape: Shape, source: Source, impls: Iterable[Impl]) -> Iterator[Case]:
    from megatron_rl_kernels.group_advantage import group_advantage

    n = max(GROUP, shape.loss_tokens // 256)

    def ours(impl: Impl) -> Contender:
        return Contender(
            run=lambda t: {"advantage": group_advantage(t["reward"], group_size=GROUP, mode="std", impl=impl)}
        )

    def eager(t: Tensors) -> Outputs:
        groups = t["reward"].view(-1, GROUP)
        centred = groups - groups.mean(dim=1, keepdim=True)
        spread = groups.std(dim=1, keepdim=True, correction=0)
        return {"advantage": (centred / (spread + 1e-6)).flatten()}

    yield Case(
        op="group_advantage",
        is_cheap=True,
        shape=shape,
        tensors={"reward": source.normal(n)},
        row_wise=("reward",),
        leaves=(),
        upstream={},
        contenders={**{impl: ours(impl) for impl in impls}, EAGER: Contender(run=eager)},
        reference=ours("reference"),
        least=Least(num_bytes=(8.0 * n, 8.0 * n)),
        num_rows=n,
    )


def rmsnorm_cases(shape: Shape, source: Source, impls: Iterable[Impl]) -> Iterator[Case]:
    from megatron_rl_kernels.rmsnorm import rmsnorm

    n, h = shape.tokens, shape.hidden

    def ours(impl: Impl) -> Contender:
        return Contender(run=lambda t: {"out": rmsnorm(t["x"], t["weight"], eps=NORM_EPS, impl=impl)})

    def eager(t: Tensors) -> Outputs:
        x = t["x"].float()
        scaled = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + NORM_EPS)
        return {"out": t["weight"] * scaled.to(t["x"].dtype)}

    def fused(t: Tensors) -> Outputs:
        return {"out": functional.rms_norm(t["x"], (h,), t["weight"], NORM_EPS)}

    peers, missing = available(NORM_PEERS, source.device)
    x = source.normal(n, h, dtype=shape.dtype)
    size = _bytes(x)
    yield Case(
        op="rmsnorm",
        shape=shape,
        tensors={"x": x, "weight": source.normal(h, dtype=shape.dtype)},
        row_wise=("x",),
        leaves=("x", "weight"),
        upstream={"out": source.normal(n, h, dtype=shape.dtype)},
        contenders={
            **{impl: ours(impl) for impl in impls},
            EAGER: Contender(run=eager),
            "torch rms_norm": Contender(run=fused),
            **peers,
        },
        reference=ours("reference"),
        least=Least(num_bytes=(2 * size, 5 * size)),
        num_rows=n,
        unavailable=missing,
    )


def swiglu_cases(shape: Shape, source: Source, impls: Iterable[Impl]) -> Iterator[Case]:
    from megatron_rl_kernels.swiglu import swiglu

    n = shape.tokens

    def ours(impl: Impl) -> Contender:
        return Contender(run=lambda t: {"out": swiglu(t["x"], impl=impl)})

    def eager(t: Tensors) -> Outputs:
        gate, up = t["x"].chunk(2, dim=-1)
        return {"out": functional.silu(gate) * up}

    peers, missing = available(ACTIVATION_PEERS, source.device)
    x = source.normal(n, 2 * shape.ffn, dtype=shape.dtype)
    size = _bytes(x)
    yield Case(
        op="swiglu",
        shape=shape,
        tensors={"x": x},
        row_wise=("x",),
        leaves=("x",),
        upstream={"out": source.normal(n, shape.ffn, dtype=shape.dtype)},
        contenders={**{impl: ours(impl) for impl in impls}, EAGER: Contender(run=eager), **peers},
        reference=ours("reference"),
        least=Least(num_bytes=(1.5 * size, 4.0 * size)),
        num_rows=n,
        unavailable=missing,
    )


def _bytes(tensor: Tensor) -> float:
    return float(tensor.numel() * tensor.element_size())

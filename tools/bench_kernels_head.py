"""Benchmark cases of the ops around the LM head: linear_logprob, linear_policy_loss, logprob_from_logits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from bench_kernels_cases import EAGER, Case, Contender, Least, Outputs, Shape, Source, Tensors
from bench_kernels_peers import HEAD_PEERS, LOGIT_PEERS, available
from torch import Tensor
from torch.nn import functional

from megatron_rl_kernels.dispatch import Impl
from megatron_rl_kernels.linear_logprob import linear_logprob

CLIP_LOW, CLIP_HIGH = 0.2, 0.28
# standard deviation of the logits, about that of a trained model
LOGIT_SCALE = 2.0


def linear_logprob_cases(shape: Shape, source: Source, impls: Iterable[Impl]) -> Iterator[Case]:
    yield from (_linear_logprob(shape, source, impls, with_entropy=flag) for flag in (False, True))


def _linear_logprob(shape: Shape, source: Source, impls: Iterable[Impl], *, with_entropy: bool) -> Case:
    def ours(impl: Impl) -> Contender:
        def run(t: Tensors) -> Outputs:
            out = linear_logprob(t["hidden"], t["weight"], t["target"], with_entropy=with_entropy, impl=impl)
            return _named(out.logprob, out.entropy)

        # the reference keeps its logits
        return Contender(run=run, gemms=(1, 2 if impl == "reference" else 3))

    def eager(t: Tensors) -> Outputs:
        logits = functional.linear(t["hidden"], t["weight"]).float()
        return _named(*_eager_logprob(logits, t["target"], with_entropy=with_entropy))

    n = shape.tokens
    peers, missing = available(HEAD_PEERS, source.device) if not with_entropy else ({}, {})
    tensors = head_inputs(shape, source)
    upstream = {"logprob": source.normal(n)} | (
        {"entropy": source.normal(n, scale=0.01)} if with_entropy else {}
    )
    return Case(
        op="linear_logprob",
        variant="entropy" if with_entropy else "",
        shape=shape,
        tensors=tensors,
        row_wise=("hidden", "target"),
        leaves=("hidden", "weight"),
        upstream=upstream,
        contenders={
            **{impl: ours(impl) for impl in impls},
            EAGER: Contender(run=eager, gemms=(1, 2)),
            **peers,
        },
        reference=ours("reference"),
        least=head_least(shape),
        num_rows=n,
        unavailable=missing,
    )


def head_inputs(shape: Shape, source: Source) -> Tensors:
    return {
        "hidden": source.normal(shape.tokens, shape.hidden, dtype=shape.dtype),
        "weight": source.normal(
            shape.local_vocab, shape.hidden, dtype=shape.dtype, scale=LOGIT_SCALE / shape.hidden**0.5
        ),
        "target": source.integers(shape.local_vocab, shape.tokens),
    }


def head_least(shape: Shape) -> Least:
    """One product forward and two backward; every operand once per product, the head's gradient in float32."""
    element = torch.empty(0, dtype=shape.dtype).element_size()
    head, hidden = shape.local_vocab * shape.hidden * element, shape.tokens * shape.hidden * element
    logits = shape.tokens * shape.local_vocab * element
    return Least(
        gemm_flops=2.0 * shape.tokens * shape.hidden * shape.local_vocab,
        gemms=(1, 3),
        num_bytes=(
            head + hidden,
            3 * head + 4 * hidden + 4 * shape.local_vocab * shape.hidden + 4 * logits,
        ),
    )


def linear_policy_loss_cases(shape: Shape, source: Source, impls: Iterable[Impl]) -> Iterator[Case]:
    from megatron_rl_kernels.linear_policy_loss import PolicyInputs, linear_policy_loss
    from megatron_rl_kernels.policy_loss import PolicyLossConfig

    config = PolicyLossConfig(surrogate="clip", low=CLIP_LOW, high=CLIP_HIGH)
    n = shape.tokens
    tensors = head_inputs(shape, source)
    tensors |= {
        "old_logprob": _likely_logprob(tensors, shape) + source.normal(n, scale=0.2),
        "advantage": source.normal(n),
        # of packed rollouts: every token trained on, so that all contenders do the same products
        "mask": torch.ones(n, dtype=torch.bool, device=source.device),
        "token_weight": torch.full((n,), 1.0 / n, device=source.device),
    }
    names = ("old_logprob", "advantage", "mask", "token_weight")

    def ours(impl: Impl) -> Contender:
        def run(t: Tensors) -> Outputs:
            inputs = PolicyInputs(**{name: t[name] for name in names})
            out = linear_policy_loss(t["hidden"], t["weight"], t["target"], inputs, config, impl=impl)
            return {"loss": out.loss, "logprob": out.logprob, "entropy": out.entropy}

        # backward only multiplies by the upstream scalar
        return Contender(run=run, gemms=(1, 2) if impl == "reference" else (3, 0))

    def eager(t: Tensors) -> Outputs:
        logits = functional.linear(t["hidden"], t["weight"]).float()
        logprob, _ = _eager_logprob(logits, t["target"], with_entropy=False)
        assert logprob is not None
        return {"loss": eager_clip_loss(t, logprob), "logprob": logprob.detach()}

    def two_ops(t: Tensors) -> Outputs:
        logprob = linear_logprob(t["hidden"], t["weight"], t["target"], with_entropy=False).logprob
        return {"loss": eager_clip_loss(t, logprob), "logprob": logprob.detach()}

    yield Case(
        op="linear_policy_loss",
        shape=shape,
        tensors=tensors,
        row_wise=("hidden", "target", *names),
        leaves=("hidden", "weight"),
        upstream={"loss": torch.ones((), device=source.device)},
        contenders={
            **{impl: ours(impl) for impl in impls},
            EAGER: Contender(run=eager, gemms=(1, 2)),
            "linear_logprob + eager loss": Contender(run=two_ops, gemms=(1, 3)),
        },
        reference=ours("reference"),
        least=head_least(shape),
        num_rows=n,
    )


def _likely_logprob(t: Tensors, shape: Shape) -> Tensor:
    """About the log-probs of these inputs, so that ratios are around 1: log-sum-exp of V normal logits is known."""
    logit = (t["hidden"].float() * t["weight"][t["target"]].float()).sum(dim=1)
    return logit - math.log(shape.local_vocab) - LOGIT_SCALE**2 / 2


def eager_clip_loss(t: Tensors, logprob: Tensor) -> Tensor:
    """PPO's clipped loss as one writes it down."""
    ratio = torch.where(t["mask"], logprob - t["old_logprob"], 0.0).clamp(-20.0, 20.0).exp()
    clipped = ratio.clamp(1.0 - CLIP_LOW, 1.0 + CLIP_HIGH)
    loss = torch.maximum(-t["advantage"] * ratio, -t["advantage"] * clipped)
    return (torch.where(t["mask"], loss, 0.0) * t["token_weight"]).sum()


def logprob_from_logits_cases(shape: Shape, source: Source, impls: Iterable[Impl]) -> Iterator[Case]:
    from megatron_rl_kernels import logprob_from_logits as op

    n, vocab = shape.tokens, shape.local_vocab

    def ours(impl: Impl, *, in_place: bool = False) -> Contender:
        call = op.logprob_from_logits_ if in_place else op.logprob_from_logits

        def run(t: Tensors) -> Outputs:
            # autograd does not let a leaf be overwritten
            logits = t["logits"].view_as(t["logits"]) if in_place else t["logits"]
            out = call(logits, t["target"], with_entropy=False, impl=impl)
            return _named(out.logprob, None)

        return Contender(run=run, destroys=("logits",) if in_place else ())

    def eager(t: Tensors) -> Outputs:
        return _named(*_eager_logprob(t["logits"].float(), t["target"], with_entropy=False))

    peers, missing = available(LOGIT_PEERS, source.device)
    size = n * vocab * torch.empty(0, dtype=shape.dtype).element_size()
    yield Case(
        op="logprob_from_logits",
        shape=shape,
        tensors={
            "logits": source.normal(n, vocab, dtype=shape.dtype, scale=LOGIT_SCALE),
            "target": source.integers(vocab, n),
        },
        row_wise=("logits", "target"),
        leaves=("logits",),
        upstream={"logprob": source.normal(n)},
        contenders={
            **{impl: ours(impl) for impl in impls},
            **{f"{impl} in place": ours(impl, in_place=True) for impl in impls if impl != "reference"},
            EAGER: Contender(run=eager),
            **peers,
        },
        reference=ours("reference"),
        least=Least(num_bytes=(size, 3 * size)),
        num_rows=n,
        unavailable=missing,
    )


def _eager_logprob(logits: Tensor, target: Tensor, *, with_entropy: bool) -> tuple[Tensor, Tensor | None]:
    logprobs = logits.log_softmax(dim=-1)
    entropy = -(logprobs.exp() * logprobs).sum(dim=-1) if with_entropy else None
    return logprobs.gather(1, target[:, None]).squeeze(1), entropy


def _named(logprob: Tensor, entropy: Tensor | None) -> Outputs:
    return {"logprob": logprob} | ({} if entropy is None else {"entropy": entropy})

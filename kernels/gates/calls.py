"""Which calls of which ops the gates compile: sizes, dtypes and options of production, through the public functions.

A call stands for all that launch the same code: sizes matter by what Triton derives from them (divisible by 16 or
not) and by what the ops' tables choose. Tensors have no values here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

# a micro-batch of long rollouts; hidden size and vocabulary of an 8B model; one of four shards of its head
TOKENS, HIDDEN, VOCAB, SHARD = 8192, 4096, 151936, 37984
LOSS_TOKENS, PARAMS, SEQUENCES = 1 << 20, 1 << 24, 64
BF16, F32 = torch.bfloat16, torch.float32

Call = Callable[[], Any]


def cuda(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.empty(shape, device="cuda", dtype=dtype)


def target(tokens: int = TOKENS) -> Tensor:
    return cuda(tokens, dtype=torch.int64)


def head(vocab: int = VOCAB, dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states and head, both with a gradient, and targets."""
    hidden, weight = cuda(TOKENS, HIDDEN, dtype=dtype), cuda(vocab, HIDDEN, dtype=dtype)
    return hidden.requires_grad_(), weight.requires_grad_(), target()


def linear_logprob_calls() -> Iterator[tuple[str, Call]]:
    from megatron_rl_kernels.linear_logprob import linear_logprob

    def call(vocab: int = VOCAB, **options: Any) -> None:
        linear_logprob(*head(vocab), **options)

    yield "log-prob", partial(call, with_entropy=False)
    yield "with entropy", partial(call, with_entropy=True)
    yield "shard, temperature of each token", lambda: call(SHARD, temperature=cuda(TOKENS))


def linear_policy_loss_calls() -> Iterator[tuple[str, Call]]:
    from megatron_rl_kernels.linear_policy_loss import PolicyInputs, linear_policy_loss
    from megatron_rl_kernels.policy_loss import PolicyLossConfig

    def call(config: PolicyLossConfig, **options: Any) -> None:
        inputs = PolicyInputs(
            advantage=cuda(TOKENS),
            mask=cuda(TOKENS, dtype=torch.bool),
            token_weight=cuda(TOKENS),
            old_logprob=cuda(TOKENS),
        )
        linear_policy_loss(*head(), inputs, config, **options)

    clip = PolicyLossConfig(surrogate="clip", low=0.2, high=0.28)
    bonus = PolicyLossConfig(surrogate="clip", low=0.2, high=0.28, entropy_coefficient=1e-3)
    yield "clip", lambda: call(clip)
    yield "entropy bonus, temperature of each token", lambda: call(bonus, temperature=cuda(TOKENS))


def logprob_from_logits_calls() -> Iterator[tuple[str, Call]]:
    from megatron_rl_kernels.logprob_from_logits import logprob_from_logits, logprob_from_logits_

    def call(dtype: torch.dtype, with_entropy: bool) -> None:
        logprob_from_logits(cuda(TOKENS, VOCAB, dtype=dtype), target(), with_entropy=with_entropy)

    yield "bfloat16", partial(call, BF16, False)
    yield "bfloat16 with entropy", partial(call, BF16, True)
    yield "float32", partial(call, F32, False)
    yield "float32 with entropy", partial(call, F32, True)
    yield "in place", lambda: logprob_from_logits_(cuda(TOKENS, VOCAB, dtype=BF16), target())


def policy_loss_calls() -> Iterator[tuple[str, Call]]:
    from megatron_rl_kernels.policy_loss import PolicyLossConfig, policy_loss

    def call(config: PolicyLossConfig, *options: str) -> None:
        ends = cuda(SEQUENCES + 1, dtype=torch.int32) if config.is_sequence_level else None
        more: dict[str, Any] = {name: cuda(LOSS_TOKENS) for name in options}
        policy_loss(
            cuda(LOSS_TOKENS),
            cuda(LOSS_TOKENS),
            cuda(LOSS_TOKENS),
            cuda(LOSS_TOKENS, dtype=torch.bool),
            config,
            token_weight=cuda(LOSS_TOKENS),
            cu_seqlens=ends,
            **more,
        )

    full = PolicyLossConfig(
        surrogate="clip",
        low=0.2,
        high=0.28,
        dual_clip=3.0,
        kl="k3",
        kl_coefficient=1e-3,
        entropy_coefficient=1e-3,
    )
    yield "clip", partial(call, PolicyLossConfig(surrogate="clip", low=0.2, high=0.28))
    yield "all terms", partial(call, full, "entropy", "ref_logprob", "correction", "nll_weight")
    yield "reinforce", partial(call, PolicyLossConfig(surrogate="reinforce"))
    yield "cispo", partial(call, PolicyLossConfig(surrogate="cispo"))
    yield "gspo", partial(call, PolicyLossConfig(surrogate="gspo", low=3e-4, high=4e-4))
    yield "gmpo", partial(call, PolicyLossConfig(surrogate="gmpo", low=0.4, high=0.4))


def group_advantage_calls() -> Iterator[tuple[str, Call]]:
    from megatron_rl_kernels.group_advantage import group_advantage

    def call(mode: Any) -> None:
        group_advantage(cuda(8192), group_size=8, mode=mode, validate=False)

    for mode in ("mean", "std", "leave_one_out", "batch_std"):
        # not validated: that would read what has no values here
        yield mode, partial(call, mode)
    ids = partial(cuda, 8192, dtype=torch.int64)
    yield "by ids", lambda: group_advantage(cuda(8192), group_ids=ids(), mode="std", validate=False)


def rmsnorm_calls() -> Iterator[tuple[str, Call]]:
    from megatron_rl_kernels.rmsnorm import rmsnorm, rmsnorm_residual

    def inputs() -> tuple[Tensor, Tensor]:
        return cuda(TOKENS, HIDDEN, dtype=BF16), cuda(HIDDEN, dtype=BF16)

    yield "plain", lambda: rmsnorm(*inputs(), eps=1e-6)
    yield (
        "residual",
        lambda: rmsnorm_residual(
            cuda(TOKENS, HIDDEN, dtype=BF16),
            cuda(TOKENS, HIDDEN, dtype=BF16),
            cuda(HIDDEN, dtype=BF16),
            eps=1e-6,
        ),
    )


def rope_calls() -> Iterator[tuple[str, Call]]:
    from megatron_rl_kernels.rope import rope

    positions = partial(cuda, TOKENS, dtype=torch.int64)
    for interleaved in (False, True):
        name = "interleaved" if interleaved else "halves"
        yield (
            name,
            partial(
                lambda flag: rope(cuda(TOKENS, 32, 128, dtype=BF16), positions(), cuda(64), interleaved=flag),
                interleaved,
            ),
        )


def swiglu_calls() -> Iterator[tuple[str, Call]]:
    from megatron_rl_kernels.swiglu import swiglu

    yield "plain", lambda: swiglu(cuda(TOKENS, 2 * 12288, dtype=BF16))


def adamw_calls() -> Iterator[tuple[str, Call]]:
    from megatron_rl_kernels.adamw import adamw_

    def call(grad: torch.dtype) -> None:
        master, exp_avg, exp_avg_sq = (cuda(PARAMS) for _ in range(3))
        adamw_(
            master, exp_avg, exp_avg_sq, cuda(PARAMS, dtype=grad), lr=1e-6, betas=(0.9, 0.95), weight_decay=0.1,
            step=10, grad_scale=cuda(1), weight=cuda(PARAMS, dtype=BF16),
        )  # fmt: skip

    yield "float32 gradient", lambda: call(F32)
    yield "bfloat16 gradient", lambda: call(BF16)


def reshard_copy_calls() -> Iterator[tuple[str, Call]]:
    from megatron_rl_kernels.reshard_copy import Slice, reshard_pack, reshard_unpack

    def slices(dtype: torch.dtype) -> list[Slice]:
        by_rows, by_columns = cuda(HIDDEN, HIDDEN, dtype=dtype), cuda(HIDDEN, HIDDEN, dtype=dtype)
        half = HIDDEN // 2
        return [
            Slice.along(by_rows, dim=0, length=half, offset=0),
            Slice.along(by_columns, dim=1, length=half, offset=half * HIDDEN),
        ]

    size = HIDDEN * HIDDEN
    yield "pack", lambda: reshard_pack(slices(BF16), cuda(size, dtype=BF16))
    yield "pack float32", lambda: reshard_pack(slices(F32), cuda(size, dtype=BF16))
    yield "unpack", lambda: reshard_unpack(cuda(size, dtype=BF16), slices(BF16))


OPS: dict[str, Callable[[], Iterator[tuple[str, Call]]]] = {
    "linear_logprob": linear_logprob_calls,
    "linear_policy_loss": linear_policy_loss_calls,
    "logprob_from_logits": logprob_from_logits_calls,
    "policy_loss": policy_loss_calls,
    "group_advantage": group_advantage_calls,
    "rmsnorm": rmsnorm_calls,
    "swiglu": swiglu_calls,
    "rope": rope_calls,
    "adamw": adamw_calls,
    "reshard_copy": reshard_copy_calls,
}

"""The whole RL head in one call: hidden states and head in, policy loss and ready gradients out, three products.

A chunk of tokens goes logits -> log-probs -> policy loss -> gradient of the logits, in place -> gradients, before the
next one starts. `reference` defines the op, `portable` runs it on any device, `triton` on CUDA. README.md derives it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl_kernels.dispatch import Impl, choose_impl
from megatron_rl_kernels.head_checks import real_rows
from megatron_rl_kernels.linear_policy_loss.autograd import LinearPolicyLossFunction
from megatron_rl_kernels.linear_policy_loss.checks import OP, check_arguments, check_reference
from megatron_rl_kernels.linear_policy_loss.portable import PortableHead, default_chunk_tokens
from megatron_rl_kernels.linear_policy_loss.reference import linear_policy_loss_reference
from megatron_rl_kernels.linear_policy_loss.run import Call, ChunkHead
from megatron_rl_kernels.linear_policy_loss.types import LinearPolicyLoss, PolicyInputs
from megatron_rl_kernels.policy_loss import PolicyLossConfig

__all__ = ["LinearPolicyLoss", "PolicyInputs", "linear_policy_loss", "linear_policy_loss_reference"]

_OFFERED: tuple[Impl, ...] = ("reference", "portable", "triton")


def linear_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    inputs: PolicyInputs,
    config: PolicyLossConfig,
    *,
    temperature: float | Tensor = 1.0,
    vocab_start: int = 0,
    valid_vocab: int | None = None,
    group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    main_grad: Tensor | None = None,
    loss_scale: float | Tensor = 1.0,
    chunk_tokens: int | None = None,
    impl: Impl | None = None,
) -> LinearPolicyLoss:
    """`policy_loss` of the log-probs and entropies of softmax(hidden @ weight.T / temperature), differentiable in
    hidden and weight; `inputs` and `config` mean what they mean there.

    hidden [N, H]; weight [V_local, H] of the same dtype: rows vocab_start .. vocab_start + V_local of the head;
    target [N] int64 global token ids, anything where masked (a trained one that no shard owns gives a NaN loss).
    temperature: a number, or [N] float32 (one that is not finite and above 0 gives NaN). `valid_vocab`: global number
    of real rows; those beyond are padding, take no part and get zero gradient, whatever they hold. None: all are real.
    Values are float32 (float64 for float64 inputs); gradients are summed in float32 and rounded once.

    Masked tokens are dropped before the first product: exact zeros in the gradient of `hidden`, 0 in `logprob` and
    `entropy`; their rows may hold inf. Counting the others is where the host waits for the device, once; gspo and
    gmpo wait once more for `cu_seqlens`.

    `group` is the tensor-parallel group (None: `weight` is the whole head); every rank passes the same target and
    inputs and gets the same bits. The gradient of `hidden` is summed over it here, once. `sequence_parallel`:
    hidden is this rank's [N / tp, H], gathered here along tokens in rank order; its gradient is reduce-scattered.

    Gradients are made in forward, unless under no_grad, and handed over by the one backward (a second raises).
    `main_grad` [V_local, H] float32: the head's gradient times `loss_scale` is added to it in forward, `weight`
    gets none. `loss_scale` is the upstream gradient that backward will bring: one that differs raises (on CUDA it
    turns the gradient of `hidden` and a row of `main_grad` into NaN). So call this outside of recomputed
    (checkpointed) regions, and under no_grad where no backward will run. Without `main_grad` any upstream
    gradient is right.

    `chunk_tokens` trained tokens are in work at once, with a workspace of chunk_tokens * V_local float32
    (portable; None: 160 MiB of it) or bfloat16 (triton; None: 4096 tokens). gspo and gmpo keep sequences whole;
    one longer than a chunk makes the logits twice. Raises TypeError or ValueError for arguments that do not fit.
    """
    check_arguments(
        hidden,
        weight,
        target,
        inputs,
        temperature,
        group=group,
        sequence_parallel=sequence_parallel,
        main_grad=main_grad,
        loss_scale=loss_scale,
        chunk_tokens=chunk_tokens,
        is_sequence_level=config.is_sequence_level,
    )
    num_rows = real_rows(OP, weight, vocab_start, valid_vocab, group)
    if isinstance(temperature, Tensor):
        # reading the values would stop the device: NaN marks the tokens instead
        usable = torch.isfinite(temperature) & (temperature > 0)
        temperature = torch.where(usable, temperature, float("nan"))
    chosen = choose_impl("linear_policy_loss", impl, device=hidden.device, offered=_OFFERED)
    if chosen == "reference":
        check_reference(vocab_start=vocab_start, group=group, main_grad=main_grad)
        return linear_policy_loss_reference(
            hidden, weight, target, inputs, config, temperature=temperature, valid_vocab=valid_vocab
        )
    build_head, default_tokens = _head_of(chosen, hidden, weight, num_rows)
    call = Call(
        inputs=inputs,
        config=config,
        temperature=temperature,
        vocab_start=vocab_start,
        num_rows=num_rows,
        group=group,
        sequence_parallel=sequence_parallel,
        main_grad=main_grad,
        loss_scale=loss_scale,
        chunk_tokens=default_tokens if chunk_tokens is None else chunk_tokens,
        records=torch.is_grad_enabled(),
        build_head=build_head,
    )
    return LinearPolicyLoss(*LinearPolicyLossFunction.apply(hidden, weight, target, call))


def _head_of(
    impl: Impl, hidden: Tensor, weight: Tensor, num_rows: int
) -> tuple[Callable[..., ChunkHead], int]:
    """What makes the logits, and how many tokens it takes at once by default."""
    if impl == "portable":
        return PortableHead, default_chunk_tokens(num_rows, torch.promote_types(hidden.dtype, torch.float32))
    # triton is heavy, and only this implementation needs it
    from megatron_rl_kernels.linear_policy_loss.triton_op import CHUNK_TOKENS, TritonHead, check_layout

    check_layout(hidden, weight)
    return TritonHead, CHUNK_TOKENS

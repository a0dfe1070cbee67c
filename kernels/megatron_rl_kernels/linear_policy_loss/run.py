"""One call of `linear_policy_loss`: chunk by chunk from hidden states to ready gradients, for any head.

A chunk's logits become its gradient before the next chunk starts, so that three products do: logits, dX, dW.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl_kernels.linear_logprob.stats import SUM, TOP, base_of, merge_over_group, outcome
from megatron_rl_kernels.linear_policy_loss.chunks import Chunk, keep_trained, plan_sequences, plan_tokens
from megatron_rl_kernels.linear_policy_loss.objective import Objective
from megatron_rl_kernels.linear_policy_loss.types import LinearPolicyLoss, PolicyInputs, TokenValues
from megatron_rl_kernels.policy_loss import PolicyLoss, PolicyLossConfig


class ChunkHead(Protocol):
    """Logits of one chunk of tokens on one shard of the head; `portable.PortableHead` says what the parts mean."""

    def statistics(self, chunk: Tensor, column: Tensor, temperature: float | Tensor) -> Tensor: ...

    def gradients(
        self,
        grad: Tensor,
        grad_entropy: Tensor | None,
        values: TokenValues,
        *,
        grad_chunk: Tensor | None,
        grad_weight: Tensor | None,
        is_first: bool,
    ) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """What a call knows besides hidden states, head and targets. `num_rows`: real rows of this shard."""

    inputs: PolicyInputs
    config: PolicyLossConfig
    temperature: float | Tensor
    vocab_start: int
    num_rows: int
    group: dist.ProcessGroup | None
    sequence_parallel: bool
    main_grad: Tensor | None
    loss_scale: float | Tensor
    chunk_tokens: int
    # False under no_grad: then no gradient is made and main_grad is not touched
    records: bool
    # (weight, num_rows=, chunk_tokens=, keep=, with_entropy_gradient=) -> head
    build_head: Callable[..., ChunkHead]


@dataclass(frozen=True, slots=True)
class Gradients:
    """Of the loss times 1, or times `loss_scale` where `main_grad` took the head's. None: not needed."""

    hidden: Tensor | None  # of this rank's hidden states, float32, summed over the group
    weight: Tensor | None  # [V_local, H] float32; None too where it went into main_grad


def run(
    hidden: Tensor, weight: Tensor, target: Tensor, call: Call, *, want_hidden: bool, want_weight: bool
) -> tuple[LinearPolicyLoss, Gradients]:
    """Values of all N tokens and, where wanted, gradients. See `linear_policy_loss` for shapes."""
    if not want_weight:
        # nothing is announced to a head that learns nothing, so backward may bring any upstream gradient
        call = replace(call, main_grad=None)
    given = call.inputs if call.config.is_sequence_level else replace(call.inputs, cu_seqlens=None)
    index, inputs = keep_trained(given, torch.promote_types(hidden.dtype, torch.float32))
    objective = Objective(inputs, call.config)
    chunks, are_whole = _plan(len(index), inputs, call)
    passes = _Passes(hidden, weight, target, index, call, want_hidden=want_hidden, want_weight=want_weight)
    known: PolicyLoss | None = None
    wants_any = want_hidden or want_weight
    if not wants_any or not are_whole:
        for chunk in chunks:
            passes.forward(chunk)
        known = objective.of_all(passes.logprob, passes.entropy)
    if wants_any:
        for chunk in chunks:
            values = passes.forward(chunk)
            grad, grad_entropy = objective.gradient(chunk, values.logprob, values.entropy, known)
            passes.backward(chunk, values, grad, grad_entropy)
    whole = known or objective.of_all(passes.logprob, passes.entropy)
    result = LinearPolicyLoss(
        whole.loss, passes.spread(passes.logprob), passes.spread(passes.entropy), whole.metrics
    )
    return result, passes.finish()


def _plan(num_tokens: int, inputs: PolicyInputs, call: Call) -> tuple[list[Chunk], bool]:
    """Chunks, and whether each has all that its gradients depend on: else all log-probs must be known first."""
    if inputs.cu_seqlens is not None:
        whole = plan_sequences(inputs.cu_seqlens.tolist(), call.chunk_tokens)
        return (plan_tokens(num_tokens, call.chunk_tokens), False) if whole is None else (whole, True)
    return plan_tokens(num_tokens, call.chunk_tokens), True


class _Passes:
    """Forward and backward of chunks of the trained tokens (positions `index` [n]), and what they add up to."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        index: Tensor,
        call: Call,
        *,
        want_hidden: bool,
        want_weight: bool,
    ) -> None:
        self._call = call
        self._index = index
        self._every = _gathered(hidden, call) if call.sequence_parallel else hidden
        self._column = target[index] - call.vocab_start
        temperature = call.temperature
        self._temperature = temperature[index] if isinstance(temperature, Tensor) else temperature
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        self.logprob = hidden.new_empty(len(index), dtype=dtype)
        self.entropy = torch.empty_like(self.logprob)
        self._head = call.build_head(
            weight,
            num_rows=call.num_rows,
            chunk_tokens=min(call.chunk_tokens, len(index)),
            keep=want_hidden or want_weight,
            with_entropy_gradient=call.config.entropy_coefficient != 0,
        )
        self._grad_hidden = (
            hidden.new_empty((len(index), hidden.shape[1]), dtype=dtype) if want_hidden else None
        )
        self._grad_weight = self._new_grad_weight(weight, dtype) if want_weight else None
        self._is_first = call.main_grad is None
        self._exchanges: list[Any] = []

    def forward(self, chunk: Chunk) -> TokenValues:
        tokens = chunk.tokens
        temperature = self._temperature
        stats = self._head.statistics(
            self._every[self._index[tokens]],
            self._column[tokens],
            temperature[tokens] if isinstance(temperature, Tensor) else temperature,
        )
        values = _token_values(stats, self._call.group)
        self.logprob[tokens], self.entropy[tokens] = values.logprob, values.entropy
        return values

    def backward(self, chunk: Chunk, values: TokenValues, grad: Tensor, grad_entropy: Tensor | None) -> None:
        """Of the chunk whose forward came last."""
        call = self._call
        if call.main_grad is not None:
            grad = grad * call.loss_scale
            grad_entropy = None if grad_entropy is None else grad_entropy * call.loss_scale
        grad_chunk = None if self._grad_hidden is None else self._grad_hidden[chunk.tokens]
        self._head.gradients(
            grad,
            grad_entropy,
            values,
            grad_chunk=grad_chunk,
            grad_weight=self._grad_weight,
            is_first=self._is_first,
        )
        self._is_first = False
        if grad_chunk is not None and not call.sequence_parallel and _is_shared(call.group):
            # each shard has a part of the sum over the vocabulary; it travels while the next chunk computes
            self._exchanges.append(dist.all_reduce(grad_chunk, group=call.group, async_op=True))

    def finish(self) -> Gradients:
        for exchange in self._exchanges:
            exchange.wait()
        weight = self._grad_weight
        if weight is not None and self._call.main_grad is not None:
            weight = None
        elif weight is not None and self._is_first:
            weight.zero_()
        hidden = self._grad_hidden
        if hidden is not None:
            hidden = self.spread(hidden)
            if self._call.sequence_parallel:
                hidden = _scattered(hidden, self._call)
        return Gradients(hidden, weight)

    def spread(self, trained: Tensor) -> Tensor:
        """[n, ...] of the trained tokens -> [N, ...] with 0 elsewhere."""
        num_tokens = self._every.shape[0]
        if len(trained) == num_tokens:
            return trained
        return trained.new_zeros((num_tokens, *trained.shape[1:])).index_copy_(0, self._index, trained)

    def _new_grad_weight(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        if self._call.main_grad is not None:
            return self._call.main_grad
        grad = weight.new_empty(weight.shape, dtype=dtype)
        grad[self._call.num_rows :] = 0
        return grad


def _token_values(stats: Tensor, group: dist.ProcessGroup | None) -> TokenValues:
    """From the statistics [5, n] of this shard; n is above 0 and the same on all ranks."""
    if _is_shared(group):
        stats = merge_over_group(stats, group)
    result = outcome(stats)
    return TokenValues(result.logprob, result.entropy, base_of(stats[TOP]), stats[SUM].log())


def _is_shared(group: dist.ProcessGroup | None) -> TypeGuard[dist.ProcessGroup]:
    return group is not None and group.size() > 1


def _gathered(hidden: Tensor, call: Call) -> Tensor:
    """[N / tp, H] of each rank -> [N, H] in rank order."""
    if not _is_shared(call.group):
        return hidden
    every = hidden.new_empty((hidden.shape[0] * call.group.size(), hidden.shape[1]))
    if every.numel():
        dist.all_gather_into_tensor(every, hidden.contiguous(), group=call.group)
    return every


def _scattered(grad: Tensor, call: Call) -> Tensor:
    """[N, H], a part of the sum on each rank -> the sum of this rank's [N / tp, H]."""
    if not _is_shared(call.group):
        return grad
    own = grad.new_empty((grad.shape[0] // call.group.size(), grad.shape[1]))
    if own.numel():
        dist.reduce_scatter_tensor(own, grad, group=call.group)
    return own

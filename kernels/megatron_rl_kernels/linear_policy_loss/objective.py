"""The policy loss of the trained tokens of a call: its gradient chunk by chunk, its value and metrics at the end."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_rl_kernels.linear_policy_loss.chunks import Chunk
from megatron_rl_kernels.linear_policy_loss.types import PolicyInputs
from megatron_rl_kernels.policy_loss import PolicyLoss, PolicyLossConfig, policy_loss


@dataclass(frozen=True, slots=True)
class Objective:
    """`inputs` hold trained tokens alone."""

    inputs: PolicyInputs
    config: PolicyLossConfig

    def gradient(
        self, chunk: Chunk, logprob: Tensor, entropy: Tensor, known: PolicyLoss | None
    ) -> tuple[Tensor, Tensor | None]:
        """d loss / d logprob, d loss / d entropy (None: no such term) of the tokens of `chunk` [n].

        Taken from `known`, the loss of all, if given. Else computed from this chunk's values alone, which is right
        for a sequence-level loss if the chunk has whole sequences.
        """
        if known is not None:
            grad_entropy = known.grad_entropy
            return known.grad[chunk.tokens], None if grad_entropy is None else grad_entropy[chunk.tokens]
        inputs = self.inputs.map(lambda tensor: tensor[chunk.tokens])
        if inputs.cu_seqlens is not None:
            bounds = inputs.cu_seqlens[chunk.first_bound : chunk.last_bound + 1] - chunk.start
            inputs = replace(inputs, cu_seqlens=bounds)
        part = _policy_loss(inputs, self.config, logprob, entropy)
        return part.grad, part.grad_entropy

    def of_all(self, logprob: Tensor, entropy: Tensor) -> PolicyLoss:
        """Of all trained tokens at once, so that nothing depends on the chunks."""
        return _policy_loss(self.inputs, self.config, logprob, entropy)


def _policy_loss(
    inputs: PolicyInputs, config: PolicyLossConfig, logprob: Tensor, entropy: Tensor
) -> PolicyLoss:
    # a target that cannot occur has log-prob -inf: its log-ratio to itself is 0, as everyone's
    finite = logprob.clamp(min=torch.finfo(logprob.dtype).min)
    return policy_loss(
        finite,
        finite if inputs.old_logprob is None else inputs.old_logprob,
        inputs.advantage,
        inputs.mask,
        config,
        token_weight=inputs.token_weight,
        entropy=entropy,
        ref_logprob=inputs.ref_logprob,
        correction=inputs.correction,
        nll_weight=inputs.nll_weight,
        cu_seqlens=inputs.cu_seqlens,
    )

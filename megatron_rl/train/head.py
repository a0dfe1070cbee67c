"""The head of a model on this rank: from the last hidden states to log-probs, or to a loss and its gradients.

Logits of all tokens never exist here: the fused ops of `megatron_rl_kernels` make them block by block. What they return
is checked, always: values against their bounds, and the first batch against the definition.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.algo.losses import TokenLoss
from megatron_rl.data.types import PackedBatch
from megatron_rl.errors import TrainingError
from megatron_rl_kernels import invariants
from megatron_rl_kernels.dispatch import Impl
from megatron_rl_kernels.linear_logprob import linear_logprob
from megatron_rl_kernels.linear_policy_loss import LinearPolicyLoss, linear_policy_loss

# of the first batch of each op; the definition makes all of their logits in float64
NUM_COMPARED = 32


@dataclass(kw_only=True, slots=True)
class Head:
    """Rows vocab_start .. vocab_start + V_local of the head. T tokens of a micro-batch, in all of the group.

    `hidden` below is [T, 1, H] as megatron-core's last stage leaves it; with sequence parallelism [T / tp, 1, H],
    this rank's part.
    """

    weight: Tensor  # [V_local, H], a parameter; its gradient is added to weight.main_grad where DDP made one
    vocab_start: int
    vocab_size: int  # real tokens of the model; rows beyond are padding
    group: dist.ProcessGroup | None  # tensor parallel; None: the whole head is here
    sequence_parallel: bool
    impl: Impl | None  # None: by device
    _compared: set[str] = field(default_factory=set)
    _found: list[tuple[str, Tensor]] = field(default_factory=list)

    def logprobs(self, hidden: Tensor, labels: Tensor, *, temperature: float) -> Tensor:
        """Log-prob [T] float32 of every label; no gradient."""
        with torch.no_grad():
            result = linear_logprob(
                hidden.squeeze(1),
                self.weight,
                labels,
                temperature=temperature,
                vocab_start=self.vocab_start,
                valid_vocab=self.vocab_size,
                group=self.group,
                sequence_parallel=self.sequence_parallel,
                impl=self.impl,
            )
            every = torch.arange(labels.numel(), device=labels.device)
            self._check("linear_logprob", hidden, labels, every, result.logprob, result.entropy, temperature)
        return result.logprob

    def loss(
        self, hidden: Tensor, batch: PackedBatch, loss: TokenLoss, *, temperature: float
    ) -> LinearPolicyLoss:
        """The loss with its gradient to `hidden`; the weight's is added to main_grad, for an upstream gradient of 1."""
        main_grad = getattr(self.weight, "main_grad", None) if torch.is_grad_enabled() else None
        result = linear_policy_loss(
            hidden.squeeze(1),
            self.weight,
            batch.labels,
            loss.inputs,
            loss.config,
            temperature=temperature,
            vocab_start=self.vocab_start,
            valid_vocab=self.vocab_size,
            group=self.group,
            sequence_parallel=self.sequence_parallel,
            main_grad=main_grad,
            impl=self.impl,
        )
        trained = batch.loss_mask.nonzero().squeeze(1)
        self._check(
            "linear_policy_loss", hidden, batch.labels, trained, result.logprob, result.entropy, temperature
        )
        return result

    def problem(self) -> str | None:
        """What the values since the last call broke, in words; waits for the device."""
        found, self._found = self._found, []
        for op, values in found:
            text = invariants.violation(op, values, vocab_size=self.vocab_size)
            if text is not None:
                return text
        return None

    def _check(
        self,
        op: str,
        hidden: Tensor,
        labels: Tensor,
        valid: Tensor,
        logprob: Tensor,
        entropy: Tensor | None,
        temperature: float,
    ) -> None:
        """`valid` are the positions whose values mean something. Raises TrainingError for the first batch alone."""
        self._found.append((op, invariants.worst(logprob, entropy, valid, vocab_size=self.vocab_size)))
        if op in self._compared or valid.numel() == 0:
            return
        self._compared.add(op)
        spread = torch.linspace(0, valid.numel() - 1, min(NUM_COMPARED, valid.numel()), device=valid.device)
        text = invariants.difference(
            op,
            self._every(hidden.detach()),
            self.weight.detach(),
            labels,
            logprob=logprob.detach(),
            entropy=None if entropy is None else entropy.detach(),
            positions=valid[spread.long()],
            temperature=temperature,
            vocab_start=self.vocab_start,
            valid_vocab=self.vocab_size,
            group=self.group,
        )
        if text is not None:
            raise TrainingError(
                f"head: {text}; the fused kernel is wrong here: set model.kernels to portable, and report this"
            )

    def _every(self, hidden: Tensor) -> Tensor:
        """[T, H] of all ranks of the group."""
        own = hidden.squeeze(1)
        if not self.sequence_parallel or self.group is None:
            return own
        parts = [torch.empty_like(own) for _ in range(self.group.size())]
        dist.all_gather(parts, own.contiguous(), group=self.group)
        return torch.cat(parts)

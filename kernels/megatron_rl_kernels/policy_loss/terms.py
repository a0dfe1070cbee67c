"""What goes into a policy loss per token and what comes out: shapes, the names of the metrics, how parts merge."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# How each metric of a part (a chunk, a micro-batch, a rank) merges with the others. All are over trained tokens.
METRIC_MERGE: dict[str, Literal["sum", "max"]] = {
    "tokens": "sum",  # trained tokens: the denominator of most means below
    "clipped_high": "sum",  # tokens whose ratio is above the bound that applies to them (dual_clip's included)
    "clipped_low": "sum",  # tokens whose ratio is below the lower bound that applies to them
    "kl_k1": "sum",  # old_logprob - logprob
    "kl_k3": "sum",  # r - 1 - log r, r = exp(logprob - old_logprob): estimates KL(old || new)
    "ratio": "sum",  # the ratio the surrogate sees: r, or the sequence's one for gspo and gmpo
    "ratio_max": "max",  # its largest value, 0 without trained tokens
    "grad_abs": "sum",  # |d loss / d logprob|, weights included
    "kl_ref": "sum",  # the KL estimator's value, before its coefficient; k3 where the loss has no KL term
    "entropy": "sum",  # 0 where no entropy is given
    "nll": "sum",  # -logprob of the tokens with nll_weight != 0
    "nll_tokens": "sum",  # how many those are
}
METRICS: tuple[str, ...] = tuple(METRIC_MERGE)

_MAX = tuple(METRICS.index(name) for name, how in METRIC_MERGE.items() if how == "max")


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenInputs:
    """Tensors of N tokens, [N], aligned to each other, one floating dtype (float32 or float64), one device.

    Where `mask` is False all others may hold anything, NaN included. All but `logprob` and `entropy` are constants.
    """

    logprob: Tensor  # of the policy in training
    old_logprob: Tensor  # of the policy the ratio is taken to
    advantage: Tensor
    mask: Tensor  # bool, True where the token is trained on
    token_weight: Tensor  # aggregation weight / global normaliser, not negative
    entropy: Tensor | None = None
    ref_logprob: Tensor | None = None
    correction: Tensor | None = None  # factor of the surrogate alone, not of KL and entropy
    nll_weight: Tensor | None = None  # adds nll_weight * -logprob, outside token_weight
    # mean over the sequence of the log-ratio (gspo) or of the clipped one (gmpo), repeated for its tokens
    sequence_log_ratio: Tensor | None = None

    def split(self, size: int) -> Iterator[TokenInputs]:
        """Views of consecutive blocks of `size` tokens; the last may be shorter. No tokens, no blocks."""
        if self.logprob.numel():
            names, tensors = zip(*self.named(), strict=True)
            for pieces in zip(*(tensor.split(size) for tensor in tensors), strict=True):
                yield TokenInputs(**dict(zip(names, pieces, strict=True)))

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Name and tensor of every field that is there."""
        for field in fields(self):
            tensor = getattr(self, field.name)
            if tensor is not None:
                yield field.name, tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> TokenInputs:
        """The same with `function` applied to every tensor that is there."""
        return replace(self, **{name: function(tensor) for name, tensor in self.named()})

    def with_sequence_log_ratio(self, values: Tensor) -> TokenInputs:
        """The same with `values` [N] as `sequence_log_ratio`."""
        return replace(self, sequence_log_ratio=values)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenTerms:
    """What N tokens add to the loss. Sums are float64 (Triton: float32), so that adding up chunks costs no digits."""

    loss: Tensor  # 0-dim, already weighted
    grad: Tensor  # [N] d loss / d logprob, dtype of `logprob`; 0 where masked
    grad_entropy: Tensor | None  # [N] d loss / d entropy; None where the loss has no entropy term
    metrics: Tensor  # [len(METRICS)], see METRIC_MERGE


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLoss:
    """A micro-batch's share of the loss; shares of micro-batches and ranks add up."""

    loss: Tensor  # 0-dim, dtype of `logprob`, differentiable in `logprob` and `entropy`
    grad: Tensor  # [N] d loss / d logprob, without graph
    grad_entropy: Tensor | None  # [N] d loss / d entropy; None where entropy_coefficient is 0
    metrics: Tensor  # [len(METRICS)] float32, see METRIC_MERGE


def merge_metrics(parts: Tensor) -> Tensor:
    """[P, len(METRICS)] of P parts -> [len(METRICS)]; no parts give zeros."""
    merged = parts.sum(dim=0)
    if len(parts):
        for column in _MAX:
            merged[column] = parts[:, column].amax()
    return merged


def attach_gradient(terms: TokenTerms, logprob: Tensor, entropy: Tensor | None) -> PolicyLoss:
    """The loss as a scalar of the graph of `logprob` and `entropy`, whose gradients are already known."""
    loss = _ClosedForm.apply(logprob, entropy, terms.loss.to(logprob.dtype), terms.grad, terms.grad_entropy)
    return PolicyLoss(
        loss=loss, grad=terms.grad, grad_entropy=terms.grad_entropy, metrics=terms.metrics.to(torch.float32)
    )


class _ClosedForm(torch.autograd.Function):
    """A scalar whose value and gradients were computed together, in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        logprob: Tensor,
        entropy: Tensor | None,
        value: Tensor,
        grad: Tensor,
        grad_entropy: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(grad, grad_entropy)
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        grad, grad_entropy = ctx.saved_tensors
        return upstream * grad, None if grad_entropy is None else upstream * grad_entropy, None, None, None

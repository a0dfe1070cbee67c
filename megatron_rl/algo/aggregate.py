"""How tokens are averaged into one loss: a weight per token here, one global normaliser per optimizer step.

loss = sum over tokens of weight * token_loss / normaliser, where the normaliser is summed over every sample
of the optimizer step, on all data-parallel ranks: no result depends on the cut into micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from megatron_rl.data.types import TrainSample

Aggregate = Literal["token_mean", "sequence_mean"]


def token_mean_weights(loss_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """1 for each trained token: every token counts the same (DAPO, Klear). Returns [T] float32."""
    return loss_mask.float()


def sequence_mean_weights(loss_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """1 / (trained tokens of the sequence): every sequence counts the same (GRPO). Returns [T] float32."""
    ends = torch.nn.functional.pad(loss_mask.cumsum(0), (1, 0))
    bounds = cu_seqlens.long()
    trained = ends[bounds[1:]] - ends[bounds[:-1]]  # [S]
    # output_size spares the device a round trip to learn T
    per_token = trained.repeat_interleave(bounds.diff(), output_size=loss_mask.numel())
    return torch.where(loss_mask, 1.0 / per_token.clamp(min=1), 0.0)


_WEIGHTS: dict[Aggregate, Callable[[Tensor, Tensor], Tensor]] = {
    "token_mean": token_mean_weights,
    "sequence_mean": sequence_mean_weights,
}


def token_weights(aggregate: Aggregate, *, loss_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Weight of each token before the division by the normaliser; loss_mask [T] bool, cu_seqlens [S + 1]."""
    return _WEIGHTS[aggregate](loss_mask, cu_seqlens)


def normaliser(samples: Sequence[TrainSample], aggregate: Aggregate) -> float:
    """What these samples add to the global normaliser; the caller sums it over data-parallel ranks.

    `token_mean`: trained tokens. `sequence_mean`: sequences with at least one; masked ones do not count.
    """
    trained = [sample.num_trained_tokens for sample in samples]
    return float(sum(trained) if aggregate == "token_mean" else sum(count > 0 for count in trained))


def positive_normaliser(samples: Sequence[TrainSample]) -> float:
    """Trained tokens of correct rollouts, the divisor of the loss on positives. Summed like `normaliser`."""
    return float(sum(sample.num_trained_tokens for sample in samples if sample.is_positive))

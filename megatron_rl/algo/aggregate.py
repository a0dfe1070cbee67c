"""How tokens are averaged into one loss: a weight per token here, one global normaliser per optimizer step.

loss = sum over tokens of weight * token_loss / normaliser, where the normaliser is summed over every sample
of the optimizer step, on all data-parallel ranks: no result depends on the cut into micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron_rl.data.types import TrainSample
from megatron_rl.recipe.algorithm import AggregateName as Aggregate


def token_mean_weights(loss_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """1 for each trained token: every token counts the same (DAPO, Klear). Returns [T] float32."""
    return loss_mask.float()


def sequence_mean_weights(loss_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """1 / (trained tokens of the sequence): every sequence counts the same (GRPO). Returns [T] float32."""
    trained = _trained_per_sequence(loss_mask, cu_seqlens)
    # output_size spares the device a round trip to learn T
    per_token = trained.repeat_interleave(cu_seqlens.long().diff(), output_size=loss_mask.numel())
    return torch.where(loss_mask, 1.0 / per_token.clamp(min=1), 0.0)


# sequence_sum: normalised by sequences alone; token_sum_norm: by sequences times a constant length (Dr. GRPO)
_WEIGHTS: dict[Aggregate, Callable[[Tensor, Tensor], Tensor]] = {
    "token_mean": token_mean_weights,
    "sequence_mean": sequence_mean_weights,
    "sequence_sum": token_mean_weights,
    "token_sum_norm": token_mean_weights,
}


def token_weights(aggregate: Aggregate, *, loss_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Weight of each token before the division by the normaliser; loss_mask [T] bool, cu_seqlens [S + 1]."""
    return _WEIGHTS[aggregate](loss_mask, cu_seqlens)


def micro_batch_mean_weights(counted: Tensor, *, loss_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Trained sequences of the micro-batch / tokens counted in it, at those tokens; [T] float32.

    `counted` [T] bool is part of `loss_mask`. Over the number of trained sequences of the step, it makes the mean of
    each micro-batch weighted by its sequences, as Klear's released code has it for the surrogate (all trained tokens)
    and for positives (those of correct rollouts).
    """
    num_sequences = (_trained_per_sequence(loss_mask, cu_seqlens) > 0).sum()
    return torch.where(counted, num_sequences / counted.sum().clamp(min=1), 0.0)


def normaliser(samples: Sequence[TrainSample], aggregate: Aggregate, *, loss_length: int = 1) -> float:
    """What these samples add to the global normaliser; the caller sums it over data-parallel ranks.

    `token_mean`: trained tokens. Others: sequences with at least one (masked ones do not count), for
    `token_sum_norm` times the constant `loss_length`.
    """
    trained = [sample.num_trained_tokens for sample in samples]
    if aggregate == "token_mean":
        return float(sum(trained))
    sequences = sum(count > 0 for count in trained)
    return float(sequences * loss_length if aggregate == "token_sum_norm" else sequences)


def positive_normaliser(samples: Sequence[TrainSample]) -> float:
    """Trained tokens of correct rollouts, the divisor of the loss on positives. Summed like `normaliser`."""
    return float(sum(sample.num_trained_tokens for sample in samples if sample.is_positive))


def _trained_per_sequence(loss_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[S] how many tokens of each sequence are trained on."""
    ends = torch.nn.functional.pad(loss_mask.cumsum(0), (1, 0))
    bounds = cu_seqlens.long()
    return ends[bounds[1:]] - ends[bounds[:-1]]

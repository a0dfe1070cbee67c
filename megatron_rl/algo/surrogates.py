"""Policy-gradient surrogates in closed form: per token the loss and its derivative by the log-prob.

Nothing here is differentiated: autograd of min, clip and exp would split ties, lose gradients outside a clamp
and give 0 * inf. With r = exp(logprob - old_logprob), loss = -A f(r) and grad_weight = d loss / d logprob.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.errors import RecipeError
from megatron_rl.recipe.stages import AlgorithmConfig

# exp(20) = 4.9e8: far beyond any bound in use, far below the overflow of float32
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SurrogateOutput:
    """Per token, all [T] and aligned to `labels`; 0 or False where the mask is False."""

    loss: Tensor            # minimised, before aggregation
    grad_weight: Tensor     # d loss / d logprob
    clipped_high: Tensor    # bool: ratio above the bound that applies to it (dual_clip's included)
    clipped_low: Tensor     # bool: ratio below the lower bound, with a negative advantage


@dataclass(frozen=True, kw_only=True, slots=True)
class ClippedRatio:
    """f = r, except where r has left [1 - low, 1 + high] in the direction that its advantage asks for.

    There f is the bound times `value_*`, and the gradient weight is the bound times `grad_*`.
    A == 0 gives 0; a ratio equal to its bound is not clipped. With `dual_clip` = c, a negative advantage sees
    at most c, with zero gradient beyond (arXiv 1912.09729).
    """

    low: float
    high: float
    value_low: float = 1.0
    value_high: float = 1.0
    grad_low: float = 0.0
    grad_high: float = 0.0
    dual_clip: float | None = None

    def __post_init__(self) -> None:
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise RecipeError(
                f"algorithm.dual_clip: got {self.dual_clip}, must be above 1; leave it out to disable"
            )

    def __call__(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor
    ) -> SurrogateOutput:
        """All [T]; the first three floating, mask bool. Masked positions may hold anything, NaN included."""
        # select before exp: a masked position may hold inf or NaN, and 0 * NaN is NaN
        log_ratio = torch.where(mask, logprobs.detach() - old_logprobs, 0.0)
        ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        advantage = torch.where(mask, advantages, 0.0)
        upper, lower = 1.0 + self.high, 1.0 - self.low
        high = (advantage > 0) & (ratio > upper)
        low = (advantage < 0) & (ratio < lower)
        value = ratio.masked_fill(high, upper * self.value_high).masked_fill(low, lower * self.value_low)
        grad = ratio.masked_fill(high, upper * self.grad_high).masked_fill(low, lower * self.grad_low)
        if self.dual_clip is not None:
            capped = (advantage < 0) & (ratio > self.dual_clip)
            value = value.masked_fill(capped, self.dual_clip)
            grad = grad.masked_fill(capped, 0.0)
            high = high | capped
        return SurrogateOutput(
            loss=-advantage * value, grad_weight=-advantage * grad, clipped_high=high, clipped_low=low
        )


def grpo(eps: float, *, dual_clip: float | None = None) -> ClippedRatio:
    """PPO's clip with one bound on both sides; clipped tokens give no gradient (arXiv 2402.03300)."""
    return ClippedRatio(low=eps, high=eps, dual_clip=dual_clip)


def clip_higher(low: float, high: float, *, dual_clip: float | None = None) -> ClippedRatio:
    """PPO's clip with a wider upper bound, so that unlikely tokens can grow (DAPO, arXiv 2503.14476)."""
    return ClippedRatio(low=low, high=high, dual_clip=dual_clip)


def gppo(
    low: float, high: float, *, beta_low: float = 1.0, beta_high: float = 1.0, dual_clip: float | None = None
) -> ClippedRatio:
    """Clip-higher whose clipped tokens keep a bounded gradient (arXiv 2508.07629, equations 11, 12, 17, 18).

    The betas scale the clipped branches in value and gradient alike; 1 is the paper's setting.
    """
    return ClippedRatio(
        low=low,
        high=high,
        value_low=beta_low,
        value_high=beta_high,
        grad_low=beta_low,
        grad_high=beta_high,
        dual_clip=dual_clip,
    )


SURROGATES: dict[str, Callable[[AlgorithmConfig], ClippedRatio]] = {
    "grpo": lambda config: grpo(config.clip_low, dual_clip=config.dual_clip),
    "clip_higher": lambda config: clip_higher(config.clip_low, config.clip_high, dual_clip=config.dual_clip),
    "gppo": lambda config: gppo(
        config.clip_low,
        config.clip_high,
        beta_low=config.beta_low,
        beta_high=config.beta_high,
        dual_clip=config.dual_clip,
    ),
}


def make_surrogate(config: AlgorithmConfig) -> ClippedRatio:
    """The surrogate that a recipe names, with its bounds. Raises RecipeError for bounds without meaning."""
    return SURROGATES[config.surrogate](config)

"""Which surrogate a recipe names, as what the policy-loss kernel takes; formulas and gradients are in the kernel."""

from __future__ import annotations

from collections.abc import Callable

from megatron_rl.errors import RecipeError
from megatron_rl.recipe.stages import AlgorithmConfig
from megatron_rl_kernels.policy_loss.config import PolicyLossConfig


def grpo(eps: float, *, dual_clip: float | None = None) -> PolicyLossConfig:
    """PPO's clip with one bound on both sides; clipped tokens give no gradient (arXiv 2402.03300)."""
    return PolicyLossConfig(surrogate="clip", low=eps, high=eps, dual_clip=dual_clip)


def clip_higher(low: float, high: float, *, dual_clip: float | None = None) -> PolicyLossConfig:
    """PPO's clip with a wider upper bound, so that unlikely tokens can grow (DAPO, arXiv 2503.14476)."""
    return PolicyLossConfig(surrogate="clip", low=low, high=high, dual_clip=dual_clip)


def gppo(
    low: float, high: float, *, beta_low: float = 1.0, beta_high: float = 1.0, dual_clip: float | None = None
) -> PolicyLossConfig:
    """Clip-higher whose clipped tokens keep a bounded gradient (arXiv 2508.07629, equations 11, 12, 17, 18).

    The betas scale the clipped branches in value and gradient alike; 1 is the paper's setting.
    """
    return PolicyLossConfig(
        surrogate="clip",
        low=low,
        high=high,
        value_low=beta_low,
        value_high=beta_high,
        grad_low=beta_low,
        grad_high=beta_high,
        dual_clip=dual_clip,
    )


SURROGATES: dict[str, Callable[[AlgorithmConfig], PolicyLossConfig]] = {
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


def make_surrogate(config: AlgorithmConfig) -> PolicyLossConfig:
    """The surrogate that a recipe names, with its bounds. Raises RecipeError for bounds without meaning."""
    if config.dual_clip is not None and config.dual_clip <= 1:
        raise RecipeError(
            f"algorithm.dual_clip: got {config.dual_clip}, must be above 1; leave it out to disable"
        )
    return SURROGATES[config.surrogate](config)

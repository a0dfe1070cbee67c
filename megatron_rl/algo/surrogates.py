"""Which surrogate a recipe names, as what the policy-loss kernel takes; formulas and gradients are in the kernel.

In each docstring r is the token's ratio exp(logprob - old_logprob), A its advantage; the loss is -A f.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from megatron_rl.errors import RecipeError
from megatron_rl.recipe.algorithm import SurrogateName, kl_estimator, option
from megatron_rl.recipe.stages import AlgorithmConfig
from megatron_rl_kernels.policy_loss.config import PolicyLossConfig


def reinforce() -> PolicyLossConfig:
    """f = logprob: no ratio at all, so right for the first update of an iteration alone (Williams 1992; GPG)."""
    return PolicyLossConfig(surrogate="reinforce")


def off_policy_reinforce() -> PolicyLossConfig:
    """f = r logprob with a constant r: REINFORCE with the full importance weight, without any bound."""
    return PolicyLossConfig(surrogate="weighted")


def grpo(eps: float, *, dual_clip: float | None = None) -> PolicyLossConfig:
    """PPO's clip with one bound on both sides; clipped tokens give no gradient (arXiv 2402.03300)."""
    return PolicyLossConfig(surrogate="clip", low=eps, high=eps, dual_clip=dual_clip)


def clip_higher(low: float, high: float, *, dual_clip: float | None = None) -> PolicyLossConfig:
    """PPO's clip with a wider upper bound, so that unlikely tokens can grow (DAPO, arXiv 2503.14476)."""
    return PolicyLossConfig(surrogate="clip", low=low, high=high, dual_clip=dual_clip)


def ppo(low: float, high: float, *, dual_clip: float | None = None) -> PolicyLossConfig:
    """f A = min(r A, clip(r, 1 - low, 1 + high) A) (arXiv 1707.06347, equation 7; dual clip 1912.09729, equation 9).

    With the ratio of old to rollout policy as a correction it is decoupled PPO (arXiv 2110.00641, equation 6; AReaL).
    """
    return PolicyLossConfig(surrogate="clip", low=low, high=high, dual_clip=dual_clip)


def gppo(
    low: float, high: float, *, beta_low: float = 1.0, beta_high: float = 1.0, dual_clip: float | None = None
) -> PolicyLossConfig:
    """Clip-higher whose clipped tokens keep a bounded gradient (arXiv 2508.07629, equations 11, 12, 17, 18).

    The betas scale the clipped branches in value and gradient alike; 1 is the paper's setting, others are CE-GPPO
    (arXiv 2509.20712).
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


def gppo_only_high(low: float, high: float, *, dual_clip: float | None = None) -> PolicyLossConfig:
    """GPPO above 1 + high, PPO below 1 - low: PPO's value, and no gradient of A < 0, r < 1 - low.

    The advice of GPPO's authors against a collapse of entropy; `gppo` with beta_low 0 has the same gradient.
    """
    return PolicyLossConfig(surrogate="clip", low=low, high=high, grad_high=1.0, dual_clip=dual_clip)


def cispo(low: float, high: float, *, unified_mask: bool = False) -> PolicyLossConfig:
    """f = clip(r, 1 - low, 1 + high) logprob, the clip a constant (MiniMax-M1, equations 4, 5); low 1: no lower bound.

    `unified_mask`: 0 where PPO's clip with the same bounds has no gradient (equations 6, 7).
    """
    return PolicyLossConfig(surrogate="cispo", low=low, high=high, cispo_mask=unified_mask)


def sapo(tau_positive: float, tau_negative: float) -> PolicyLossConfig:
    """f = 4 / tau sigmoid(tau (r - 1)): a soft gate in place of a clip (arXiv 2511.20347); tau by the sign of A."""
    return PolicyLossConfig(surrogate="sapo", tau_positive=tau_positive, tau_negative=tau_negative)


def topr() -> PolicyLossConfig:
    """A >= 0: f = logprob; A < 0: f = min(r, 1) logprob, min(r, 1) a constant (arXiv 2503.14286).

    Per token and by the sign of the advantage; the paper takes the whole response's ratio and the sign of its reward.
    """
    return PolicyLossConfig(surrogate="topr")


def dro(tau: float) -> PolicyLossConfig:
    """loss = -A logprob + tau / 2 (logprob - old_logprob)^2 (Kimi k1.5, arXiv 2501.12599, equation 3).

    The square is the k2 estimator with the old policy for its reference: see `is_anchored_to_old`.
    """
    return PolicyLossConfig(surrogate="reinforce", kl="k2", kl_coefficient=tau)


def gspo(low: float, high: float, *, dual_clip: float | None = None) -> PolicyLossConfig:
    """PPO's clip of s = exp(mean of log r over the sequence) (arXiv 2507.18071, equations 5, 7); a sequence mean.

    GSPO-token (equations 13, 14) is the same with an A of each token; A is the same for all of a rollout here.
    """
    return PolicyLossConfig(surrogate="gspo", low=low, high=high, dual_clip=dual_clip)


def gmpo(low: float, high: float) -> PolicyLossConfig:
    """Geometric mean of ratios, each clipped at exp(-low), exp(high) first (arXiv 2507.20673, equation 4)."""
    return PolicyLossConfig(surrogate="gmpo", low=low, high=high)


def _clip_family(
    build: Callable[..., PolicyLossConfig], *others: str
) -> Callable[[AlgorithmConfig], PolicyLossConfig]:
    """`build` with both bounds, then `others` by name."""

    def built(config: AlgorithmConfig) -> PolicyLossConfig:
        low, high = option(config, "clip_low"), option(config, "clip_high")
        return build(low, high, **{name: option(config, name) for name in others})

    return built


SURROGATES: dict[SurrogateName, Callable[[AlgorithmConfig], PolicyLossConfig]] = {
    "reinforce": lambda config: reinforce(),
    "off_policy_reinforce": lambda config: off_policy_reinforce(),
    "ppo": _clip_family(ppo, "dual_clip"),
    "grpo": lambda config: grpo(_given(config, "clip_low"), dual_clip=config.dual_clip),
    "clip_higher": _clip_family(clip_higher, "dual_clip"),
    "gppo": _clip_family(gppo, "beta_low", "beta_high", "dual_clip"),
    "gppo_only_high": _clip_family(gppo_only_high, "dual_clip"),
    "ce_gppo": _clip_family(gppo, "beta_low", "beta_high", "dual_clip"),
    "decoupled_ppo": _clip_family(ppo, "dual_clip"),
    "cispo": lambda config: cispo(
        _given(config, "clip_low"), _given(config, "clip_high"), unified_mask=config.unified_mask
    ),
    "sapo": lambda config: sapo(_given(config, "tau_positive"), _given(config, "tau_negative")),
    "topr": lambda config: topr(),
    "dro": lambda config: dro(_given(config, "tau")),
    "gspo": _clip_family(gspo, "dual_clip"),
    "gspo_token": _clip_family(gspo, "dual_clip"),
    "gmpo": _clip_family(gmpo),
}


def make_surrogate(config: AlgorithmConfig) -> PolicyLossConfig:
    """The surrogate that a recipe names, with its bounds. Raises RecipeError for options without meaning."""
    if config.dual_clip is not None and config.dual_clip <= 1:
        raise RecipeError(
            f"algorithm.dual_clip: got {config.dual_clip}, must be above 1; leave it out to disable"
        )
    return SURROGATES[config.surrogate](config)


def make_policy_loss(config: AlgorithmConfig, *, entropy_coefficient: float = 0.0) -> PolicyLossConfig:
    """The surrogate with the recipe's KL term and this step's entropy coefficient."""
    loss = replace(make_surrogate(config), entropy_coefficient=entropy_coefficient)
    if config.kl is None or config.kl.where == "reward":
        return loss
    return replace(loss, kl=kl_estimator(config.kl), kl_coefficient=config.kl.coefficient)


def is_anchored_to_old(config: AlgorithmConfig) -> bool:
    """Whether the loss measures its KL term to the old policy, and not to a reference."""
    return config.surrogate == "dro"


def _given(config: AlgorithmConfig, name: str) -> float:
    value = option(config, name)
    if value is None:
        raise RecipeError(f"algorithm.{name}: surrogate {config.surrogate} needs it; give a number")
    return value

"""What an algorithm is made of besides its surrogate's name: KL, entropy, correction, and which surrogate reads what.

Bounds, stated once. `clip_low`, `clip_high` are distances from a ratio of 1: it is clipped below 1 - clip_low and above
1 + clip_high (gmpo: log-ratios, at -clip_low and +clip_high). `dual_clip` and the bounds of a correction are ratios.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from megatron_rl.recipe.types import Bool, NonNegativeFloat, PositiveFloat, Text

if TYPE_CHECKING:
    from megatron_rl.recipe.stages import AlgorithmConfig

SurrogateName = Literal[
    "reinforce",
    "off_policy_reinforce",
    "ppo",
    "grpo",
    "clip_higher",
    "gppo",
    "gppo_only_high",
    "ce_gppo",
    "decoupled_ppo",
    "cispo",
    "sapo",
    "topr",
    "dro",
    "gspo",
    "gspo_token",
    "gmpo",
]
AdvantageName = Literal[
    "group_std", "group_mean", "leave_one_out", "batch_std", "reinforce_pp", "reinforce_pp_baseline"
]
AggregateName = Literal["token_mean", "sequence_mean", "sequence_sum", "token_sum_norm"]
KlEstimatorName = Literal["k1", "k2", "k3", "k3_straight_through", "k3_unbiased"]
CorrectionKind = Literal[
    "none",
    "token_tis",
    "sequence_tis",
    "cis",
    "icepop",
    "sequence_mask",
    "geometric_mask",
    "k2_mask",
    "k3_mask",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class KlConfig:
    """Distance to a reference policy: the weights that the stage began with, or those of a directory.

    Costs one copy of each rank's weights in host memory, one more forward pass per iteration and, after the first
    stage, a copy of the model in the run directory, from which a resumed run takes it.
    """

    coefficient: PositiveFloat  # nats are multiplied by it
    # loss: a term of every token, aggregated like the surrogate. reward: coefficient * sum over the response's tokens
    # of (old - reference log-prob) is taken off a rollout's reward before advantages are made of it
    where: Literal["loss", "reward"] = "loss"
    # null: k3_unbiased in the loss, k1 in the reward
    estimator: KlEstimatorName | None = None
    reference: Text | None = (
        None  # HF directory of a model of the same shape; null: weights at the stage's start
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class EntropyConfig:
    """A bonus on the entropy of the policy at trained tokens, aggregated like the surrogate.

    With a `target` the coefficient is adapted (Skywork-OR1): after every optimizer step it goes up by `delta` if the
    step's mean entropy was below the target, else down, within 0 .. max_coefficient; the bonus acts only while the
    entropy of the step before was below the target.
    """

    coefficient: NonNegativeFloat = 0.0  # loss per nat; with a target, what the stage begins with
    target: PositiveFloat | None = None  # nats per token; null: the coefficient stays
    max_coefficient: PositiveFloat | None = None  # null: 0.005
    delta: PositiveFloat | None = None  # per optimizer step; null: 0.0001


@dataclass(frozen=True, kw_only=True, slots=True)
class CorrectionConfig:
    """A constant factor of each token's surrogate, made of rho = exp(old - rollout log-prob): trainer over engine.

    Tokens and sequences of weight 0 keep their place in the loss' denominator.
    """

    kind: CorrectionKind = "none"
    low: NonNegativeFloat | None = None  # null: the kind's own, see CORRECTION_DEFAULTS
    high: PositiveFloat | None = None
    veto: PositiveFloat | None = None  # a sequence with any rho below it weighs 0; below 1, such as 1e-4
    # old log-probs: recomputed by the trainer, or the engine's own, which saves that pass and leaves nothing to correct
    old: Literal["trainer", "rollout"] = "trainer"
    # divide by the mean over the optimizer step's tokens that weigh more than 0
    batch_normalise: Bool = False


# the options of AlgorithmConfig that a surrogate reads, with the value that null stands for.
# clip_high None: as clip_low; dual_clip None: none; tau None: must be given
SURROGATE_OPTIONS: Mapping[SurrogateName, Mapping[str, float | None]] = {
    "reinforce": {},
    "off_policy_reinforce": {},
    "ppo": {"clip_low": 0.2, "clip_high": None, "dual_clip": None},
    "grpo": {"clip_low": 0.2, "dual_clip": None},
    "clip_higher": {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": None},
    "gppo": {"clip_low": 0.2, "clip_high": 0.28, "beta_low": 1.0, "beta_high": 1.0, "dual_clip": None},
    "gppo_only_high": {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": None},
    # of the authors' 7B runs; 0.5 in those of 1.5B
    "ce_gppo": {"clip_low": 0.2, "clip_high": 0.2, "beta_low": 0.75, "beta_high": 1.0, "dual_clip": None},
    "decoupled_ppo": {"clip_low": 0.2, "clip_high": None, "dual_clip": None},
    # no lower bound (MiniMax-M1), weights of at most 5 (ScaleRL)
    "cispo": {"clip_low": 1.0, "clip_high": 4.0, "unified_mask": False},
    "sapo": {"tau_positive": 1.0, "tau_negative": 1.05},
    "topr": {},
    "dro": {"tau": None},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4, "dual_clip": None},
    "gspo_token": {"clip_low": 3e-4, "clip_high": 4e-4, "dual_clip": None},
    "gmpo": {"clip_low": 0.4, "clip_high": 0.4},
}

# surrogates that are defined with one aggregate alone, and why
REQUIRED_AGGREGATE: Mapping[SurrogateName, tuple[AggregateName, str]] = {
    "gspo": ("sequence_mean", "the gradient of its sequence ratio has 1 / length of the sequence"),
    "gspo_token": ("sequence_mean", "the gradient of its sequence ratio has 1 / length of the sequence"),
    "gmpo": ("sequence_mean", "the gradient of its geometric mean has 1 / length of the sequence"),
    "sapo": ("sequence_mean", "its objective is the mean over sequences of their token means"),
}

# low and high that null stands for, of the kinds that read them: ratios, but for k2_mask and k3_mask nats
CORRECTION_DEFAULTS: Mapping[CorrectionKind, Mapping[str, float]] = {
    "none": {},
    "token_tis": {"high": 2.0},
    "sequence_tis": {"high": 2.0},
    "cis": {"low": 0.5, "high": 2.0},
    "icepop": {"low": 0.5, "high": 5.0},
    "sequence_mask": {"low": 0.5, "high": 2.0},
    "geometric_mask": {"low": 0.999, "high": 1.002},
    "k2_mask": {"high": 0.01},
    "k3_mask": {"high": 0.01},
}

DEFAULT_MAX_ENTROPY_COEFFICIENT = 0.005
DEFAULT_ENTROPY_DELTA = 1e-4


def option(algorithm: AlgorithmConfig, name: str) -> float | None:
    """What an option of the surrogate is once defaults are filled in; None: it is not read, or disabled."""
    defaults = SURROGATE_OPTIONS[algorithm.surrogate]
    if name not in defaults:
        return None
    given: dict[str, float | None] = {
        "clip_low": algorithm.clip_low,
        "clip_high": algorithm.clip_high,
        "dual_clip": algorithm.dual_clip,
        "beta_low": algorithm.beta_low,
        "beta_high": algorithm.beta_high,
        "unified_mask": algorithm.unified_mask,
        "tau_positive": algorithm.tau_positive,
        "tau_negative": algorithm.tau_negative,
        "tau": algorithm.tau,
    }
    value = defaults[name] if given[name] is None else given[name]
    return option(algorithm, "clip_low") if value is None and name == "clip_high" else value


def kl_estimator(kl: KlConfig) -> KlEstimatorName:
    """The estimator once the default is filled in."""
    return kl.estimator or ("k1" if kl.where == "reward" else "k3_unbiased")


def correction_bound(correction: CorrectionConfig, name: Literal["low", "high"]) -> float | None:
    """A bound once defaults are filled in; None: the kind has none."""
    defaults = CORRECTION_DEFAULTS[correction.kind]
    value = correction.low if name == "low" else correction.high
    return defaults[name] if value is None and name in defaults else value

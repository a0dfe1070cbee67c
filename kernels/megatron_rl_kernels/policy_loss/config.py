"""What a policy loss is made of: the surrogate with its bounds, the KL term and the entropy bonus."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal, get_args

Surrogate = Literal["reinforce", "weighted", "clip", "cispo", "sapo", "topr", "gspo", "gmpo"]
KlEstimator = Literal["none", "k1", "k2", "k3", "k3_straight_through", "k3_unbiased"]

# exp(20) = 4.9e8: far beyond any bound in use, far below the overflow of float32
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLossConfig:
    """With r = exp(logprob - old_logprob) and advantage A, a token's loss is -A f(r), its gradient weight -A w(r).

    reinforce   f = logprob                       w = 1
    weighted    f = r logprob, r constant         w = r
    clip        f = r, but the bound * value_* where r left [1 - low, 1 + high] in the direction A asks for;
                w = r there replaced by the bound * grad_*. value 1 and grad 0: PPO, GRPO, DAPO; both 1: GPPO; both
                beta: GPPO with betas (CE-GPPO); grad_low 0: GPPO only-high. `dual_clip` c: A < 0 sees at most c,
                w = 0 beyond. Decoupled PPO is this with the proximal log-probs as `old` and the ratio of
                proximal to behaviour policy as `correction`
    cispo       f = clip(r) logprob, constant r   w = clip(r) for both signs of A; with `cispo_mask`, 0 where PPO is 0
    sapo        f = 4 / tau sigmoid(tau (r - 1))  w = 4 s (1 - s) r, tau_positive or tau_negative by the sign of A
    topr        A >= 0: logprob; A < 0: clip(r, 0, 1) logprob, r constant
    gspo        clip with the sequence's geometric mean ratio s in place of r; w = s, 0 for all tokens of a clipped
                sequence (times 1 / length, which is the aggregation's weight); A may differ by token (GSPO-token)
    gmpo        geometric mean of ratios clipped per token before the mean: low, high are bounds on the log-ratio
    """

    surrogate: Surrogate
    low: float = 0.2
    high: float = 0.2
    value_low: float = 1.0
    value_high: float = 1.0
    grad_low: float = 0.0
    grad_high: float = 0.0
    dual_clip: float | None = None
    cispo_mask: bool = False
    tau_positive: float = 1.0
    tau_negative: float = 1.05
    kl: KlEstimator = "none"
    kl_coefficient: float = 0.0
    # the loss has - entropy_coefficient * entropy of each token, aggregated like the surrogate
    entropy_coefficient: float = 0.0

    def __post_init__(self) -> None:
        for name, kinds in (("surrogate", get_args(Surrogate)), ("kl", get_args(KlEstimator))):
            if getattr(self, name) not in kinds:
                raise ValueError(
                    f"policy_loss: {name} = {getattr(self, name)!r}, must be one of {', '.join(kinds)}"
                )
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("surrogate", "kl", "cispo_mask") or (
                field.name == "dual_clip" and value is None
            ):
                continue
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(
                    f"policy_loss: {field.name} = {value!r} of {type(value).__name__}, must be a number"
                )
            if not math.isfinite(value):
                raise ValueError(f"policy_loss: {field.name} = {value}, must be finite")
        if self.low < 0 or self.high < 0:
            raise ValueError(f"policy_loss: low = {self.low}, high = {self.high}, neither may be negative")
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ValueError(f"policy_loss: dual_clip = {self.dual_clip}, must be above 1; None disables it")
        self._check_unread()
        if self.tau_positive <= 0 or self.tau_negative <= 0:
            raise ValueError(
                f"policy_loss: tau_positive = {self.tau_positive}, tau_negative = {self.tau_negative}, must be above 0"
            )
        if (self.kl == "none") != (self.kl_coefficient == 0):
            raise ValueError(
                f"policy_loss: kl = {self.kl!r} with kl_coefficient = {self.kl_coefficient}; set both or neither"
            )

    def _check_unread(self) -> None:
        """Raise for a field that the surrogate does not read: it would be ignored in silence."""
        if self.cispo_mask and self.surrogate != "cispo":
            raise ValueError(f"policy_loss: cispo_mask means nothing for {self.surrogate!r}; leave it out")
        if self.surrogate in ("clip", "gspo"):
            return
        unset = {"value_low": 1.0, "value_high": 1.0, "grad_low": 0.0, "grad_high": 0.0, "dual_clip": None}
        for name, default in unset.items():
            value = getattr(self, name)
            if value != default:
                raise ValueError(
                    f"policy_loss: {name} = {value} means nothing for {self.surrogate!r}; leave it out"
                )

    @property
    def is_sequence_level(self) -> bool:
        """Whether a token's gradient depends on other tokens of its sequence, so `cu_seqlens` is needed."""
        return self.surrogate in ("gspo", "gmpo")

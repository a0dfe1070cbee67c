"""What one AdamW step multiplies by: the numbers of a step, worked out once on the host in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass

# below this 1 / eps leaves float32, and a zero moment over a zero eps is NaN
MIN_EPS = 1e-30


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """One step in the form all implementations share. With g the scaled gradient:

        m += (g - m) * gain1      v = v * beta2 + g * g * gain2
        p = p * decay - step_size * m / (sqrt(v) * root + eps)

    gain = 1 - beta, decay = 1 - lr * weight_decay, step_size = lr / (1 - beta1^step), root = 1 / sqrt(1 - beta2^step).
    """

    gain1: float
    beta2: float
    gain2: float
    decay: float
    step_size: float
    root: float
    eps: float


def make_update(
    *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float, step: int
) -> Update:
    """Check the numbers of a step and derive an `Update`. Raises TypeError or ValueError naming what does not fit."""
    beta1, beta2 = betas
    _check("lr", lr, lr >= 0, "at least 0")
    _check("betas[0]", beta1, 0 <= beta1 < 1, "in [0, 1)")
    _check("betas[1]", beta2, 0 <= beta2 < 1, "in [0, 1)")
    _check("eps", eps, eps >= MIN_EPS, f"at least {MIN_EPS:g}, or a parameter without gradients becomes NaN")
    _check("weight_decay", weight_decay, weight_decay >= 0, "at least 0")
    _check("step", step, step >= 1, "at least 1: it counts the update being made")
    return Update(
        gain1=1 - beta1,
        beta2=beta2,
        gain2=1 - beta2,
        decay=1 - lr * weight_decay,
        step_size=lr / (1 - beta1**step),
        root=1 / math.sqrt(1 - beta2**step),
        eps=eps,
    )


def _check(name: str, value: float, fits: bool, allowed: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"adamw_: {name} = {value!r} of {type(value).__name__}, must be a number")
    if not (math.isfinite(value) and fits):
        raise ValueError(f"adamw_: {name} = {value}, must be {allowed}")

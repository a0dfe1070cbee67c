"""Which tokens a surrogate clips, one by one: the flags whose sums the policy-loss kernel counts."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron_rl_kernels.policy_loss.config import MAX_LOG_RATIO, PolicyLossConfig


def clip_flags(config: PolicyLossConfig, log_ratios: Sequence[float], advantage: float) -> list[int]:
    """Of each token of one sequence: 1 where its ratio is above the bound that applies to it, -1 below, else 0.

    `log_ratios` are log-prob - old log-prob of its trained tokens. A dual clip counts as above. Surrogates without
    bounds flag nothing.
    """
    if config.surrogate in ("reinforce", "weighted", "sapo") or not log_ratios:
        return [0] * len(log_ratios)
    if config.surrogate == "gspo":
        mean = math.fsum(log_ratios) / len(log_ratios)
        return [_flag(config, mean, advantage)] * len(log_ratios)
    return [_flag(config, log_ratio, advantage) for log_ratio in log_ratios]


def _flag(config: PolicyLossConfig, log_ratio: float, advantage: float) -> int:
    ratio = math.exp(max(-MAX_LOG_RATIO, min(MAX_LOG_RATIO, log_ratio)))
    if config.surrogate == "topr":
        return int(advantage < 0 and ratio > 1)
    if config.surrogate == "gmpo":
        return int(advantage > 0 and log_ratio > config.high) - int(advantage < 0 and log_ratio < -config.low)
    may_rise, may_fall = advantage > 0, advantage < 0
    if config.surrogate == "cispo" and not config.cispo_mask:
        may_rise = may_fall = advantage != 0
    if config.dual_clip is not None and advantage < 0 and ratio > config.dual_clip:
        return 1
    return int(may_rise and ratio > 1 + config.high) - int(may_fall and ratio < 1 - config.low)

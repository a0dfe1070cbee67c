"""Weights against the mismatch of trainer and engine, from rho = exp(old - rollout log-prob); constants of the loss.

Log-ratios are cut to +-20 before exp, of sequences after the sum. Sequences are whole in a micro-batch, and their sums
and means are over trained tokens. A weight of 0 leaves a token out of the surrogate and keeps it in every denominator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.algo.metric import Metric
from megatron_rl.recipe.algorithm import CorrectionConfig, CorrectionKind, correction_bound

MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class MismatchSums:
    """Sums over trained tokens, to be added up over micro-batches and data-parallel ranks, in float64."""

    tokens: float = 0.0
    kept: float = 0.0  # of a weight above 0
    weight: float = 0.0
    square: float = 0.0  # of weights squared
    largest: float = 0.0
    k3: float = 0.0  # rho - 1 - log rho: estimates KL(rollout || old)


def correction_weights(
    config: CorrectionConfig,
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    *,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
) -> Tensor:
    """[T] float32 weights by the recipe's kind, before any normalisation over the batch; 0 where masked."""
    log_rho = _log_ratio(old_logprobs, rollout_logprobs, loss_mask)
    sequence = _sequence_index(cu_seqlens, loss_mask.numel())
    weights = _KINDS[config.kind](_Ratios(log_rho, loss_mask, sequence, len(cu_seqlens) - 1), config)
    if config.veto is not None:
        lowest = torch.full((len(cu_seqlens) - 1,), torch.inf, dtype=log_rho.dtype)
        lowest.scatter_reduce_(0, sequence, log_rho.masked_fill(~loss_mask, torch.inf), "amin")
        weights = torch.where(lowest[sequence].exp() < config.veto, 0.0, weights)
    return torch.where(loss_mask, weights, 0.0).float()


def mismatch_sums(
    weights: Tensor, old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor
) -> MismatchSums:
    """Sums of one micro-batch; all [T]."""
    log_rho = _log_ratio(old_logprobs, rollout_logprobs, mask)[mask]
    kept = weights[mask].double()
    return MismatchSums(
        tokens=float(kept.numel()),
        kept=float((kept > 0).sum()),
        weight=float(kept.sum()),
        square=float(kept.square().sum()),
        largest=float(kept.max()) if kept.numel() else 0.0,
        k3=float((torch.expm1(log_rho) - log_rho).sum()),
    )


def add_sums(parts: Sequence[MismatchSums]) -> MismatchSums:
    """Of micro-batches or ranks; none give zeros."""
    return MismatchSums(
        tokens=sum(part.tokens for part in parts),
        kept=sum(part.kept for part in parts),
        weight=sum(part.weight for part in parts),
        square=sum(part.square for part in parts),
        largest=max((part.largest for part in parts), default=0.0),
        k3=sum(part.k3 for part in parts),
    )


def mean_kept_weight(sums: MismatchSums) -> float:
    """What weights are divided by so that those above 0 have a mean of 1; 1 where there are none."""
    return sums.weight / sums.kept if sums.kept else 1.0


def correction_metrics(sums: MismatchSums) -> list[Metric]:
    """Of the trained tokens of an iteration, on all ranks. ess_frac: (sum w)^2 / (n sum w^2), 1 for equal weights."""
    if not sums.tokens:
        return []
    ess = sums.weight**2 / (sums.tokens * sums.square) if sums.square else 0.0
    values = {
        "mismatch/k3": sums.k3 / sums.tokens,
        "mismatch/kept_frac": sums.kept / sums.tokens,
        "mismatch/weight_mean": sums.weight / sums.tokens,
        "mismatch/weight_max": sums.largest,
        "mismatch/ess_frac": ess,
    }
    return [Metric(name=name, value=value, reduce="max") for name, value in values.items()]


@dataclass(frozen=True, slots=True)
class _Ratios:
    log_rho: Tensor  # [T] float64, 0 where masked
    mask: Tensor  # [T] bool
    sequence: Tensor  # [T] number of the token's sequence
    num_sequences: int

    @property
    def token(self) -> Tensor:
        return self.log_rho.exp()

    def total(self, values: Tensor) -> Tensor:
        """[T] sum over the trained tokens of each token's sequence."""
        sums = values.new_zeros(self.num_sequences)
        return sums.index_add_(0, self.sequence, torch.where(self.mask, values, 0.0))[self.sequence]

    def mean(self, values: Tensor) -> Tensor:
        """[T] mean over the trained tokens of each token's sequence."""
        return self.total(values) / self.total(torch.ones_like(values)).clamp(min=1)

    @property
    def whole(self) -> Tensor:
        """[T] the product of the ratios of each token's sequence."""
        return self.total(self.log_rho).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _token_tis(ratios: _Ratios, config: CorrectionConfig) -> Tensor:
    """min(rho, high): truncated importance sampling."""
    return ratios.token.clamp(max=correction_bound(config, "high"))


def _sequence_tis(ratios: _Ratios, config: CorrectionConfig) -> Tensor:
    """min(product of rho, high), the same for all tokens of a sequence."""
    return ratios.whole.clamp(max=correction_bound(config, "high"))


def _cis(ratios: _Ratios, config: CorrectionConfig) -> Tensor:
    """clip(rho, low, high)."""
    return ratios.token.clamp(correction_bound(config, "low"), correction_bound(config, "high"))


def _icepop(ratios: _Ratios, config: CorrectionConfig) -> Tensor:
    """rho within the bounds, else 0."""
    return torch.where(_is_within(ratios.token, config), ratios.token, 0.0)


def _sequence_mask(ratios: _Ratios, config: CorrectionConfig) -> Tensor:
    """Product of rho within the bounds, else 0 for the whole sequence."""
    return torch.where(_is_within(ratios.whole, config), ratios.whole, 0.0)


def _geometric_mask(ratios: _Ratios, config: CorrectionConfig) -> Tensor:
    """rho of each token where the geometric mean over the sequence is within the bounds, else 0 for all of it."""
    return torch.where(_is_within(ratios.mean(ratios.log_rho).exp(), config), ratios.token, 0.0)


def _k2_mask(ratios: _Ratios, config: CorrectionConfig) -> Tensor:
    """rho of each token where the sequence's mean of log(rho)^2 / 2 is at most `high` nats, else 0 for all of it."""
    distance = ratios.mean(0.5 * ratios.log_rho.square())
    return torch.where(distance <= (correction_bound(config, "high") or 0.0), ratios.token, 0.0)


def _k3_mask(ratios: _Ratios, config: CorrectionConfig) -> Tensor:
    """The same by the mean of rho - 1 - log rho."""
    distance = ratios.mean(torch.expm1(ratios.log_rho) - ratios.log_rho)
    return torch.where(distance <= (correction_bound(config, "high") or 0.0), ratios.token, 0.0)


_KINDS: dict[CorrectionKind, Callable[[_Ratios, CorrectionConfig], Tensor]] = {
    "none": lambda ratios, config: torch.ones_like(ratios.log_rho),
    "token_tis": _token_tis,
    "sequence_tis": _sequence_tis,
    "cis": _cis,
    "icepop": _icepop,
    "sequence_mask": _sequence_mask,
    "geometric_mask": _geometric_mask,
    "k2_mask": _k2_mask,
    "k3_mask": _k3_mask,
}


def _is_within(values: Tensor, config: CorrectionConfig) -> Tensor:
    low, high = correction_bound(config, "low"), correction_bound(config, "high")
    assert low is not None and high is not None
    return (values >= low) & (values <= high)


def _log_ratio(old: Tensor, rollout: Tensor, mask: Tensor) -> Tensor:
    # selected before the difference: what is masked may be inf or NaN
    gap = torch.where(mask, old, 0.0).double() - torch.where(mask, rollout, 0.0).double()
    return gap.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _sequence_index(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    lengths = cu_seqlens.long().diff()
    return torch.arange(len(lengths)).repeat_interleave(lengths, output_size=num_tokens)

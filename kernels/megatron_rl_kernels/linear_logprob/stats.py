"""Statistics of parts of a softmax: how they add up over blocks, splits and ranks, and what they amount to.

A part is any set of columns of the logits z of N tokens. Its statistics are a tensor [5, N] of float32 or float64:

    TOP      m, the largest logit; -inf for a part without columns
    SUM      s = sum exp(z - b), with the base b = m, or 0 where m = -inf
    MOMENT   u = sum exp(z - b) (z - b), a term with z = -inf counting 0
    TARGET   z of the target - b where the part holds the target, else 0
    OWNERS   1 where the part holds the target, else 0

Everything is relative to the base, so that an offset shared by all logits costs no digits. Natural units (nats).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

NUM_STATISTICS = 5
TOP, SUM, MOMENT, TARGET, OWNERS = range(NUM_STATISTICS)

# finite, and far below every shift that leaves a trace: keeps 0 * -inf out of the sums
LOWEST_SHIFT = -1e30


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the statistics of all columns amount to, in nats."""

    logprob: Tensor  # [N] of the target; NaN where no part holds it (or two do)
    entropy: Tensor  # [N]; meaningless where MOMENT was not summed
    base: Tensor  # [N] largest logit, 0 where there is none
    sum_exp: Tensor  # [N] sum exp(z - base), at least 1
    has_target: Tensor  # [N] bool

    @property
    def lse(self) -> Tensor:
        """[N] log-sum-exp of the logits."""
        return self.base + self.sum_exp.log()


def empty_part(num_tokens: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[5, N] of a part without columns."""
    stats = torch.zeros((NUM_STATISTICS, num_tokens), dtype=dtype, device=device)
    stats[TOP] = float("-inf")
    return stats


def merge_parts(parts: Tensor) -> Tensor:
    """[P, 5, N] of P disjoint parts -> [5, N] of their union; the order of the parts decides the bits."""
    top = parts[:, TOP].amax(dim=0)
    return torch.cat((top[None], _rescaled(parts, top).sum(dim=0)))


def merge_over_group(stats: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[5, N] of each rank's part -> [5, N] of the union, the same bits on all ranks.

    One all-reduce MAX of [N] and one SUM of [4, N]. Collective: all ranks of the group call it with the same N.
    """
    top = stats[TOP].clone()
    dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
    sums = _rescaled(stats, top)
    dist.all_reduce(sums, group=group)
    return torch.cat((top[None], sums))


def outcome(stats: Tensor) -> Outcome:
    """Log-prob, entropy and log-sum-exp from the statistics [5, N] of all columns.

    A row whose logits are all -inf has no distribution: NaN.
    """
    log_sum = stats[SUM].log()
    has_target = stats[OWNERS] == 1
    logprob = (stats[TARGET] - log_sum).masked_fill(~has_target, float("nan"))
    # rounding may leave a distribution of one token at -1e-8
    entropy = (log_sum - stats[MOMENT] / stats[SUM]).clamp(min=0)
    return Outcome(logprob, entropy, base_of(stats[TOP]), stats[SUM], has_target)


def base_of(top: Tensor) -> Tensor:
    """What a part's statistics are relative to: its largest logit, 0 where there is none."""
    return torch.where(top == float("-inf"), 0.0, top)


def _rescaled(stats: Tensor, top: Tensor) -> Tensor:
    """The four sums [..., 4, N] of a part or of parts, moved from their own base to the base of `top` [N]."""
    part_top, sum_exp, moment, at_target, owners = stats.unbind(dim=-2)
    shift = (part_top - base_of(top)).clamp(min=LOWEST_SHIFT)
    scale = shift.exp()
    moved_target = torch.where(owners > 0, at_target + shift, 0.0)
    return torch.stack((scale * sum_exp, scale * (moment + shift * sum_exp), moved_target, owners), dim=-2)

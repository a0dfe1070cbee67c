"""What must hold for log-probs and entropies at run time, and a slow, independent second opinion for a few tokens.

Everything here stays on the device until `violation` reads it: a training step looks once, when it reads its metrics.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

# of log-probs and entropies in float32, in nats: rounding may cross a bound by far less
SLACK = 1e-4
# between an op and its definition: float32 sums in another order, and products of bfloat16 are exact in both. Logits
# rounded to bfloat16, the usual fault, are off by 2e-3 on average
ATOL, RTOL = 5e-4, 1e-5

_BLOCK_ROWS = 8192


def worst(logprob: Tensor, entropy: Tensor | None, positions: Tensor, *, vocab_size: int) -> Tensor:
    """[4] float64: how many tokens at `positions` break an invariant; position, log-prob, entropy of the first one.

    logprob [N], entropy [N] or None, positions [k] int64. Invariants: finite, log-prob <= 0,
    0 <= entropy <= ln(vocab_size).
    """
    if positions.numel() == 0:
        return logprob.new_zeros(4, dtype=torch.float64)
    logprob, entropy = logprob[positions], None if entropy is None else entropy[positions]
    # written so that NaN is bad
    bad = ~((logprob <= SLACK) & (logprob > -math.inf))
    if entropy is not None:
        bad |= ~((entropy >= -SLACK) & (entropy <= math.log(vocab_size) + SLACK))
    first = bad.int().argmax()
    entropy_there = logprob.new_zeros(()) if entropy is None else entropy[first]
    found = (bad.sum(), positions[first], logprob[first], entropy_there)
    return torch.stack([value.detach().to(torch.float64) for value in found])


def violation(op: str, found: Tensor, *, vocab_size: int) -> str | None:
    """What `worst` found, in words; None: nothing. Waits for the device."""
    count, first, logprob, entropy = found.tolist()
    if count == 0:
        return None
    return (
        f"{op}: token {first:.0f} of a micro-batch (the first of {count:.0f}) has log-prob {logprob:g} and entropy "
        f"{entropy:g}; must be finite, at most 0, and between 0 and ln({vocab_size}) = {math.log(vocab_size):.4g}"
    )


@torch.no_grad()
def difference(
    op: str,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    logprob: Tensor,
    entropy: Tensor | None,
    positions: Tensor,
    temperature: float = 1.0,
    vocab_start: int = 0,
    valid_vocab: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> str | None:
    """Compare the results of `op` at `positions` [k] with their definition in float64; None: they agree.

    hidden [N, H], target, logprob, entropy [N]; weight [V_local, H] and the rest as `linear_logprob` takes them. All
    ranks of `group` call it with the same positions and get the same answer. Waits for the device.
    """
    wanted = _definition(
        hidden[positions], weight, target[positions], temperature=temperature, vocab_start=vocab_start,
        valid_vocab=valid_vocab, group=group,
    )  # fmt: skip
    got = (logprob, entropy)
    for name, values, want in zip(("log-prob", "entropy"), got, wanted, strict=True):
        if values is None or positions.numel() == 0:
            continue
        gap = (values[positions].to(torch.float64) - want).abs()
        # written so that NaN is bad
        bad = ~(gap <= ATOL + RTOL * want.abs())
        if bool(bad.any()):
            first = int(bad.int().argmax())
            place = int(positions[first])
            return (
                f"{op}: the {name} of token {place} of the first micro-batch is {values[place].item():.6g}, by its "
                f"definition in float64 {want[first].item():.6g} ({int(bad.sum())} of {len(bad)} tokens compared "
                f"differ by more than {ATOL:g} + {RTOL:g} x)"
            )
    return None


def _definition(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    temperature: float,
    vocab_start: int,
    valid_vocab: int | None,
    group: dist.ProcessGroup | None,
) -> tuple[Tensor, Tensor]:
    """Log-prob and entropy [k] in float64; all logits of k tokens exist, block by block of the vocabulary."""
    rows = weight.shape[0]
    if valid_vocab is not None:
        rows = min(rows, max(valid_vocab - vocab_start, 0))
    logits = hidden.new_full((hidden.shape[0], rows), 0, dtype=torch.float64)
    for start in range(0, rows, _BLOCK_ROWS):
        block = weight[start : min(start + _BLOCK_ROWS, rows)].to(torch.float64)
        logits[:, start : start + len(block)] = hidden.to(torch.float64) @ block.T / temperature
    top = logits.amax(dim=1) if rows else logits.new_full((len(logits),), -math.inf)
    _reduce(top, dist.ReduceOp.MAX, group)
    logits -= top[:, None]
    exp = logits.exp()
    local = target - vocab_start
    owned = (local >= 0) & (local < rows)
    at_target = (
        logits.gather(1, local.clamp(0, max(rows - 1, 0))[:, None])[:, 0] if rows else torch.zeros_like(top)
    )
    sums = torch.stack(
        (
            exp.sum(dim=1),
            torch.where(exp > 0, exp * logits, 0.0).sum(dim=1),
            torch.where(owned, at_target, 0.0),
        )
    )
    _reduce(sums, dist.ReduceOp.SUM, group)
    log_sum = sums[0].log()
    return sums[2] - log_sum, log_sum - sums[1] / sums[0]


def _reduce(values: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None) -> None:
    if group is not None and group.size() > 1 and values.numel():
        dist.all_reduce(values, op=op, group=group)

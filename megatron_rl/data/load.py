"""How well a plan of micro-batches uses what it makes all ranks compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from megatron_rl.data.balance import Plan, fewest_microbatches, work


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What the optimizer steps of one plan or several cost, in positions of all dp ranks; steps add up."""

    filled: int = 0  # positions of samples
    computed: int = 0  # positions that go through the model: those, padding, and empty micro-batches
    capacity: int = 0  # of the micro-batches that are run, were each as long as tokens_per_microbatch
    least_capacity: int = 0  # of the fewest micro-batches that could hold as many positions
    num_microbatches: int = 0  # per dp rank
    heaviest: float = 0.0  # work of the dp rank with the most, see `data.balance.work`
    mean: float = 0.0  # work of a dp rank

    def __add__(self, other: Load) -> Load:
        return Load(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def metrics(self) -> dict[str, float]:
        """`batch/...`, as data/README.md explains them; none where nothing was run."""
        if not self.filled:
            return {}
        return {
            "batch/packing_efficiency": self.filled / self.capacity,
            "batch/packing_bound": self.filled / self.least_capacity,
            "batch/padding_frac": 1 - self.filled / self.computed,
            # steps wait for their heaviest rank one after the other: sums of both, not a mean of ratios
            "batch/dp_imbalance": self.heaviest / self.mean - 1,
            "batch/num_microbatches": float(self.num_microbatches),
        }


def load_of(
    plan: Plan,
    lengths: Sequence[int],
    *,
    tokens_per_microbatch: int,
    pad_multiples: Sequence[int],
    multiple_of: int = 1,
    attention_weight: float = 0.0,
) -> Load:
    """The load of one optimizer step; `pad_multiples` of every dp rank, the rest as `microbatch_plan` had it."""
    dp, filled = len(plan), sum(lengths)
    per_rank = [sum(work(lengths[i], attention_weight) for one in rank for i in one) for rank in plan]
    padded = [
        -(-sum(lengths[i] for i in one) // pad) * pad if one else max(2, pad)
        for rank, pad in zip(plan, pad_multiples, strict=True)
        for one in rank
    ]
    fewest = fewest_microbatches(
        filled, dp=dp, tokens_per_microbatch=tokens_per_microbatch, multiple_of=multiple_of
    )
    return Load(
        filled=filled,
        computed=sum(padded),
        capacity=len(padded) * tokens_per_microbatch,
        least_capacity=dp * fewest * tokens_per_microbatch,
        num_microbatches=len(plan[0]),
        heaviest=max(per_rank),
        mean=sum(per_rank) / dp,
    )

"""Who computes what: samples to data-parallel ranks, and to micro-batches of one rank.

Pure and deterministic: every rank computes the same plan from the same samples and communicates nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from megatron_rl.data.types import TrainSample
from megatron_rl.errors import DataError


def assign(lengths: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Indices of `lengths` for each rank: every index exactly once, totals as even as greedy makes them.

    Longest first to the lightest rank (LPT: the heaviest rank is within 4/3 of the optimum); ties go to the
    rank with fewer indices, then to the lower rank. Each rank's indices ascend. A rank gets none only when
    there are fewer indices than ranks.
    """
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    lightest = [(0, 0, rank) for rank in range(num_ranks)]
    for index in _longest_first(lengths, range(len(lengths))):
        total, count, rank = heapq.heappop(lightest)
        ranks[rank].append(index)
        heapq.heappush(lightest, (total + lengths[index], count + 1, rank))
    return [sorted(indices) for indices in ranks]


def microbatch_plan(
    samples: Sequence[TrainSample],
    *,
    dp: int,
    tokens_per_microbatch: int,
    pad_multiple: int = 1,
    multiple_of: int = 1,
) -> list[list[list[int]]]:
    """plan[dp_rank][microbatch] = indices of `samples`; `data.pack.pack_microbatch` builds the batches.

    All ranks get the same number of micro-batches, a multiple of `multiple_of` (interleaved pipelines need
    pp), at least one even without samples. A rank with too little work has empty lists, which pack to zero
    weight. Raises DataError for a sample that does not fit `tokens_per_microbatch`, or has fewer than two
    tokens.
    """
    budget = _usable_budget(tokens_per_microbatch, pad_multiple)
    _check_fit(samples, range(len(samples)), budget=budget, tokens_per_microbatch=tokens_per_microbatch)
    lengths = [sample.packed_length for sample in samples]
    per_rank = assign(lengths, dp)
    bins = [_first_fit_decreasing(lengths, indices, budget) for indices in per_rank]
    needed = max(1, *(len(rank_bins) for rank_bins in bins))
    count = -(-needed // multiple_of) * multiple_of
    return [_spread(lengths, rank_bins, count=count, budget=budget) for rank_bins in bins]


def fill_bins(
    samples: Sequence[TrainSample],
    indices: Sequence[int],
    *,
    tokens_per_microbatch: int,
    pad_multiple: int = 1,
) -> list[list[int]]:
    """Micro-batches of the samples at `indices`, first-fit-decreasing, none above `tokens_per_microbatch`.

    Every index exactly once, ascending inside a micro-batch. Raises DataError as `microbatch_plan` does.
    """
    budget = _usable_budget(tokens_per_microbatch, pad_multiple)
    _check_fit(samples, indices, budget=budget, tokens_per_microbatch=tokens_per_microbatch)
    return _first_fit_decreasing([sample.packed_length for sample in samples], indices, budget)


def _usable_budget(tokens_per_microbatch: int, pad_multiple: int) -> int:
    # Padding goes up to a multiple, so what lies above the last multiple within the budget is out of reach.
    return tokens_per_microbatch // pad_multiple * pad_multiple


def _check_fit(
    samples: Sequence[TrainSample], indices: Iterable[int], *, budget: int, tokens_per_microbatch: int
) -> None:
    for index in indices:
        sample = samples[index]
        name = sample.sample_id or f"at position {index}"
        if sample.packed_length < 1:
            raise DataError(
                f"sample {name}: got {len(sample.token_ids)} tokens, need at least 2 to predict one"
            )
        if sample.packed_length > budget:
            raise DataError(
                f"sample {name}: {len(sample.token_ids)} tokens take {sample.packed_length} positions, but "
                f"tokens_per_microbatch is {tokens_per_microbatch} ({budget} after padding to a multiple); "
                f"raise tokens_per_microbatch to at least "
                f"{tokens_per_microbatch - budget + sample.packed_length} or lower the longest allowed sample"
            )


def _longest_first(lengths: Sequence[int], indices: Iterable[int]) -> list[int]:
    return sorted(indices, key=lambda index: (-lengths[index], index))


def _first_fit_decreasing(lengths: Sequence[int], indices: Sequence[int], budget: int) -> list[list[int]]:
    bins: list[list[int]] = []
    room: list[int] = []
    for index in _longest_first(lengths, indices):
        need = lengths[index]
        found = next((k for k, free in enumerate(room) if free >= need), None)
        if found is None:
            bins.append([])
            room.append(budget)
            found = len(bins) - 1
        bins[found].append(index)
        room[found] -= need
    return [sorted(members) for members in bins]


def _spread(lengths: Sequence[int], bins: list[list[int]], *, count: int, budget: int) -> list[list[int]]:
    """The same indices over `count` micro-batches, evenly where that keeps the budget."""
    members = sorted(index for one in bins for index in one)
    even = [[members[i] for i in share] for share in assign([lengths[index] for index in members], count)]
    # Greedy spreading can overfill a micro-batch that first-fit filled exactly; then empty ones are the
    # answer.
    if all(sum(lengths[index] for index in share) <= budget for share in even):
        return even
    return bins + [[] for _ in range(count - len(bins))]

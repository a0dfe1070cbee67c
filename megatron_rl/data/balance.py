"""Who computes what: samples to data-parallel ranks, and to micro-batches of one rank.

Pure and deterministic: every rank computes the same plan from the same samples and communicates nothing. Three
classic heuristics of number partitioning and bin packing do the work: longest processing time first (LPT, Graham
1969), largest differencing (Karmarkar and Karp 1982) and best-fit decreasing (Johnson 1974).
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence

from megatron_rl.data.types import TrainSample
from megatron_rl.errors import DataError

# Largest differencing costs samples x parts: above so much LPT alone, which is even within a thousandth there.
_MAX_DIFFERENCING = 1 << 17
# Another micro-batch per rank is worth its cost where it makes ranks more even than by this.
_TOLERATED_IMBALANCE = 0.03

# plan[dp_rank][microbatch] = indices of samples
Plan = list[list[list[int]]]


def assign(weights: Sequence[float], num_ranks: int) -> list[list[int]]:
    """Indices of `weights` for each rank: every index exactly once, totals as even as can be had cheaply.

    LPT (the heaviest rank is within 4/3 of the optimum), or largest differencing where that is more even: with few
    samples per rank it is. Each rank's indices ascend. A rank gets none only when there are fewer indices than ranks.
    """
    return min(
        _partitions(weights, range(len(weights)), num_ranks), key=lambda ranks: _heaviest(weights, ranks)
    )


def work(length: int, attention_weight: float) -> float:
    """What a sample of `length` positions costs, in positions that attend to nothing: attention is quadratic.

    `attention_weight` is 1 / (the length at which a position's attention costs as much as all the rest of it).
    """
    return length * (1.0 + attention_weight * length)


def microbatch_plan(
    samples: Sequence[TrainSample],
    *,
    dp: int,
    tokens_per_microbatch: int,
    pad_multiple: int = 1,
    multiple_of: int = 1,
    attention_weight: float = 0.0,
) -> Plan:
    """plan[dp_rank][microbatch] = indices of `samples`; `data.pack.pack_microbatch` builds the batches.

    Ranks get even shares of the work (see `work`). As few micro-batches as the heuristics find hold them, and samples
    are spread evenly over these: a budget that is not used up gives shorter micro-batches, not full ones and a rest.
    All ranks get the same number of micro-batches, a multiple of `multiple_of` (interleaved pipelines need
    pp), at least one even without samples. A rank with too little work has empty lists, which pack to zero
    weight. Raises DataError for a sample that does not fit `tokens_per_microbatch`, or has fewer than two
    tokens.
    """
    budget = _usable_budget(tokens_per_microbatch, pad_multiple)
    _check_fit(samples, range(len(samples)), budget=budget, tokens_per_microbatch=tokens_per_microbatch)
    lengths = [sample.packed_length for sample in samples]
    weights: Sequence[float] = lengths
    if attention_weight:
        weights = [work(length, attention_weight) for length in lengths]
    shares = [assign(weights, dp)]
    if attention_weight and dp > 1:
        # of equal work, ranks with short samples have more tokens, and may need more micro-batches
        shares.append(assign(lengths, dp))
    imbalances = [_heaviest(weights, per_rank) * dp / (sum(weights) or 1) - 1 for per_rank in shares]
    plans = []
    for per_rank, imbalance in zip(shares, imbalances, strict=True):
        bins = [_fewest_bins(lengths, indices, budget, dp=dp) for indices in per_rank]
        needed = max(1, *(len(rank_bins) for rank_bins in bins))
        count = -(-needed // multiple_of) * multiple_of
        plans.append((imbalance > min(imbalances) + _TOLERATED_IMBALANCE, count, imbalance, bins))
    *_, count, _, bins = min(plans, key=lambda plan: plan[:3])
    return [_spread(lengths, weights, rank_bins, count=count, budget=budget, dp=dp) for rank_bins in bins]


def fewest_microbatches(total: int, *, dp: int, tokens_per_microbatch: int, multiple_of: int = 1) -> int:
    """Micro-batches per rank below which `total` positions cannot be held, however they are cut."""
    needed = max(1, -(-total // (dp * tokens_per_microbatch)))
    return -(-needed // multiple_of) * multiple_of


def fill_bins(
    samples: Sequence[TrainSample],
    indices: Sequence[int],
    *,
    tokens_per_microbatch: int,
    pad_multiple: int = 1,
) -> list[list[int]]:
    """Micro-batches of the samples at `indices`, best-fit-decreasing, none above `tokens_per_microbatch`.

    Every index exactly once, ascending inside a micro-batch. Raises DataError as `microbatch_plan` does.
    """
    budget = _usable_budget(tokens_per_microbatch, pad_multiple)
    _check_fit(samples, indices, budget=budget, tokens_per_microbatch=tokens_per_microbatch)
    return _best_fit_decreasing([sample.packed_length for sample in samples], indices, budget)


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


def _longest_first(weights: Sequence[float], indices: Iterable[int]) -> list[int]:
    return sorted(indices, key=lambda index: (-weights[index], index))


def _heaviest(weights: Sequence[float], parts: Iterable[Sequence[int]]) -> float:
    return max((sum(weights[index] for index in part) for part in parts), default=0)


def _partitions(
    weights: Sequence[float], indices: Sequence[int], count: int, *, limit: int = _MAX_DIFFERENCING
) -> Iterator[list[list[int]]]:
    """The indices in `count` even parts, by each heuristic that is worth its time."""
    yield _longest_to_lightest(weights, indices, count)
    if count > 1 and len(indices) * count <= limit:
        yield _largest_differencing(weights, indices, count)


def _longest_to_lightest(weights: Sequence[float], indices: Iterable[int], count: int) -> list[list[int]]:
    """LPT. Ties go to the part with fewer indices, then to the lower one."""
    parts: list[list[int]] = [[] for _ in range(count)]
    lightest: list[tuple[float, int, int]] = [(0, 0, part) for part in range(count)]
    for index in _longest_first(weights, indices):
        total, size, part = heapq.heappop(lightest)
        parts[part].append(index)
        heapq.heappush(lightest, (total + weights[index], size + 1, part))
    return [sorted(part) for part in parts]


def _largest_differencing(weights: Sequence[float], indices: Sequence[int], count: int) -> list[list[int]]:
    """Karmarkar-Karp: the two most uneven partial partitions become one, heavy on light, until one is left."""
    # a partial partition: its parts that hold anything, heaviest first; ordered by its spread, then by its oldest index
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = [
        (-weights[index], index, [(weights[index], [index])]) for index in indices
    ]
    heapq.heapify(heap)
    while len(heap) > 1:
        (_, age, one), (_, other_age, other) = heapq.heappop(heap), heapq.heappop(heap)
        # the heaviest of one meets the lightest of the other, which may be parts that hold nothing yet
        one = one + [(0, [])] * (count - len(one))
        other = other + [(0, [])] * (count - len(other))
        merged = [(a + b, mine + theirs) for (a, mine), (b, theirs) in zip(one, reversed(other), strict=True)]
        merged.sort(key=lambda part: -part[0])
        spread = merged[0][0] - merged[-1][0]
        heapq.heappush(heap, (-spread, min(age, other_age), [part for part in merged if part[1]]))
    parts = [sorted(part) for _, part in heap[0][2]] if heap else []
    return [*parts, *([] for _ in range(count - len(parts)))]


def _best_fit_decreasing(lengths: Sequence[int], indices: Iterable[int], budget: int) -> list[list[int]]:
    """Longest first, each into the fullest bin that it fits, the oldest of equals: at most 11/9 of the optimum."""
    bins: list[list[int]] = []
    # of every bin, ascending: the room that is left, and which bin it is
    rooms: list[tuple[int, int]] = []
    for index in _longest_first(lengths, indices):
        at = bisect_left(rooms, (lengths[index], -1))
        if at == len(rooms):
            rooms.append((budget, len(bins)))
            bins.append([])
        room, found = rooms.pop(at)
        bins[found].append(index)
        insort(rooms, (room - lengths[index], found))
    return [sorted(members) for members in bins]


def _fewest_bins(lengths: Sequence[int], indices: Sequence[int], budget: int, *, dp: int) -> list[list[int]]:
    """Bins within `budget`: best fit's, or fewer where even parts happen to fit."""
    bins = _best_fit_decreasing(lengths, indices, budget)
    least = -(-sum(lengths[index] for index in indices) // budget)
    while len(bins) > least and (
        fewer := _even_bins(lengths, lengths, indices, len(bins) - 1, budget=budget, dp=dp)
    ):
        bins = fewer
    return bins


def _even_bins(
    lengths: Sequence[int],
    weights: Sequence[float],
    indices: Sequence[int],
    count: int,
    *,
    budget: int,
    dp: int,
) -> list[list[int]] | None:
    """`count` bins even in weight, if a heuristic finds such that are within `budget`."""
    for bins in _partitions(weights, indices, count, limit=_MAX_DIFFERENCING // dp):
        if _heaviest(lengths, bins) <= budget:
            return bins
    return None


def _spread(
    lengths: Sequence[int],
    weights: Sequence[float],
    bins: list[list[int]],
    *,
    count: int,
    budget: int,
    dp: int,
) -> list[list[int]]:
    """The same indices over `count` micro-batches: even in work, or else in length, where that keeps the budget."""
    members = sorted(index for one in bins for index in one)
    for values in (weights, lengths) if weights is not lengths else (lengths,):
        if even := _even_bins(lengths, values, members, count, budget=budget, dp=dp):
            return even
    # Even parts can overfill a micro-batch where best fit does not; then empty ones are the answer.
    return bins + [[] for _ in range(count - len(bins))]

"""A plan in words: the three lines that `check` shows, the whole picture, and the path of one tensor."""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatron_rl.errors import ReshardError
from megatron_rl.reshard.segments import Segment

if TYPE_CHECKING:
    from megatron_rl.reshard.plan import ReshardPlan

_SHOWN = 12  # members that are listed


def summary_rows(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Three lines from `ReshardPlan.summary`, as (what, how much): what moves, how evenly, in how many pieces."""
    where = " on one machine"
    if facts["nodes"] > 1:
        where = f", {size_text(facts['cross_node_bytes'])} of it between {facts['nodes']} machines"
    return [
        (
            "weights moved",
            f"{size_text(facts['bytes_moved'])}{where}, {facts['ratio_to_minimum']:.2f} x the minimum; whole tensors "
            f"would be {size_text(facts['broadcast_bytes'])}",
        ),
        (
            "weights per rank",
            f"out {_spread(facts['sent_bytes'].values())} (max/mean {facts['send_imbalance']:.2f}), into a worker "
            f"{_spread(facts['received_bytes'].values())}",
        ),
        (
            "weights cut into",
            f"{_count(facts['buckets'], 'bucket')} of at most {size_text(facts['bucket_bytes'])} per worker, "
            f"{_count(facts['messages'], 'message')}, {_count(facts['transfers'], 'slice')}",
        ),
    ]


def explain(facts: Mapping[str, Any], digest: str) -> str:
    """Everything in `ReshardPlan.summary`, for a person."""
    target, sent, received = facts["target"], facts["sent_bytes"], facts["received_bytes"]
    engines = f"{target['replicas']} engine{'s' if target['replicas'] > 1 else ''} of tp {target['tp']}"
    once = ", every byte enters a node at most once" if facts["two_tier"] else ""
    slices = f"{size_text(facts['smallest_slice_bytes'])} to {size_text(facts['largest_slice_bytes'])}"
    rows = [
        ("from", f"{_count(len(sent), 'trainer rank')}: {_layout(facts['source'])}"),
        ("to", f"{engines}: {_count(len(received), 'worker')}"),
        ("on", _count(facts["nodes"], "node") + once),
        ("model", f"{size_text(facts['model_bytes'])} at {facts['element_bytes']} bytes per element"),
        ("", ""),
        (
            "moves",
            f"{size_text(facts['bytes_moved'])}, {_of_least(facts['ratio_to_minimum'])}: each worker its part",
        ),
        ("  on one device", size_text(facts["local_bytes"])),
        ("  inside nodes", size_text(facts["intra_node_bytes"])),
        ("  between nodes", _between(facts)),
        ("instead of", f"{size_text(facts['broadcast_bytes'])}, were whole tensors sent to every worker"),
        ("", ""),
        ("trainer ranks send", f"{_spread(sent.values())} each, max/mean {facts['send_imbalance']:.2f}"),
        *_extremes(sent, "rank"),
        ("workers receive", f"{_spread(received.values())} each, max/mean {facts['receive_imbalance']:.2f}"),
        *_extremes(received, "worker"),
        *(
            [("  and pass on", f"{_spread(facts['relayed_bytes'].values())} each")]
            if facts["two_tier"]
            else []
        ),
        ("", ""),
        ("buckets", f"{facts['buckets']:,} of at most {size_text(facts['bucket_bytes'])} per worker"),
        ("messages", f"{facts['messages']:,} of together {facts['transfers']:,} slices, {slices} each"),
        (
            "peak of 2 buckets",
            f"{size_text(facts['peak_send_bytes'])} on the busiest sender, "
            f"{size_text(facts['peak_receive_bytes'])} on a receiver",
        ),
        ("digest", digest),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}".rstrip() for name, value in rows)


def explain_tensor(plan: ReshardPlan, name: str) -> str:
    """Who holds which part of one tensor, who needs which, and who sends what to whom in which bucket.

    Raises ReshardError with the nearest names for a tensor that the model does not have.
    """
    if name not in plan.shapes:
        close = difflib.get_close_matches(name, plan.names, n=3, cutoff=0.6)
        hint = f"did you mean {' or '.join(close)}?" if close else f"the first is {plan.names[0]}"
        raise ReshardError(f"tensor {name}: not one of the model's {len(plan.names)} tensors; {hint}")
    shape = plan.shapes[name]
    return "\n".join(
        [
            f"{name}  {list(shape)}",
            "held by",
            *(f"  {line}" for line in _held(plan, name)),
            "needed by",
            *(f"  {line}" for line in _needed(plan, name)),
            "travels",
            *(f"  {line}" for line in _travels(plan, name)),
        ]
    )


def size_text(size: float) -> str:
    """Bytes in the largest unit that leaves a number of at least 1."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{_short(size)} {unit}"
        size /= 1024
    return f"{_short(size)} TiB"


def _short(number: float) -> str:
    return f"{number:,.1f}".removesuffix(".0")


def ranges_text(numbers: Iterable[int]) -> str:
    """Numbers as `0-3, 8, 16-17`, the last of many left out."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    words = [f"{low}" if low == high else f"{low}-{high}" for low, high in runs]
    return _some(words)


def _held(plan: ReshardPlan, name: str) -> Iterator[str]:
    places: dict[str, list[int]] = defaultdict(list)
    for holding in plan.holdings:
        for piece in holding.pieces.get(name, ()):
            where = f"chunk {piece.chunk} {piece.param}"
            if piece.hf_dim is None:
                places[f"all of it, as {where}"] += holding.ranks
            else:
                end = piece.param_start + piece.length
                places[
                    f"{_range(piece.hf_dim, piece.hf_start, piece.length)}, in {where}[{piece.param_start}:{end}]"
                ] += holding.ranks
    for place, ranks in places.items():
        yield f"rank {ranges_text(ranks)}: {place}"


def _needed(plan: ReshardPlan, name: str) -> Iterator[str]:
    needs: dict[str, list[int]] = defaultdict(list)
    for rank, table in enumerate(plan.needs):
        dim, start, length = table[name]
        what = "all of it" if dim is None else _range(dim, start, length)
        needs[what if dim is None or length else "nothing, its share is padding"].append(rank)
    for what, tp_ranks in needs.items():
        workers = [r * plan.target_tp + rank for r in range(plan.replicas) for rank in tp_ranks]
        yield f"tp rank {ranges_text(tp_ranks)} of an engine (worker {ranges_text(workers)}): {what}"


def _travels(plan: ReshardPlan, name: str) -> Iterator[str]:
    tensor = plan.names.index(name)
    moves = [
        (segment.bucket, interval, index)
        for index, segment in enumerate(plan.segments)
        for interval in segment.intervals
        if interval.tensor == tensor
    ]
    for bucket, interval, index in sorted(moves, key=lambda move: (move[0], move[1].start)):
        what = "all of it" if interval.dim is None else _range(interval.dim, interval.start, interval.length)
        yield f"bucket {bucket}: {what}, {size_text(interval.bytes)} each"
        for line in _senders(plan, plan.segments[index], plan.routes[index]):
            yield f"  {line}"


def _senders(plan: ReshardPlan, segment: Segment, senders: Sequence[int]) -> Iterator[str]:
    receivers: dict[int, list[int]] = defaultdict(list)
    for worker, sender in zip(plan.workers_of(segment), senders, strict=True):
        receivers[sender].append(worker - plan.num_trainers)
    passed_on = []
    for sender, workers in sorted(receivers.items()):
        if sender < plan.num_trainers:
            yield f"rank {sender} to worker {ranges_text(workers)}"
        else:
            passed_on.append(f"worker {sender - plan.num_trainers} to {ranges_text(workers)}")
    if passed_on:
        yield f"passed on by {_some(passed_on)}"


def _range(dim: int, start: int, length: int) -> str:
    return f"{'rows' if dim == 0 else 'columns'} {start}:{start + length}"


def _between(facts: Mapping[str, Any]) -> str:
    text = size_text(facts["cross_node_bytes"])
    if facts["cross_node_bytes"]:
        text += f", {_of_least(facts['cross_node_ratio'])}: each node its parts once"
    if facts["cross_node_ratio"] > 1.05:
        text += " (two tiers would do that)"
    return text


def _of_least(ratio: float) -> str:
    return f"{ratio:.3f} x the minimum"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' if number != 1 else ''}"


def _layout(source: Mapping[str, Any]) -> str:
    shown = {"tp": 1, "pp": 1, "dp": 1, "vpp": 0, "ep": 0}
    degrees = [f"{name} {source[name]}" for name, least in shown.items() if source[name] > 1 or least]
    if source["ep"] > 1 or source["etp"] not in (None, source["tp"]):
        degrees.append(f"etp {source['etp'] or source['tp']}")
    for name in ("first_stage_layers", "last_stage_layers"):
        if source[name] is not None:
            degrees.append(f"{source[name]} layers in the {name.split('_')[0]} stage")
    return ", ".join(degrees)


def _spread(sizes: Iterable[int]) -> str:
    sizes = list(sizes)
    low, high = size_text(min(sizes)), size_text(max(sizes))
    return low if low == high else f"{low} to {high}"


def _some(words: Sequence[str]) -> str:
    if len(words) <= _SHOWN + 1:
        return ", ".join(words)
    return ", ".join([*words[:_SHOWN], f"... {len(words) - _SHOWN} more"])


def _extremes(sizes: Mapping[int, int], what: str) -> Iterator[tuple[str, str]]:
    """Who has most and who has least, unless all have the same."""
    texts = {member: size_text(size) for member, size in sizes.items()}
    for word, size in (("most", max(sizes.values())), ("least", min(sizes.values()))):
        if len(set(texts.values())) > 1:
            members = [member for member, text in texts.items() if text == size_text(size)]
            yield f"  {word}", f"{what} {ranges_text(members)}"

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

_SHOWN = 16  # members listed one by one


def summary_lines(facts: Mapping[str, Any]) -> list[str]:
    """Three lines from `ReshardPlan.summary`: what moves, how evenly, in how many pieces."""
    wires = (
        f"{size_text(facts['intra_node_bytes'])} inside nodes, {size_text(facts['cross_node_bytes'])} between"
    )
    if facts["nodes"] == 1:
        wires = "one node"
    sent, received = facts["sent_bytes"].values(), facts["received_bytes"].values()
    return [
        f"moves {size_text(facts['bytes_moved'])} ({wires}), {facts['ratio_to_minimum']:.2f} x the minimum; "
        f"whole tensors to every worker would be {size_text(facts['broadcast_bytes'])}",
        f"trainer ranks send {_spread(sent)} (max/mean {facts['send_imbalance']:.2f}), "
        f"workers receive {_spread(received)}",
        f"{facts['messages']:,} messages of {facts['transfers']:,} slices in {facts['buckets']:,} buckets of at "
        f"most {size_text(facts['bucket_bytes'])} per worker",
    ]


def explain(facts: Mapping[str, Any], digest: str) -> str:
    """Everything in `ReshardPlan.summary`, for a person."""
    source, target = facts["source"], facts["target"]
    rows = [
        ("from", f"{len(facts['sent_bytes'])} trainer ranks: {_layout(source)}"),
        (
            "to",
            f"{target['replicas']} engine(s) of tp {target['tp']}: {len(facts['received_bytes'])} workers",
        ),
        (
            "nodes",
            f"{facts['nodes']}" + (", every byte enters a node at most once" if facts["two_tier"] else ""),
        ),
        ("model", f"{size_text(facts['model_bytes'])} at {facts['element_bytes']} bytes per element"),
        ("", ""),
        (
            "moved",
            f"{size_text(facts['bytes_moved'])}, {facts['ratio_to_minimum']:.3f} x what the workers lack",
        ),
        ("  same device", size_text(facts["local_bytes"])),
        ("  inside nodes", size_text(facts["intra_node_bytes"])),
        ("  between nodes", _between(facts)),
        ("a broadcast", f"{size_text(facts['broadcast_bytes'])}: whole tensors to every worker"),
        ("", ""),
        ("each rank sends", _balance(facts["sent_bytes"], facts["send_imbalance"])),
        ("  ", _members(facts["sent_bytes"])),
        ("a worker receives", _balance(facts["received_bytes"], facts["receive_imbalance"])),
        ("  ", _members(facts["received_bytes"])),
    ]
    if facts["two_tier"]:
        rows.append(("  and passes on", _spread(facts["relayed_bytes"].values())))
    slices = f"{size_text(facts['smallest_slice_bytes'])} to {size_text(facts['largest_slice_bytes'])}"
    rows += [
        ("", ""),
        ("buckets", f"{facts['buckets']:,} of at most {size_text(facts['bucket_bytes'])} per worker"),
        ("messages", f"{facts['messages']:,} of {facts['transfers']:,} slices, {slices} each"),
        (
            "two buckets hold",
            f"at most {size_text(facts['peak_send_bytes'])} on a sender, "
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
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} TiB"


def ranges_text(numbers: Iterable[int]) -> str:
    """Numbers as `0-3, 8, 16-17`, the last of many left out."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    words = [f"{low}" if low == high else f"{low}-{high}" for low, high in runs]
    more = [f"... {len(words) - _SHOWN} more"] if len(words) > _SHOWN + 1 else []
    return ", ".join([*(words[:_SHOWN] if more else words), *more])


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
    for worker, sender in zip(plan.workers_of(segment).tolist(), senders, strict=True):
        receivers[sender].append(worker - plan.num_trainers)
    for sender, workers in sorted(receivers.items()):
        who = f"rank {sender}" if sender < plan.num_trainers else f"worker {sender - plan.num_trainers}"
        yield f"{who} to worker {ranges_text(workers)}"


def _range(dim: int, start: int, length: int) -> str:
    return f"{'rows' if dim == 0 else 'columns'} {start}:{start + length}"


def _between(facts: Mapping[str, Any]) -> str:
    text = size_text(facts["cross_node_bytes"])
    if facts["cross_node_ratio"] > 1.0005:
        least = size_text(facts["cross_node_minimum_bytes"])
        return f"{text}, {facts['cross_node_ratio']:.2f} x the {least} of a two-tier plan"
    return text


def _layout(source: Mapping[str, Any]) -> str:
    shown = {"tp": 1, "pp": 1, "dp": 1, "vpp": 0, "ep": 0}
    degrees = [f"{name} {source[name]}" for name, least in shown.items() if source[name] > 1 or least]
    if source["ep"] > 1 or source["etp"] not in (None, source["tp"]):
        degrees.append(f"etp {source['etp'] or source['tp']}")
    for name in ("first_stage_layers", "last_stage_layers"):
        if source[name] is not None:
            degrees.append(f"{source[name]} layers in the {name.split('_')[0]} stage")
    return ", ".join(degrees)


def _balance(sizes: Mapping[int, int], imbalance: float) -> str:
    return f"{_spread(sizes.values())}, max/mean {imbalance:.2f}"


def _spread(sizes: Iterable[int]) -> str:
    sizes = list(sizes)
    low, high = size_text(min(sizes)), size_text(max(sizes))
    return low if low == high else f"{low} to {high}"


def _members(sizes: Mapping[int, int]) -> str:
    """Who has which size: members of equal size together, the largest first."""
    groups: dict[str, list[int]] = defaultdict(list)
    for member, size in sorted(sizes.items(), key=lambda item: -item[1]):
        groups[size_text(size)].append(member)
    shown = [f"{size}: {ranges_text(members)}" for size, members in list(groups.items())[:_SHOWN]]
    if len(groups) > _SHOWN:
        shown.append(f"... {len(groups) - _SHOWN} more sizes")
    return " | ".join(shown)

"""What bench_loop.py makes of its measurements: rates, ratios, shares, and how seconds grow with work."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

# wait: for rollouts that are made while others are trained on
PHASES = ("generate", "reward", "logprob", "train", "wait", "sync")


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One comparison: the longest response (RL), the counted steps of one round, and the ratio that is aimed at."""

    name: str
    steps: int
    target: float
    max_tokens: int = 0


CASES = {
    "short": Case(name="short", max_tokens=64, steps=6, target=1.3),
    "long": Case(name="long", max_tokens=448, steps=2, target=5.0),
    "sft": Case(name="sft", steps=12, target=1.0),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """The counted steps of one side: seconds, work (rollouts or tokens), and what is known besides."""

    seconds: Sequence[float]
    work: Sequence[float]
    cpu_seconds: Sequence[float]  # of all processes of the side
    lengths: Sequence[int] = ()  # tokens of each response of all steps
    phases: Sequence[Mapping[str, float]] = ()  # seconds by phase of each step; ours alone

    @property
    def rate(self) -> float:
        """Work per second over all of them: long responses may fall to one step and not to another."""
        return sum(self.work) / sum(self.seconds)

    @property
    def cpu_rate(self) -> float:
        """Work per CPU second: what other jobs on the machine change less."""
        return sum(self.work) / sum(self.cpu_seconds)


def joined(parts: Sequence[Steps]) -> Steps:
    return Steps(**{name: [x for part in parts for x in getattr(part, name)] for name in FIELDS})


FIELDS = tuple(field.name for field in fields(Steps))


def steps_of(lines: Sequence[Mapping[str, Any]], cpu: Sequence[float], *, work: str) -> Steps:
    """Of the lines of metrics.jsonl, the first one left out: the time from line to line, and the phases in it.

    `cpu` holds the CPU seconds that the run had used when each line came.
    """
    ends = [float(line["time_s"]) for line in lines]
    return Steps(
        seconds=[end - begin for begin, end in pairwise(ends)],
        work=[float(line[work]) for line in lines[1:]],
        cpu_seconds=[end - begin for begin, end in pairwise(cpu)],
        phases=[{name: float(line.get(f"time/{name}_s", 0.0)) for name in PHASES} for line in lines[1:]],
    )


def other_frac(steps: Steps) -> float:
    """Share of the time outside every phase."""
    inside = sum(sum(phases.values()) for phases in steps.phases)
    return 1.0 - inside / sum(steps.seconds)


def lengths_line(lengths: Sequence[int], *, limit: int) -> str:
    """A histogram in one line."""
    ordered = sorted(lengths)
    at = [f"p{q} {ordered[min(len(ordered) - 1, len(ordered) * q // 100)]}" for q in (10, 50, 90, 99)]
    cut = sum(length >= limit for length in ordered) / len(ordered)
    mean = statistics.fmean(ordered)
    return f"mean {mean:.1f}, {', '.join(at)}, longest {ordered[-1]}, at the limit {100 * cut:.1f} %"


def exponent(work: Sequence[float], seconds: Sequence[float]) -> float:
    """a of seconds = c * work^a by least squares in logarithms; 1 is linear."""
    logs = [[math.log(value) for value in values] for values in (work, seconds)]
    return statistics.linear_regression(*logs).slope


def peer_steps(steps: Sequence[Mapping[str, Any]]) -> Steps:
    """Of a result of bench_loop_peer.py, the first step left out."""
    counted = steps[1:]
    return Steps(
        seconds=[step["seconds"] for step in counted],
        cpu_seconds=[step["cpu_seconds"] for step in counted],
        work=[float(step["tokens"] if "tokens" in step else len(step["lengths"])) for step in counted],
        lengths=[length for step in counted for length in step.get("lengths", ())],
    )


def report(case: Case, result: Mapping[str, Any]) -> str:
    ours, theirs, ratios, cpu_ratios = (result[name] for name in ("ours", "theirs", "ratios", "cpu_ratios"))
    what = "tokens" if case.name == "sft" else "rollouts"
    step = [statistics.median(side.seconds) for side in (ours, theirs)]
    lines = [
        f"{case.name}: {what} a second: ours {ours.rate:.1f}, peer {theirs.rate:.1f}; "
        f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}), aim {case.target}; "
        f"seconds a step {step[0]:.2f} and {step[1]:.2f}",
        f"  per CPU second {ours.cpu_rate:.1f} and {theirs.cpu_rate:.1f}, "
        f"ratio {statistics.median(cpu_ratios):.2f} ({min(cpu_ratios):.2f} to {max(cpu_ratios):.2f})",
    ]
    if ours.lengths:
        each = [statistics.median(phases[name] for phases in ours.phases) for name in PHASES]
        pairs = zip(PHASES, each, strict=True)
        named = ", ".join(f"{name} {seconds:.2f}" for name, seconds in pairs if seconds)
        lines += [
            f"  seconds: {named}; outside of them {100 * other_frac(ours):.1f} % of the time",
            f"  lengths, ours: {lengths_line(ours.lengths, limit=case.max_tokens)}",
            f"  lengths, peer: {lengths_line(theirs.lengths, limit=case.max_tokens)}",
        ]
    return "\n".join(lines)


def scaling_report(found: Mapping[str, Sequence[float]]) -> str:
    """`found`: tokens, seconds and cpu_seconds of a step at each size."""
    points = [
        f"{tokens:.0f} in {seconds:.2f} s ({cpu:.2f} CPU s)"
        for tokens, seconds, cpu in zip(found["tokens"], found["seconds"], found["cpu_seconds"], strict=True)
    ]
    wall, cpu = (exponent(found["tokens"], found[name]) for name in ("seconds", "cpu_seconds"))
    return f"sft: tokens of a step: {', '.join(points)}; seconds grow as tokens^{wall:.2f}, CPU as tokens^{cpu:.2f}"

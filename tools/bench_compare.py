"""Compare two files of tools/bench_kernels.py: is anything slower, larger or less accurate than it was?

    bench_compare.py BEFORE AFTER [--tolerances FILE]

Ratios are after / before. A tolerance file maps "default", a device ("cpu"), a device and an op ("cpu/policy_loss") to
the largest ratio of time, memory and error; the most special entry that names a limit counts. Exit code 0: all within;
1: something is beyond, or gone; 2: the files cannot be compared.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TOLERANCES = Path(__file__).with_name("bench_tolerances.json")
LIMITS = ("time", "memory", "error")
KEY = ("op", "variant", "shape", "dtype", "contender", "phase")
# below this a ratio says something of the allocator or the rounding, not of the kernel
LEAST_MIB, LEAST_ERROR = 8.0, 1e-7


class CannotCompare(Exception):
    """The files are not two benchmarks of one kind of device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One contender in one phase. A ratio is None where one side was not measured; `problems` are what is too much."""

    key: tuple[str, ...]
    ratios: dict[str, float | None]
    problems: tuple[str, ...] = ()

    def line(self) -> str:
        figures = " ".join(
            f"{'-' if ratio is None else format(ratio, '.3f'):>8}" for ratio in self.ratios.values()
        )
        note = f"  <- {'; '.join(self.problems)}" if self.problems else ""
        return f"{figures}  {' '.join(part for part in self.key if part)}{note}"


def load(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if not all(name in data for name in ("machine", "rows")):
            raise KeyError("machine, rows")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CannotCompare(f"{path} is not a file of tools/bench_kernels.py ({error})") from error
    return dict(data)


def load_tolerances(path: Path) -> dict[str, dict[str, float]]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CannotCompare(f"{path}: {error}") from error
    unknown = {limit for entry in data.values() for limit in entry} - set(LIMITS)
    if unknown or set(data.get("default", {})) != set(LIMITS):
        raise CannotCompare(f"{path}: every entry names some of {', '.join(LIMITS)}, 'default' all of them")
    return dict(data)


def limits(tolerances: Mapping[str, Mapping[str, float]], device: str, op: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for name in ("default", device, f"{device}/{op}"):
        found |= tolerances.get(name, {})
    return found


def changes(
    before: Mapping[str, Any], after: Mapping[str, Any], tolerances: Mapping[str, Mapping[str, float]]
) -> Iterator[Change]:
    """Of every row of `before`. Only ours can be at fault: others are there to show whether the machine changed."""
    device = before["machine"]["device"]
    if after["machine"]["device"] != device:
        raise CannotCompare(f"one file is of {device}, the other of {after['machine']['device']}")
    found = {tuple(row[name] for name in KEY): row for row in after["rows"]}
    for row in before["rows"]:
        key = tuple(row[name] for name in KEY)
        if row["failed"]:
            continue
        now = found.get(key)
        if now is None or now["failed"]:
            problems: tuple[str, ...] = (
                ("gone" if now is None else f"fails: {now['failed']}",) if row["is_ours"] else ()
            )
            yield Change(key=key, ratios=dict.fromkeys(LIMITS), problems=problems)
            continue
        ratios = _ratios(row, now)
        allowed = limits(tolerances, device, row["op"])
        problems = tuple(
            f"{name} beyond {allowed[name]:g}"
            for name, ratio in ratios.items()
            if row["is_ours"] and ratio is not None and ratio > allowed[name]
        )
        yield Change(key=key, ratios=ratios, problems=problems)


def _ratios(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, float | None]:
    memory = None
    if before["peak_mib"] is not None and after["peak_mib"] is not None:
        memory = max(after["peak_mib"], LEAST_MIB) / max(before["peak_mib"], LEAST_MIB)
    shared = before["errors"].keys() & after["errors"].keys()
    errors = [max(after["errors"][n], LEAST_ERROR) / max(before["errors"][n], LEAST_ERROR) for n in shared]
    return {
        "time": after["seconds"]["median"] / before["seconds"]["median"],
        "memory": memory,
        "error": max(errors, default=None),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--tolerances", type=Path, default=TOLERANCES, help="default: %(default)s")
    args = parser.parse_args(argv)
    try:
        before, after = load(args.before), load(args.after)
        found = list(changes(before, after, load_tolerances(args.tolerances)))
    except CannotCompare as error:
        print(f"bench_compare: {error}", file=sys.stderr)
        return 2
    for name in ("processor", "threads", "versions"):
        if before["machine"][name] != after["machine"][name]:
            print(f"{name} differs: {before['machine'][name]}, then {after['machine'][name]}")
    print(" ".join(f"{name:>8}" for name in LIMITS), *(change.line() for change in found), sep="\n")
    broken = sum(1 for change in found if change.problems)
    print(f"{len(found)} rows compared, {broken} beyond tolerance")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())

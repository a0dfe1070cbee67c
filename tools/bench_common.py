"""What the benchmarks of checkpoints and of conversions share: their options, and how they name the machine."""

from __future__ import annotations

import argparse
import platform
from collections.abc import Sequence
from pathlib import Path


def machine() -> str:
    """Cores and processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0] if names else platform.machine()}"


def parse_args(
    argv: Sequence[str] | None, *, description: str | None, gb: float, what: str, rounds: int, space: int
) -> argparse.Namespace:
    """`gb` of `what` by default, `rounds` measurements, and `space` times the size of scratch files."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gb", type=float, default=gb, help=f"size of {what} (default: {gb:g})")
    parser.add_argument(
        "--rounds", type=int, default=rounds, help=f"measurements of each (default: {rounds})"
    )
    parser.add_argument(
        "--dir",
        type=Path,
        help=f"where to write scratch files, {space} times the size (default: temporary)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    return parser.parse_args(argv)

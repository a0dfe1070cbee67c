"""Rows of the kernel benchmark: rates, share of the floor, ratios; as a table and as JSON with their machine."""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from bench_kernels_cases import EAGER, OURS, Case, Least
from bench_kernels_timing import MIB, Ceiling, Lap, Spread

PHASES = ("forward", "backward", "both")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One contender in one phase. What was not measured is None."""

    op: str
    variant: str
    shape: str
    dtype: str
    contender: str
    is_ours: bool
    phase: str
    rounds: int = 0
    seconds: Spread | None = None
    wall_s: float | None = None  # of forward and backward together
    tflops_done: float | None = None  # by the products that were made
    tflops_useful: float | None = None  # by the products that cannot be avoided
    gb_per_s: float | None = None  # by the bytes that cannot be avoided
    floor_s: float | None = None
    floor_share: float | None = None  # 1: as fast as the floor
    peak_mib: float | None = None  # above inputs and gradients
    errors: dict[str, float] = field(default_factory=dict)
    speed_up: float | None = None  # against plain torch; only beside passing tests
    tested: bool | None = None
    failed: str = ""

    @property
    def key(self) -> tuple[str, ...]:
        return (self.op, self.variant, self.shape, self.dtype, self.contender, self.phase)


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Where and with what the rows were measured."""

    device: str
    processor: str
    threads: int
    versions: dict[str, str]
    commit: str
    date: str
    ceilings: dict[str, Ceiling]

    def line(self) -> str:
        tools = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        found = "; ".join(
            f"{dtype} product {one.flops_per_s / 1e12:.3g} TFLOP/s, copy {one.bytes_per_s / 1e9:.3g} GB/s"
            for dtype, one in self.ceilings.items()
        )
        return f"{self.processor}, {self.threads} thread(s), {tools}, {self.commit}, {self.date}\n{found}"


def machine(device: torch.device, ceilings: Mapping[torch.dtype, Ceiling]) -> Machine:
    packages = ("torch", "triton", "numpy", "liger-kernel", "cut-cross-entropy", "trl")
    return Machine(
        device=device.type,
        processor=torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name(),
        threads=torch.get_num_threads(),
        versions={"python": platform.python_version(), **_versions(packages)},
        commit=_commit(),
        date=f"{datetime.now(tz=UTC):%Y-%m-%d}",
        ceilings={_dtype_name(dtype): one for dtype, one in ceilings.items()},
    )


def _versions(packages: Sequence[str]) -> dict[str, str]:
    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next(
        (line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine()
    )


def _commit() -> str:
    root = Path(__file__).resolve().parents[1]
    command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown commit"
    return done.stdout.strip() or "unknown commit"


def rows_of(
    case: Case,
    laps: Mapping[str, Sequence[Lap]],
    errors: Mapping[str, dict[str, float]],
    failed: Mapping[str, str],
    ceiling: Ceiling,
    *,
    tested: bool | None,
) -> list[Row]:
    """Rows of all contenders; `tested` None: tests were not run."""
    rows = []
    for name in [*case.contenders, *(one for one in case.unavailable if one not in case.contenders)]:
        if name in failed:
            rows.append(Row(**_names(case, name, "both"), failed=failed[name], tested=tested))
            continue
        for phase in PHASES if case.leaves else ("forward",):
            seconds = [_seconds(lap, phase) for lap in laps[name]]
            eager = [_seconds(lap, phase) for lap in laps.get(EAGER, ())]
            rows.append(_row(case, name, phase, laps[name], seconds, eager, errors, ceiling, tested))
    return rows


def _row(
    case: Case,
    name: str,
    phase: str,
    laps: Sequence[Lap],
    seconds: Sequence[float],
    eager: Sequence[float],
    errors: Mapping[str, dict[str, float]],
    ceiling: Ceiling,
    tested: bool | None,
) -> Row:
    spread = Spread.of(seconds)
    gemms = case.contenders[name].gemms
    done = sum(gemms) if phase == "both" else gemms[PHASES.index(phase)]
    per_second = 1.0 / spread.median if spread.median > 0 else 0.0
    flops, num_bytes = unavoidable(case.least, phase)
    floor = max(flops / ceiling.flops_per_s, num_bytes / ceiling.bytes_per_s)
    # what makes its gradients in forward has no floor of one phase alone
    is_early = case.least.gemm_flops > 0 and gemms[1] == 0 and phase != "both"
    # what forward leaves in memory is there in backward too, so it has no peak of its own
    peaks = [lap.forward_bytes if phase == "forward" else lap.both_bytes for lap in laps]
    return Row(
        **_names(case, name, phase),
        rounds=len(seconds),
        seconds=spread,
        wall_s=statistics.median(lap.wall_s for lap in laps) if phase in ("both", "forward") else None,
        tflops_done=case.least.gemm_flops * done * per_second / 1e12 if case.least.gemm_flops else None,
        tflops_useful=flops * per_second / 1e12 if flops and not is_early else None,
        gb_per_s=None if is_early else num_bytes * per_second / 1e9,
        floor_s=None if is_early else floor,
        floor_share=None if is_early else floor * per_second,
        peak_mib=None if phase == "backward" else max(peaks) / MIB,
        errors=errors.get(name, {}),
        speed_up=statistics.median(eager) * per_second if tested and eager and name != EAGER else None,
        tested=tested,
    )


def unavoidable(least: Least, phase: str) -> tuple[float, float]:
    """(FLOPs, bytes) of one phase."""
    forward = least.gemm_flops * least.gemms[0], least.num_bytes[0]
    both = least.gemm_flops * least.gemms[1], least.num_bytes[1]
    if phase == "backward":
        return both[0] - forward[0], both[1] - forward[1]
    return forward if phase == "forward" else both


def _names(case: Case, contender: str, phase: str) -> dict[str, Any]:
    return {
        "op": case.op,
        "variant": case.variant,
        "shape": case.shape.name,
        "dtype": _dtype_name(case.shape.dtype),
        "contender": contender,
        "is_ours": contender.split()[0] in OURS,
        "phase": phase,
    }


def _seconds(lap: Lap, phase: str) -> float:
    return {
        "forward": lap.forward_s,
        "backward": lap.backward_s,
        "both": lap.forward_s + lap.backward_s,
    }[phase]


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


HEADER = (
    f"{'contender':32} {'phase':8} {'median':>10} {'p10':>10} {'p90':>10} {'TFLOP/s':>8} {'useful':>7} "
    f"{'GB/s':>7} {'floor':>6} {'MiB':>8} {'speed-up':>8}  errors against float64"
)


def print_rows(rows: Sequence[Row]) -> None:
    """One table per case."""
    if not rows:
        return
    first = rows[0]
    print(
        f"\n{first.op}{' ' + first.variant if first.variant else ''}, {first.shape}, {first.dtype}\n{HEADER}"
    )
    for row in rows:
        print(line_of(row), flush=True)


def line_of(row: Row) -> str:
    if row.failed:
        return f"{row.contender:32} {row.failed}"
    assert row.seconds is not None
    errors = " ".join(f"{name} {value:.1e}" for name, value in row.errors.items())
    return (
        f"{row.contender:32} {row.phase:8} {_time(row.seconds.median):>10} {_time(row.seconds.p10):>10} "
        f"{_time(row.seconds.p90):>10} {_figure(row.tflops_done, '.3g'):>8} {_figure(row.tflops_useful, '.3g'):>7} "
        f"{_figure(row.gb_per_s, '.3g'):>7} {_figure(row.floor_share, '.0%'):>6} {_figure(row.peak_mib, '.0f'):>8} "
        f"{_figure(row.speed_up, '.2f'):>8}  {errors if row.phase != 'backward' else ''}"
    ).rstrip()


def _time(seconds: float) -> str:
    if seconds >= 1.0:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.3f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"


def _figure(value: float | None, how: str) -> str:
    return "-" if value is None else format(value, how)


def write_json(path: Path, about: Machine, rows: Sequence[Row]) -> None:
    data = {"machine": asdict(about), "rows": [asdict(row) for row in rows]}
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")

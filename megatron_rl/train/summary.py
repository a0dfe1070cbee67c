"""What a run achieved, as text for the console; `write_report` makes the same readable in a browser.

Both read the run directory and nothing else.
"""

from __future__ import annotations

from pathlib import Path

from megatron_rl.evaluation.result import Band, paired_bands
from megatron_rl.report.page import REPORT_FILE
from megatron_rl.train.console import format_seconds
from megatron_rl.train.run_data import EvalPoint, RunData, read_run, smooth

_BLOCKS = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 50


def summary_text(run_dir: Path | str) -> str:
    """Before and after per difficulty band, reward curve, seconds per span, and where to look further."""
    run = read_run(run_dir)
    parts = [*_eval_tables(run), _reward_curve(run), _spans(run), _paths(run)]
    return "\n\n".join(part for part in parts if part)


def sparkline(values: list[float], width: int = _SPARK_WIDTH) -> str:
    """Values as a row of blocks from the smallest to the largest; nothing for no values."""
    points = smooth(values, width)
    if not points:
        return ""
    low, high = min(points), max(points)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((point - low) * scale)] for point in points)


def _eval_tables(run: RunData) -> list[str]:
    return [
        _eval_table(name, points[0], points[-1])
        for name, points in run.eval_sets().items()
        if points[0].result.problems
    ]


def _eval_table(name: str, first: EvalPoint, last: EvalPoint) -> str:
    before, after = first.result, last.result
    lines = [
        f"{name}: avg@{after.samples} in % (standard error over problems)",
        _row("difficulty", "problems", f"step {max(0, first.step)}", f"step {last.step}", "change"),
    ]
    for band, other in paired_bands(before, after):
        change = 100 * (other.avg_at_k - band.avg_at_k)
        lines.append(
            _row(band.label, str(band.num_problems), _percent(band), _percent(other), f"{change:+.1f}")
        )
    return "\n".join(lines)


def _row(label: str, num_problems: str, before: str, after: str, change: str) -> str:
    return f"{label:>12} {num_problems:>9} {before:>14} {after:>14} {change:>8}"


def _percent(band: Band) -> str:
    return f"{100 * band.avg_at_k:.1f} ({100 * band.stderr:.1f})"


def _reward_curve(run: RunData) -> str:
    """A line for each RL stage: rewards of different stages are different things."""
    curves: dict[str, list[float]] = {}
    for line in run.lines:
        if isinstance(value := line.get("reward/mean"), int | float):
            curves.setdefault(str(line["stage"]), []).append(float(value))
    labels = {stage: f"{stage}  " if len(curves) > 1 else "" for stage in curves}
    return "\n".join(
        f"reward  {labels[stage]}{sparkline(values)}  {values[0]:.3f} -> {values[-1]:.3f} over {len(values)} iterations"
        for stage, values in curves.items()
    )


def _spans(run: RunData) -> str:
    seconds = run.seconds_per_span()
    if not seconds:
        return ""
    total = sum(seconds.values())
    shares = [
        f"{name} {format_seconds(value)} ({value / total:.0%})"
        for name, value in seconds.items()
        if value > 0
    ]
    return f"time    {format_seconds(total)} in steps: " + ", ".join(shares)


def _paths(run: RunData) -> str:
    names = [REPORT_FILE, "metrics.jsonl", "tensorboard", "rollouts"]
    found = [run.run_dir / name for name in names if (run.run_dir / name).exists()]
    return "\n".join(f"{'look at' if index == 0 else '':<7} {path}" for index, path in enumerate(found))

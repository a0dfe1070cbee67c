"""The live view of a run, for one rank: a bar with key numbers on a terminal, plain lines anywhere else."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, TextIO

_ETA_WINDOW = 20  # steps that the pace is taken over

# (metric, label, format): the first six present are shown
_KEY_NUMBERS: tuple[tuple[str, str, str], ...] = (
    ("reward/mean", "reward", ".3f"),
    ("sft/loss", "loss", ".4f"),
    ("policy/loss", "loss", ".4f"),
    ("rollout/response_tokens_mean", "length", ".0f"),
    ("policy/entropy", "entropy", ".3f"),
    ("mismatch/max", "mismatch", ".1e"),
    ("policy/grad_norm", "grad", ".2f"),
    ("sft/grad_norm", "grad", ".2f"),
    ("optim/lr", "lr", ".1e"),
    ("throughput/tokens_per_s", "tok/s", ".0f"),
)
_MAX_NUMBERS = 6


class Console:
    """`step` after every optimizer step (SFT) or iteration (RL); `say` for anything else."""

    def __init__(
        self,
        *,
        enabled: bool = True,
        stream: TextIO | None = None,
        log: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`enabled` is False on every rank but the first: such a console prints nothing.

        `log` gets every line as well, plain, also where `stream` shows a bar.
        """
        self._enabled = enabled
        self._stream, self._log = stream or sys.stdout, log
        self._clock = clock
        self._bar: _Bar | None = None
        self._stage = ""
        self._ends: deque[float] = deque(maxlen=_ETA_WINDOW + 1)
        self._on_terminal = enabled and self._stream.isatty()

    def begin(self, stage: str, *, total: int, done: int = 0) -> None:
        """A stage of `total` steps starts, `done` of them finished before (a resumed run)."""
        self._close_bar()
        self._stage = stage
        self._ends.clear()
        self._ends.append(self._clock())
        if self._on_terminal:
            self._bar = _Bar(self._stream, stage, total=total, done=done)

    def step(self, index: int, total: int, metrics: Mapping[str, float]) -> None:
        """Step `index` of `total` (from 1) has ended."""
        self._ends.append(self._clock())
        if not self._enabled:
            return
        pace_s = self._pace_s()
        numbers = key_numbers(metrics)
        state = f"{numbers}  {pace_s:.2f} s/step  ETA {format_seconds(pace_s * (total - index))}"
        line = f"{self._stage} {index}/{total}  {state}"
        self._write_log(line)
        if self._bar is not None:
            self._bar.update(index, state)
        else:
            self._print(line)

    def say(self, text: str) -> None:
        """A line of its own, above the bar."""
        if self._enabled:
            self._write_log(text)
            if self._bar is not None:
                self._bar.print(text)
            else:
                self._print(text)

    def close(self) -> None:
        """Leave the terminal as it was; safe to call twice."""
        self._close_bar()

    def _close_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _pace_s(self) -> float:
        if len(self._ends) < 2:
            return 0.0
        return (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)

    def _write_log(self, text: str) -> None:
        if self._log is not None:
            self._log.write(text + "\n")
            self._log.flush()

    def _print(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()


def key_numbers(metrics: Mapping[str, float]) -> str:
    """The numbers worth a glance at every step, evaluations first; how many are not finite, if any, last."""
    shown = [f"{name[5:-9]} {100 * value:.1f} %" for name, value in metrics.items() if _is_eval(name)]
    labels: set[str] = set()
    for name, label, form in _KEY_NUMBERS:
        if name in metrics and label not in labels and len(shown) < _MAX_NUMBERS:
            labels.add(label)
            shown.append(f"{label} {metrics[name]:{form}}")
    shown = shown[:_MAX_NUMBERS]
    if metrics.get("records/not_finite"):
        shown.append(f"NOT FINITE {metrics['records/not_finite']:.0f}")
    return "  ".join(shown)


def _is_eval(name: str) -> bool:
    return name.startswith("eval/") and name.endswith("/avg_at_k")


def format_seconds(seconds: float) -> str:
    """`45s`, `3m05s`, `2h07m`; `inf` and `nan` as they are."""
    if not math.isfinite(seconds):
        return str(seconds)
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


class _Bar:
    """One line of rich progress."""

    def __init__(self, stream: TextIO, stage: str, *, total: int, done: int) -> None:
        from rich.console import Console as RichConsole
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        columns: tuple[Any, ...] = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
        )
        self._progress = Progress(
            *columns, console=RichConsole(file=stream), auto_refresh=False, expand=False
        )
        self._task = self._progress.add_task(stage, total=total, completed=done, numbers="")
        self._progress.start()

    def update(self, done: int, numbers: str) -> None:
        self._progress.update(self._task, completed=done, numbers=numbers)
        self._progress.refresh()

    def print(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self._progress.stop()

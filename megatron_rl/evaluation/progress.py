"""How far an evaluation is: a bar on a terminal, a line per call anywhere else. On stderr; results go to stdout."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class EvalProgress:
    """A context manager; leaving it leaves the terminal as it was."""

    def __init__(self, total: int, *, stream: TextIO | None = None) -> None:
        """`total` samples over all sets."""
        self._stream = stream or sys.stderr
        self._total, self._done, self._began = total, 0, time.monotonic()
        self._bar: Progress | None = None
        if self._stream.isatty():
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=30),
                MofNCompleteColumn(),
                TextColumn("samples"),
                TimeElapsedColumn(),
                console=Console(file=self._stream),
                transient=True,
            )
            self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, text: str) -> None:
        """A line of its own, above the bar."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=self._stream, flush=True)

    def advance(self, name: str, num_samples: int) -> None:
        """So many more samples of set `name` are graded."""
        self._done += num_samples
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, description=name)
        else:
            seconds = time.monotonic() - self._began
            self.say(f"{name}: {self._done} of {self._total} samples after {seconds:.0f} s")

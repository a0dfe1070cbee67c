"""What one process does when: named stretches of time that nest, kept while somebody wants a trace.

Times are of the kernel's monotonic clock in nanoseconds, which all processes of a machine share (`clock_id`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

Value = int | float | str

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def clock_id() -> str:
    """Equal on two processes: their `time.monotonic_ns` is one clock."""
    return f"{_BOOT_ID.read_text().strip()} {os.readlink('/proc/self/ns/time')}"


@dataclass(frozen=True, slots=True)
class Span:
    name: str
    start_ns: int
    end_ns: int
    args: Mapping[str, Value] = field(default_factory=dict)


@dataclass(slots=True)
class _Open:
    name: str
    start_ns: int
    args: dict[str, Value]


class Spans:
    """Spans of one thread. Off, every call returns at once.

    On the outside steps, one after the other; in a step phases, one after the other; in a phase whatever else, nested.
    """

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock = clock
        self.is_on = False
        self._done: list[Span] = []
        self._step: _Open | None = None
        self._phase: _Open | None = None
        self._inner: list[_Open] = []

    def start(self) -> None:
        """From now on spans are kept; those that are open are not."""
        self._done, self._step, self._phase, self._inner = [], None, None, []
        self.is_on = True

    def stop(self) -> list[Span]:
        """Those since `start`, by when they began, the outer first; what is open ends now."""
        while self._inner:
            self._close(self._inner.pop())
        self._end_step()
        self.is_on = False
        done, self._done = self._done, []
        return sorted(done, key=lambda span: (span.start_ns, -span.end_ns))

    def begin_step(self, name: str, **args: Value) -> None:
        """The step before, and its phase, end here."""
        if self.is_on and not self._inner:
            self._end_step()
            self._step = self._opened(name, args)

    def enter(self, phase: str) -> None:
        """The phase before ends here, unless it is the same: that goes on. Inside an inner span nothing happens: that
        would not nest."""
        if self._phase is not None and self._phase.name == phase:
            return
        if self.is_on and not self._inner:
            self.leave()
            self._phase = self._opened(phase, {})

    def leave(self) -> None:
        """The phase ends, and none follows at once."""
        if self.is_on and not self._inner and self._phase is not None:
            self._close(self._phase)
            self._phase = None

    @contextmanager
    def span(self, name: str, **args: Value) -> Iterator[None]:
        """An inner span around what runs inside, also when that raises."""
        if not self.is_on:
            yield
            return
        opened = self._opened(name, args)
        self._inner.append(opened)
        try:
            yield
        finally:
            self._close_down_to(opened)

    def begin(self, name: str, **args: Value) -> None:
        """As `span`, for those who are told of the end by another call: `end` with the same name."""
        if self.is_on:
            self._inner.append(self._opened(name, args))

    def end(self, name: str) -> None:
        """Of the innermost of this name; those inside it end too. Nothing where none is open."""
        found = next((opened for opened in reversed(self._inner) if opened.name == name), None)
        if found is not None:
            self._close_down_to(found)

    def note(self, **args: Value) -> None:
        """Something about the innermost span."""
        if self._inner:
            self._inner[-1].args.update(args)

    def _opened(self, name: str, args: dict[str, Value]) -> _Open:
        return _Open(name, self._clock(), args)

    def _close_down_to(self, opened: _Open) -> None:
        # started or stopped meanwhile: it is of another recording
        if not any(one is opened for one in self._inner):
            return
        while True:
            last = self._inner.pop()
            self._close(last)
            if last is opened:
                return

    def _close(self, opened: _Open) -> None:
        self._done.append(Span(opened.name, opened.start_ns, self._clock(), opened.args))

    def _end_step(self) -> None:
        for opened in (self._phase, self._step):
            if opened is not None:
                self._close(opened)
        self._phase = self._step = None

"""Something that a thread does meanwhile. Needs no library beyond Python's own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Background(Generic[T]):
    """Something that a thread does; `what` it is called where it takes too long.

    A disk or a file server that does not answer must not hold its caller for ever.
    """

    def __init__(self, action: Callable[[], T], *, what: str) -> None:
        self._what = what
        self._results: list[T] = []
        self._failures: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, args=(action,), daemon=True)
        self._thread.start()

    def _run(self, action: Callable[[], T]) -> None:
        try:
            self._results.append(action())
        except BaseException as error:
            self._failures.append(error)

    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def result(self, timeout_s: float | None = None) -> T:
        """Raises TimeoutError when it is not done in time (None: it is waited for), and what it raised itself."""
        self._thread.join(timeout_s)
        if self._failures:
            raise self._failures[0]
        if not self._results:
            raise TimeoutError(
                f"{self._what} took longer than {timeout_s:g} s; is the file system answering?"
            )
        return self._results[0]

"""An engine that serves the weights of a directory, and what is asked of it until it is answered."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from megatron_rl.errors import EngineError, LostEngineError
from megatron_rl.rollout.engine import RolloutEngine

T = TypeVar("T")


class LastingEngine:
    """Starts lost replicas anew, `restarts` of them in all, and asks again: a request gives the same tokens again."""

    def __init__(self, engine: RolloutEngine, *, restarts: int, say: Callable[[str], None]) -> None:
        self._engine, self._budget, self._say = engine, restarts, say
        self.num_restarts = 0

    def ask(self, work: Callable[[], T]) -> T:
        """What `work` returns. Raises LostEngineError once no restart is left."""
        while True:
            try:
                return work()
            except LostEngineError as error:
                self._restart(error)

    def _restart(self, error: EngineError) -> None:
        lost = self._engine.find_lost()
        if not lost:
            raise error
        while lost:
            if self.num_restarts + len(lost) > self._budget:
                used = f"--restarts: {self.num_restarts} of {self._budget} were used"
                raise LostEngineError(f"{error}\n{used}") from error
            self.num_restarts += len(lost)
            began = time.monotonic()
            try:
                self._engine.restart(list(lost))
            except EngineError as failure:
                error = failure
            else:
                causes = ", ".join(cause.partition("; ")[0] for cause in lost.values())
                self._say(f"{causes}: started again in {time.monotonic() - began:.1f} s")
            lost = self._engine.find_lost()

"""Engines that run on the trainer's weights, and after the loss of one do so again: restart, transfer, parity.

The driving rank owns the engines; what it does about a loss, the other ranks take part in.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from megatron_rl.errors import EngineError, LostEngineError, ReshardError
from megatron_rl.parallel.collectives import broadcast_outcome
from megatron_rl.rollout.engine import RolloutEngine
from megatron_rl.rollout.weight_sync import SyncResult, WeightSync
from megatron_rl.train.context import RunContext
from megatron_rl.train.parity import ParityGate, Verdict

T = TypeVar("T")


class LiveEngines:
    """Every method is collective over the trainer ranks. `engine` on the driving rank alone.

    `restarts` is how many replicas may be started anew; the console gets one line about each time that happens.
    `versions` are those that an earlier start of the run transferred and that still count.
    """

    def __init__(
        self,
        engine: RolloutEngine | None,
        sync: WeightSync,
        parity: ParityGate,
        *,
        restarts: int,
        run: RunContext,
        versions: Sequence[int] = (),
    ) -> None:
        self._engine, self._sync, self._parity = engine, sync, parity
        self._budget, self._run = restarts, run
        self._versions = [*versions]
        self.num_restarts = 0  # counted on the driving rank

    def update(self, version: int) -> tuple[SyncResult, Verdict]:
        """Transfer the trainer's weights as `version`, then compare both sides; begun anew after every loss.

        Raises ReshardError, or LostEngineError once no restart is left.
        """
        while True:
            try:
                spans = self._run.phases.spans
                with spans.span("transfer"):
                    transferred = self._sync.push(version)
                with spans.span("parity"):
                    done = transferred, self._parity.check(version)
            except (LostEngineError, ReshardError) as error:
                self.restart(error)
            else:
                if version not in self._versions:
                    self._versions.append(version)
                return done

    def ask(self, work: Callable[[], T] | None) -> T:
        """What `work`, given on the driving rank, returns, on every rank; done again after every loss.

        Raises LostEngineError once no restart is left, and ReshardError when a restarted engine does not agree with
        the trainer.
        """
        phases = self._run.phases
        while True:
            try:
                return broadcast_outcome(work, src=0, group=self._run.driver_group, shared=LostEngineError)
            except LostEngineError as error:
                phase = phases.current.phase
                self.restart(error)
                _, verdict = self.update(self._versions[-1])
                verdict.check()
                phases.enter(phase)

    @property
    def versions(self) -> Sequence[int]:
        """Of the weights transferred so far, in order."""
        return self._versions

    def restart(self, error: LostEngineError | ReshardError) -> None:
        """A transfer has to follow. Raises `error` where no engine was lost or no restart is left."""
        self._run.phases.enter("restart")
        refusal = self._restart(self._engine, error) if self._engine is not None else None
        refusal = self._run.from_driver(refusal)
        if refusal is not None:
            raise type(error)(refusal)
        # the new engine is no member of the group of the old one
        self._sync.disconnect()
        self._run.phases.enter("sync")

    def _restart(self, engine: RolloutEngine, error: EngineError | ReshardError) -> str | None:
        """None once every replica runs again, else why not."""
        lost = engine.find_lost()
        if not lost:
            return str(error)
        while lost:
            if self.num_restarts + len(lost) > self._budget:
                used = f"engine.restarts: {self.num_restarts} of {self._budget} were used in this stage"
                return f"{error}\n{used}" if self._budget else str(error)
            self.num_restarts += len(lost)
            began = time.monotonic()
            try:
                engine.restart(list(lost))
            except EngineError as failure:
                error = failure
            else:
                seconds = time.monotonic() - began
                causes = ", ".join(cause.partition("; ")[0] for cause in lost.values())
                self._run.reporter.say(
                    f"{causes}: started again in {seconds:.1f} s "
                    f"(engine.restarts: {self.num_restarts} of {self._budget} used)"
                )
            lost = engine.find_lost()
        return None

"""What every stage of a run shares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.model.checkpoint import CheckpointStore, SavedState
from megatron_rl.model.checkpoint_files import CHECKPOINTS_DIR, checkpoint_name
from megatron_rl.model.spec import ModelSpec
from megatron_rl.parallel.collectives import broadcast_object, largest
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.recipe.profile_checks import steps_before
from megatron_rl.recipe.schema import Recipe
from megatron_rl.recipe.stages import Stage
from megatron_rl.train.memory import memory_metrics
from megatron_rl.train.metrics import Meter
from megatron_rl.train.phases import PhaseFile
from megatron_rl.train.policy import Policy
from megatron_rl.train.profile import Profile
from megatron_rl.train.progress import Progress, stage_label
from megatron_rl.train.reporter import Reporter
from megatron_rl.train.stopping import REASONS, Stopped, StopRequest, write_stopped

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunContext:
    """One run on one rank. Every rank calls `start_stage` and `finish_step` together."""

    recipe: Recipe
    run_dir: Path
    rank: int
    layout: ParallelLayout
    spec: ModelSpec
    policy: Policy
    tokenizer: Tokenizer
    reporter: Reporter
    checkpoints: CheckpointStore
    phases: PhaseFile
    stop: StopRequest
    profile: Profile
    host: str  # the driving rank's address, as other ranks and engine workers reach it
    driver_group: dist.ProcessGroup | None
    border_group: dist.ProcessGroup | None  # where ranks agree whether to stop
    resumed_from: SavedState | None = None

    @property
    def is_driver(self) -> bool:
        """The one rank that owns engines, graders, records and the console."""
        return self.rank == 0

    def from_driver(self, value: T) -> T:
        """What the driving rank passed, on every rank; the others wait for it, however long it takes. Collective.

        The driver's own waits (engines, graders) are bounded, and a driver that dies ends the wait at once.
        """
        return broadcast_object(value, src=0, group=self.driver_group)

    def start_stage(self, stage: Stage, progress: Progress, *, total_steps: int) -> None:
        """A fresh optimizer of `total_steps` steps; the saved one where the run resumes inside the stage."""
        self.phases.begin_step(stage_label(self.recipe.stages, progress.stage), progress.step, "load")
        self.policy.start_stage(stage.optimizer, stage.schedule, total_steps=total_steps)
        self.policy.optimizer.skipped_in_a_row = progress.skipped_in_a_row
        if progress.step and self.resumed_from is not None:
            self.checkpoints.load_optimizer(self.policy, self.resumed_from)
        self.report_loaded()

    def begin_step(self, progress: Progress, step: int, *, phase: str) -> Meter:
        """The meter of step `step` (the first is 1) of the stage; its spans are phases of this rank."""
        self.profile.begin_step(steps_before(self.recipe.stages, progress.stage) + step)
        self.phases.begin_step(stage_label(self.recipe.stages, progress.stage), step, phase)
        return Meter(entering=self.phases.enter, leaving=self.phases.spans.leave)

    def report_loaded(self) -> None:
        """Say what the checkpoint gave that the run began with, once everything was taken from it."""
        report = self.checkpoints.take_report()
        if report is not None:
            self.reporter.loaded(report)

    def finish_step(
        self,
        progress: Progress,
        metrics: Mapping[str, float],
        *,
        total: int,
        extra: Callable[[], Mapping[str, bytes]] = dict,
    ) -> None:
        """Record a step, and save a checkpoint when one is due (always after the last step of a stage).

        `extra` gives files that it holds besides, see CheckpointStore.save.
        """
        counts = {f"count/{name}": float(count) for name, count in progress.counts.items()}
        self.reporter.step(progress, {**metrics, **counts, **memory_metrics(self.border_group)})
        config = self.recipe.checkpoint
        is_due = config is not None and (progress.step % config.every_steps == 0 or progress.step == total)
        if is_due:
            self._save(progress, extra)
        else:
            self.checkpoints.poll()
        if progress.step == total:
            # the next stage begins with nothing of this one still on its way to the disk
            self.checkpoints.finish()
        number = steps_before(self.recipe.stages, progress.stage) + progress.step
        self.say_profiled(self.profile.end_step(number))
        # a signal to any rank stops all of them at this border
        if reason := largest(self.stop.reason, self.border_group):
            self._stop_here(progress, REASONS[reason], extra=None if is_due else extra)

    def say_profiled(self, trace: Path | None) -> None:
        """`trace` as `Profile` returns it."""
        if trace is not None:
            self.reporter.say(f"profile: {trace}, opens in ui.perfetto.dev and chrome://tracing")

    def _save(self, progress: Progress, extra: Callable[[], Mapping[str, bytes]]) -> None:
        self.phases.enter("save")
        self.checkpoints.save(self.policy, progress.to_dict(), extra=extra())

    def _stop_here(
        self, progress: Progress, reason: str, *, extra: Callable[[], Mapping[str, bytes]] | None
    ) -> None:
        """`extra` None: the step is saved already."""
        if extra is not None:
            self._save(progress, extra)
        self.checkpoints.finish()
        self.say_profiled(self.profile.finish())
        self.phases.enter("stop")
        if self.is_driver:
            label = stage_label(self.recipe.stages, progress.stage)
            checkpoint = f"{CHECKPOINTS_DIR}/{checkpoint_name(progress.to_dict())}"
            write_stopped(self.run_dir, reason=reason, stage=label, step=progress.step, checkpoint=checkpoint)
            self.reporter.say(
                f"stopped on {reason} after {label} step {progress.step}, saved in {checkpoint}; --resume goes on"
            )
        # none leaves before what it leaves is complete
        largest(0, self.border_group)
        self.stop.close()
        raise Stopped(f"on {reason} after {progress.step} steps")

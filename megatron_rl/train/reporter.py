"""What a run says and leaves behind: console, records and the final report, on the driving rank alone.

On the other ranks every method does nothing, so that the loops need not ask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from megatron_rl.data.types import RolloutGroup
from megatron_rl.recipe.load import LoadedRecipe, resolved_yaml
from megatron_rl.reshard.plan import ReshardPlan
from megatron_rl.train.console import Console
from megatron_rl.train.eval_result import EvalResult
from megatron_rl.train.progress import Progress, stage_label, stage_length
from megatron_rl.train.records import RunRecords
from megatron_rl.train.summary import summary_text, write_report


class Reporter:
    """A context manager: leaving it closes the files, whatever happened."""

    def __init__(
        self, run_dir: Path, loaded: LoadedRecipe, *, is_driver: bool, resumed: Progress | None
    ) -> None:
        self._run_dir, self._stages = run_dir, loaded.recipe.stages
        self._console = Console(enabled=is_driver)
        self._records: RunRecords | None = None
        self._pending: list[EvalResult] = []
        if is_driver:
            last_step = None if resumed is None else resumed.global_step(self._stages)
            self._records = RunRecords(run_dir, last_step=last_step)
            self._records.write_recipe(resolved_yaml(loaded))

    def __enter__(self) -> Reporter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._console.close()
        if self._records is not None:
            self._records.close()

    def say(self, text: str) -> None:
        """A line of its own on the console."""
        self._console.say(text)

    def start_stage(self, progress: Progress) -> None:
        self._console.begin(
            stage_label(self._stages, progress.stage),
            total=stage_length(self._stages[progress.stage]),
            done=progress.step,
        )

    def step(self, progress: Progress, metrics: Mapping[str, float]) -> None:
        """The step that led to `progress`, with the evaluations made after it."""
        label = stage_label(self._stages, progress.stage)
        evaluated = {name: value for result in self._pending for name, value in result.metrics().items()}
        if self._records is not None:
            self._records.log_step(
                {**evaluated, **metrics},
                stage=label,
                iteration=progress.step,
                step=progress.global_step(self._stages),
            )
            for result in self._pending:
                self._records.write_eval(result, stage=label)
        self._pending = []
        self._console.step(
            progress.step, stage_length(self._stages[progress.stage]), {**evaluated, **metrics}
        )

    def starting_point(self, progress: Progress, results: Sequence[EvalResult]) -> None:
        """Evaluations before the first step of a stage."""
        for result in results:
            self.say(
                f"{result.name}: avg@{result.samples} {100 * result.avg_at_k:.1f} % before the first iteration"
            )
            if self._records is not None:
                self._records.write_eval(result, stage=stage_label(self._stages, progress.stage), board=True)

    def evaluation(self, results: Sequence[EvalResult]) -> None:
        """Evaluations of the step that `step` reports next."""
        self._pending += results

    def rollouts(self, progress: Progress, groups: Sequence[RolloutGroup]) -> None:
        """The rollouts of the iteration that led to `progress`; files count on over all RL stages of the run."""
        if self._records is not None:
            earlier = sum(s.iterations for s in self._stages[: progress.stage] if s.kind == "rl")
            rollouts = [rollout for group in groups for rollout in group.rollouts]
            self._records.write_rollouts(earlier + progress.step, rollouts)

    def plan(self, plan: ReshardPlan) -> None:
        if self._records is not None:
            self._records.write_plan(plan.to_json())

    def parity(self, report: Mapping[str, Any]) -> None:
        if self._records is not None:
            self._records.write_parity(report)

    def finish(self) -> None:
        """Print the summary and write the report."""
        if self._records is not None:
            self._console.close()
            write_report(self._run_dir)
            self.say(summary_text(self._run_dir))

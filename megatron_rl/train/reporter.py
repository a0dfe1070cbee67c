"""What a run says and leaves behind: console, records and the final report, on the driving rank alone.

On the other ranks every method does nothing, so that the loops need not ask.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from megatron_rl.data.promotion import Promotion
from megatron_rl.data.token_texts import TokenTexts
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.data.types import RolloutGroup
from megatron_rl.errors import MegatronRLError
from megatron_rl.evaluation.result import EvalResult
from megatron_rl.model.load_report import LoadReport
from megatron_rl.recipe.load import LoadedRecipe, resolved_yaml
from megatron_rl.recipe.read_resolved import read_resolved
from megatron_rl.recipe.stages import AlgorithmConfig
from megatron_rl.report.page import write_report
from megatron_rl.reshard.plan import ReshardPlan
from megatron_rl.rollout.weight_sync import SyncResult
from megatron_rl.train.console import Console
from megatron_rl.train.files import writing
from megatron_rl.train.grading import BAD_GOLDS_FILE, BadGolds, unanswered_notice
from megatron_rl.train.parity import Verdict
from megatron_rl.train.progress import Progress, stage_label, stage_length
from megatron_rl.train.records import NOT_FINITE, RunRecords
from megatron_rl.train.run_dir import LOGS
from megatron_rl.train.stopping import Stopped
from megatron_rl.train.summary import summary_text
from megatron_rl.train.token_traces import TokenTraces
from megatron_rl.train.tracker import Tracker


class Reporter:
    """A context manager: leaving it closes the files, whatever happened."""

    def __init__(
        self, run_dir: Path, loaded: LoadedRecipe, *, is_driver: bool, resumed: Progress | None
    ) -> None:
        self._run_dir, self._stages = run_dir, loaded.recipe.stages
        self._log: TextIO | None = _open_log(run_dir / LOGS / "rank_0.log") if is_driver else None
        self._console = Console(enabled=is_driver, log=self._log)
        self._records: RunRecords | None = None
        self._pending: list[EvalResult] = []
        self._texts: TokenTexts | None = None
        self._tracker: Tracker | None = None
        if is_driver:
            self._records = RunRecords(
                run_dir,
                last_step=None if resumed is None else resumed.global_step(self._stages),
                last_iteration=None if resumed is None else self._iterations(resumed),
            )
            text = resolved_yaml(loaded)
            self._records.write_recipe(text)
            if (config := loaded.recipe.run.wandb) is not None:
                settings = {setting.path: setting.value for setting in read_resolved(text)}
                self._tracker = Tracker(config, run_dir, settings, say=self.say)
            if resumed is not None and (
                missing := self._records.missing_up_to(resumed.global_step(self._stages))
            ):
                self.say(missing)

    def __enter__(self) -> Reporter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._console.close()
        if self._tracker is not None:
            self._tracker.close()
        if self._records is not None:
            self._records.close()
        if self._log is not None:
            # a disk that is full here as well must not hide the error that ends the run
            with suppress(OSError):
                if kind is not None:
                    self._log.write("".join(_last_words(kind, error, trace)))
                self._log.close()

    def say(self, text: str) -> None:
        """A line of its own on the console."""
        self._console.say(text)

    def loaded(self, report: LoadReport) -> None:
        """What a checkpoint gave, in one line and in full in load.json."""
        self.say(report.line())
        if self._records is not None:
            self._records.write_load(report.to_json())

    def start_stage(self, progress: Progress) -> None:
        self._console.begin(
            stage_label(self._stages, progress.stage),
            total=progress.last_step(self._stages),
            done=progress.step,
        )

    def step(self, progress: Progress, metrics: Mapping[str, float]) -> None:
        """The step that led to `progress`, with the evaluations made after it."""
        label = stage_label(self._stages, progress.stage)
        evaluated = {name: value for result in self._pending for name, value in result.metrics().items()}
        shown = {**evaluated, **metrics}
        if self._records is not None:
            not_finite = self._records.log_step(
                shown, stage=label, iteration=progress.step, step=progress.global_step(self._stages)
            )
            if not_finite:
                shown[NOT_FINITE] = not_finite
            for result in self._pending:
                self._records.write_eval(result, stage=label)
        if self._tracker is not None:
            self._tracker.log(shown, step=progress.global_step(self._stages))
        self._pending = []
        self._console.step(progress.step, progress.last_step(self._stages), shown)

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
            rollouts = [rollout for group in groups for rollout in group.rollouts]
            self._records.write_rollouts(self._iterations(progress), rollouts)
            if num_new := BadGolds(self._run_dir).note(groups):
                self.say(f"{num_new} prompt(s) whose gold is no answer, not trained on: {BAD_GOLDS_FILE}")
            if progress.step == 1 and (notice := unanswered_notice(groups)):
                self.say(notice)

    def tokens(
        self,
        progress: Progress,
        traces: TokenTraces,
        found: Mapping[str, Mapping[str, Any]],
        algorithm: AlgorithmConfig,
    ) -> None:
        """What is known of the tokens of a few of these rollouts."""
        if self._records is not None and self._texts is not None:
            self._records.write_tokens(self._iterations(progress), traces.lines(found, self._texts, algorithm))

    def reads(self, tokenizer: Tokenizer) -> None:
        """The tokenizer that texts of tokens are from, once it is loaded."""
        self._texts = TokenTexts(tokenizer)

    def _iterations(self, progress: Progress) -> int:
        """RL iterations done in all stages so far."""
        stages = self._stages[: progress.stage + 1]
        done = [progress.step if i == progress.stage else stage_length(s) for i, s in enumerate(stages)]
        planned = sum(count for count, stage in zip(done, stages, strict=True) if stage.kind == "rl")
        return planned - progress.skipped_before

    def promotion(self, progress: Progress, promotion: Promotion) -> None:
        """A window that ended early with the step that led to `progress`."""
        self.say(f"{stage_label(self._stages, progress.stage)} iteration {progress.step}: {promotion}")

    def plan(self, plan: ReshardPlan) -> None:
        if self._records is not None:
            self._records.write_plan(plan.to_json())

    def transfer(self, progress: Progress, transfer: SyncResult, verdict: Verdict) -> None:
        """A weight transfer of the step that led to `progress`, and how both sides compare after it."""
        if self._records is not None:
            record = {**verdict.to_json(), "seconds": transfer.seconds, "bytes": transfer.bytes}
            self._records.write_sync(
                record,
                stage=stage_label(self._stages, progress.stage),
                iteration=progress.step,
                step=progress.global_step(self._stages),
            )

    def finish(self) -> None:
        """Print the summary and write the report."""
        if self._records is not None:
            self._console.close()
            try:
                write_report(self._run_dir, say=self.say)
            # the run is over and saved: nothing that goes wrong with a page may make it a failed one
            except Exception as error:
                self.say(f"report.html: not written ({type(error).__name__}: {error}); try megatron-rl report")
            self.say(summary_text(self._run_dir))


def _open_log(path: Path) -> TextIO:
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        log = path.open("a", encoding="utf-8", errors="backslashreplace")
        # it is appended to: this line parts what earlier starts of the run wrote from what follows
        log.write(f"--- rank 0 started {time.strftime('%Y-%m-%d %H:%M:%S %z')}\n")
        log.flush()
    return log


def _last_words(
    kind: type[BaseException], error: BaseException | None, trace: TracebackType | None
) -> list[str]:
    """The reason of an end before the end: one block for what a user can act on, else the traceback."""
    if isinstance(error, MegatronRLError):
        return [f"error: {error}\n"]
    if isinstance(error, Stopped):
        return [f"stopped {error}\n"]
    if isinstance(error, KeyboardInterrupt | SystemExit):
        return [f"ended by {kind.__name__}\n"]
    return traceback.format_exception(kind, error, trace)

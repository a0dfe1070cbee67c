"""Everything an RL stage holds open: engines, graders, prompts, weight transfer. Closed on every way out.

The driving rank (0) owns engines, graders and prompts; the other ranks take part in what is collective.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any

from megatron_rl.data.chat import stop_token_ids
from megatron_rl.data.seeds import derive_seed
from megatron_rl.data.types import Prompt
from megatron_rl.evaluation.in_training import eval_plan, evaluate_sets, longest_sequence
from megatron_rl.evaluation.result import EvalResult
from megatron_rl.model.checkpoint_files import CHECKPOINTS_DIR, read_extra
from megatron_rl.recipe.amounts import prompts_drawn
from megatron_rl.recipe.batch import RescoreConfig
from megatron_rl.recipe.stages import RlStage
from megatron_rl.rewards.combine import RewardModel
from megatron_rl.rewards.mapping import MappedRewards, RewardMapping
from megatron_rl.rollout.collect import Collector, Draw
from megatron_rl.rollout.vllm_engine import VllmEngine
from megatron_rl.rollout.weight_sync import WeightSync
from megatron_rl.train.ahead import RolloutSource, check_separate
from megatron_rl.train.batch_work import BatchWork, Place
from megatron_rl.train.context import RunContext
from megatron_rl.train.groups import Collected
from megatron_rl.train.kept_rollouts import Kept, rollouts_from_bytes, rollouts_to_bytes
from megatron_rl.train.live_engines import LiveEngines
from megatron_rl.train.metrics import Meter
from megatron_rl.train.parity import SAMPLED_TOKENS, ParityGate
from megatron_rl.train.progress import Progress, stage_label
from megatron_rl.train.rescore import (
    PartialScores,
    PromptScore,
    Rescored,
    read_rescored,
    score_group,
    weights_key,
    write_rescored,
)
from megatron_rl.train.rl_data import RlData, narrowed
from megatron_rl.train.round_sampler import RoundSampler

AHEAD_FILE = "rollouts_ahead.json"  # of a checkpoint, see RolloutSource

ENGINES = {"vllm": VllmEngine.start}  # engine.kind of the recipe: how to start it


class RlSession:
    """A context manager: entering starts the engines and gives them the weights; leaving stops every process."""

    def __init__(self, stage: RlStage, data: RlData | None, progress: Progress, run: RunContext) -> None:
        """`data` on the driving rank alone; its sampler is set to where `progress` stands."""
        self._stage, self._data, self._run, self._progress = stage, data, run, progress
        self._closing = ExitStack()
        self._rescore_metrics: dict[str, float] = {}
        self._parity_prompts = data.parity_prompts() if data is not None else ()
        if data is not None and progress.rescored:
            self._data = self._narrowed(data, read_rescored(run.run_dir, progress.rescored))
        if self._data is not None and progress.sampler:
            self._data.sampler.load_state_dict(progress.sampler)
        self._source: RolloutSource | None = None
        self._is_asleep = False
        self._sleep: Callable[[], None] = lambda: None  # of the engine, on the driving rank

    @property
    def progress(self) -> Progress:
        """Where the stage stands once the session is entered: re-scoring is part of it."""
        return self._progress

    def __enter__(self) -> RlSession:
        with ExitStack() as opening:
            self._start(opening)
            self._closing = opening.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._run.phases.enter("stop")
        self._closing.close()

    def _start(self, opening: ExitStack) -> None:
        stage, run = self._stage, self._run
        kept = run.from_driver(self._read_kept())
        engine = None
        # closed last: what still generates and grades ends once those are closed
        opening.callback(self._close_source)
        if run.is_driver:
            run.reporter.say(
                f"starting {stage.engine.replicas} vllm engine(s) of {stage.engine.tp} worker(s)"
            )
            grader = RewardModel(
                stage.rewards,
                workers=stage.grader.workers,
                timeout_s=stage.grader.timeout_s,
                batch_timeout_s=stage.grader.batch_timeout_s,
                memory_gib=stage.grader.memory_gib,
                requires_reasoning=stage.grader.reasoning == "required",
                sandbox=stage.sandbox,
            )
            opening.callback(grader.close)
            for notice in grader.notices:
                run.reporter.say(notice)
            self._grader = grader
            engine = ENGINES[stage.engine.kind](
                stage.engine,
                hf_path=run.recipe.model.hf_path,
                dtype=run.recipe.model.dtype,
                spec=run.spec,
                max_model_len=longest_sequence(stage),
                seed=run.recipe.run.seed,
                log_dir=run.run_dir / "logs",
            )
            opening.callback(engine.close)
            opening.enter_context(run.profile.engines(engine))
            self._load_metrics, self._sleep = engine.load_metrics, engine.sleep
            stops = stop_token_ids(run.tokenizer)
            # evaluation asks what is correct, training what it is worth
            self._eval_collector = Collector(engine, grader, run.tokenizer, stop_token_ids=stops)
            mapping = RewardMapping(
                scale=stage.grader.scale,
                all_or_nothing=stage.grader.all_or_nothing,
                missing_think_close=stage.grader.missing_think_close,
                missing_think_open=stage.grader.missing_think_open,
            )
            self._collector = Collector(
                engine, MappedRewards(grader, mapping), run.tokenizer, stop_token_ids=stops
            )
        # the other ranks wait here until the engines run
        prompts = run.from_driver(self._parity_prompts)
        self._weight_version = -1
        sync = WeightSync(
            run.policy.named_params,
            spec=run.spec,
            layout=run.layout,
            rank=run.rank,
            engine=engine,
            config=stage.engine,
            dtype=run.policy.dtype,
            host=run.host,
            trainers=run.driver_group,
            spans=run.phases.spans,
        )
        run.reporter.plan(sync.plan)
        if stage.overlap != "none":
            check_separate(sync.plan.placement)
        parity = ParityGate(
            run.policy,
            engine,
            prompts,
            bound=stage.engine.parity_bound,
            temperature=stage.sampling.temperature,
            push=sync.push,
            group=run.driver_group,
            sampled_tokens=min(SAMPLED_TOKENS, stage.sampling.max_response_tokens),
        )
        self._engines = LiveEngines(
            engine,
            sync,
            parity,
            restarts=stage.engine.restarts,
            run=run,
            versions=kept.versions if kept is not None else (),
        )
        self._source = self._open_source(kept)
        self.push_weights(self._progress)
        if stage.rescore is not None and not self._progress.rescored:
            self._rescore(stage.rescore)
        if self._progress.step == 0:
            run.reporter.starting_point(self._progress, self._evaluate(0))

    def push_weights(self, progress: Progress, *, anew: bool = False) -> dict[str, float]:
        """Transfer the weights of the step that led to `progress`, then compare both sides. Collective.

        Not those that the engines have, unless `anew`: an engine was started in the place of a lost one.
        Raises ReshardError on every rank, with a diagnosis, when trainer and engine do not agree.
        """
        version = self._run.policy.optimizer.num_steps
        if version == self._weight_version and not anew and not self._is_asleep:
            return {}  # no group of the iteration taught anything
        self._run.phases.enter("sync")
        transfer, verdict = self._engines.update(version)
        self._run.reporter.transfer(progress, transfer, verdict)
        verdict.check()
        self._weight_version, self._is_asleep = version, False
        return {
            "sync/bytes": float(transfer.bytes),
            "sync/transfer_s": transfer.seconds,
            **verdict.metrics(),
        }

    def _rescore(self, config: RescoreConfig) -> None:
        """Measure every prompt with the weights that the engines have, keep those in the limits. Collective."""
        run, stage = self._run, self._stage
        run.phases.enter("rescore")
        prompts = self._data.prompts.prompts if self._data is not None else ()
        partial_scores = self._partial_scores(config) if self._data is not None else None
        count = run.from_driver(len(prompts))
        done = run.from_driver(len(partial_scores.scores) if partial_scores else 0)
        before = f", {done} of them before" if done else ""
        run.reporter.say(f"re-scoring {count} prompts with {config.samples} samples each{before}")
        # as many rollouts at a time as an iteration has, which engine.request_timeout_s is set for
        size = max(1, prompts_drawn(stage) * stage.group_size // config.samples)
        scores = [*partial_scores.scores] if partial_scores else []
        for first in range(done, count, size):
            scores += self._score(prompts[first : first + size], config)
            if partial_scores:
                partial_scores.add(scores[first:])
        rescored = run.from_driver(Rescored(scores=tuple(scores)))
        record: dict[str, Any] = {}
        if self._data is not None and partial_scores is not None:
            self._data = self._narrowed(self._data, rescored)
            label = stage_label(run.recipe.stages, self._progress.stage)
            record = write_rescored(run.run_dir, label, rescored)
            partial_scores.remove()
        self._progress = replace(self._progress, rescored=run.from_driver(record))
        self._rescore_metrics = rescored.metrics()
        run.reporter.say(str(rescored))

    def _partial_scores(self, config: RescoreConfig) -> PartialScores:
        """Those of an earlier start, if it measured with these weights; kept for a run that can be resumed."""
        run, progress = self._run, self._progress
        key = None
        if run.recipe.checkpoint is not None:
            place = run.run_dir / CHECKPOINTS_DIR
            key = weights_key(place, stage=progress.stage, recipe=run.recipe, data=progress.data)
        return PartialScores(run.run_dir, stage_label(run.recipe.stages, progress.stage), key, config)

    def _score(self, prompts: Sequence[Prompt], config: RescoreConfig) -> list[PromptScore]:
        if self._data is None:
            return self._engines.ask(None)
        token_ids, draw = self._data.prompts.token_ids, self._draw(config.samples, "rescore")
        span = Meter().span

        def work() -> list[PromptScore]:
            version = self._weight_version
            groups = self._collector.collect(prompts, token_ids, draw, weight_version=version, span=span)
            return [score_group(group, config) for group in groups]

        return self._engines.ask(work)

    def _narrowed(self, data: RlData, rescored: Rescored) -> RlData:
        seed, stage = self._run.recipe.run.seed, self._progress.stage
        return narrowed(data, self._stage, rescored.rates, run_seed=seed, stage_index=stage)

    def rescore_metrics(self) -> dict[str, float]:
        """What re-scoring measured, for the first iteration after it; nothing afterwards."""
        metrics, self._rescore_metrics = self._rescore_metrics, {}
        return metrics

    def collect(self, progress: Progress, meter: Meter) -> Collected:
        """The graded rollouts of the iteration after `progress`, the same groups on every rank. Collective.

        With `overlap` they may be there already, and those of the iteration after it are begun.
        """
        is_last = progress.step + 1 >= progress.last_step(self._run.recipe.stages)
        place = Place(iteration=progress.step, planned=progress.step + progress.skipped)
        following = None if is_last else Place(iteration=place.iteration + 1, planned=place.planned + 1)
        assert self._source is not None
        collected = self._source.take(place, following=following, meter=meter)
        if self._stage.engine.sleep:
            # on every rank, so that all know of the transfer that has to follow
            self._is_asleep = True
            with meter.span("sleep"):
                self._sleep()
        return collected

    def settle(self, progress: Progress, meter: Meter) -> dict[str, float]:
        """Wait until no engine works, so that weights may move. Collective.

        `progress` is that of the step which led to the weights: after a loss they are transferred at once. Raises on
        every rank what ended the work.
        """
        assert self._source is not None
        return self._source.settle(meter, partial(self.push_weights, progress, anew=True))

    def rollouts_ahead(self) -> dict[str, bytes]:
        """For a checkpoint: the rollouts that the next iteration trains on, where they are there already."""
        work = self._source.ready if self._source is not None else None
        if work is None:
            return {}
        return {AHEAD_FILE: rollouts_to_bytes(work, self._engines.versions, self._sampler.open)}

    def _read_kept(self) -> Kept | None:
        """What `rollouts_ahead` gave the checkpoint that the stage is taken up from."""
        saved, data = self._run.resumed_from, self._data
        content = read_extra(saved, AHEAD_FILE) if saved and data and self._progress.step else None
        if saved is None or data is None or content is None:
            return None
        prompts = {prompt.id: prompt for prompt in data.prompts.prompts}
        return rollouts_from_bytes(content, prompts, data.prompts.token_ids, where=saved.path / AHEAD_FILE)

    def _open_source(self, kept: Kept | None) -> RolloutSource:
        if self._data is not None:
            self._sampler = RoundSampler(
                self._collector,
                self._stage,
                self._data.prompts.token_ids,
                draw=partial(self._draw, self._stage.group_size),
                versions=lambda: self._engines.versions,
                open_groups=() if kept is None else kept.open_groups,
            )
        return RolloutSource(
            self._engines,
            self._new_work if self._data is not None else None,
            is_ahead=self._stage.overlap != "none",
            group=self._run.driver_group,
            kept=kept,
        )

    def _new_work(self, place: Place, kept: Kept | None) -> BatchWork:
        assert self._data is not None
        rounds, tally = (kept.rounds, kept.tally) if kept is not None else ((), {})
        return BatchWork(place, self._stage, self._data, self._sampler, rounds=rounds, tally=tally)

    def _close_source(self) -> None:
        if self._source is not None:
            self._source.close()

    def _draw(self, samples: int, *place: int | str) -> Draw:
        """As in training; `place` makes the seeds, with those of the run, the stage, the prompt and the sample."""
        sampling = self._stage.sampling
        return Draw(
            samples=samples,
            seed=partial(derive_seed, self._run.recipe.run.seed, self._progress.stage, *place),
            max_tokens=sampling.max_response_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
        )

    def sampler_state(self) -> Mapping[str, Any]:
        """Prompt cursors, for the checkpoint; empty on ranks that hold no prompts."""
        return self._data.sampler.state_dict() if self._data is not None else {}

    def fault_metrics(self) -> dict[str, float]:
        """What was lost and replaced since the stage began or was taken up, nothing for none, and how evenly engines
        worked since the last iteration. On the driving rank."""
        if self._data is None:
            return {}
        counts = {
            "engine/restarts": self._engines.num_restarts,
            "reward/worker_restarts": self._grader.num_restarts,
        }
        return {name: float(count) for name, count in counts.items() if count} | self._load_metrics()

    def evaluate_if_due(self, iteration: int, *, total: int) -> dict[str, float]:
        """Evaluate after every `eval.every` iterations and after the last, number `total`. Collective."""
        config = self._stage.eval
        if config is None or (iteration % config.every and iteration != total):
            return {}
        began = time.monotonic()
        self._run.reporter.evaluation(self._evaluate(iteration))
        return {"time/eval_s": time.monotonic() - began}

    def _evaluate(self, iteration: int) -> list[EvalResult]:
        config = self._stage.eval
        if config is None:
            return []
        self._run.phases.enter("eval")
        if self._data is None:
            return self._engines.ask(None)
        sets, plan = self._data.eval_sets, eval_plan(self._stage, config, self._run.recipe.run.seed)
        return self._engines.ask(
            lambda: evaluate_sets(
                sets,
                plan,
                self._eval_collector,
                self._grader,
                iteration=iteration,
                weight_version=self._weight_version,
                span=Meter().span,
            )
        )

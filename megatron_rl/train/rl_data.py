"""The prompts of an RL stage: what it trains on, what it is evaluated on, and the order of drawing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from megatron_rl.data.chat import render_prompt
from megatron_rl.data.curriculum import CurriculumSampler, check_windows
from megatron_rl.data.prompts import PromptSet, load_prompts, stage_options
from megatron_rl.data.seeds import derive_seed
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.data.types import Prompt
from megatron_rl.errors import DataError
from megatron_rl.evaluation.in_training import eval_window
from megatron_rl.evaluation.problems import select_problems
from megatron_rl.recipe.amounts import prompts_drawn
from megatron_rl.recipe.stages import CurriculumWindow, RlStage

_PARITY_TOKENS = (128, 64, 32, 32)  # at most, of each prompt of the parity gate


@dataclass(frozen=True, kw_only=True, slots=True)
class RlData:
    """Held by the driving rank alone; the sampler moves on as prompts are drawn."""

    prompts: PromptSet
    eval_sets: Mapping[str, PromptSet]
    sampler: CurriculumSampler

    def summary(self) -> str:
        """One line: training prompts kept and dropped, evaluation prompts by set."""
        sets = "".join(f"; {name}: {prompts.summary()}" for name, prompts in self.eval_sets.items())
        return f"training prompts: {self.prompts.summary()}{sets}"

    def parity_prompts(self) -> tuple[tuple[int, ...], ...]:
        """Of the first prompts a few of different lengths, cut short, the longest first; those of one token left out.

        More positions see more of the weights: the parity gate compares log-probs of all of them.
        """
        ids = self.prompts.token_ids
        first = {tuple(ids[prompt.id]) for prompt in self.prompts.prompts[:64]}
        by_length = sorted((each for each in first if len(each) > 1), key=lambda each: (-len(each), each))
        count = min(len(by_length), len(_PARITY_TOKENS))
        spread = [by_length[i * (len(by_length) - 1) // max(1, count - 1)] for i in range(count)]
        return tuple(each[:limit] for each, limit in zip(spread, _PARITY_TOKENS, strict=False))


def load_rl_data(stage: RlStage, tokenizer: Tokenizer, *, run_seed: int, stage_index: int) -> RlData:
    """Read every prompt file of the stage. Raises DataError for what cannot be used, curriculum included."""
    load = partial(load_prompts, render=partial(render_prompt, tokenizer))
    prompts = load(stage.prompts, **stage_options(stage))
    for_eval = stage_options(stage, is_eval=True)
    windows = stage.curriculum
    if stage.rescore is not None:
        # pass rates are not known yet; what can be checked is
        by_difficulty = [window for window in windows if window.pass_rate is None]
        check_windows(prompts.prompts, by_difficulty)
        windows = ()
    data = RlData(
        prompts=prompts,
        eval_sets={
            name: select_problems(
                name,
                load(path, **for_eval),
                window=eval_window(stage.eval, name),
                limit=stage.eval.max_prompts,
            )
            for name, path in stage.eval.sets.items()
        }
        if stage.eval
        else {},
        sampler=_sampler(prompts.prompts, stage, windows, run_seed=run_seed, stage_index=stage_index),
    )
    _check_pools(data.sampler, stage, "lower it or widen the curriculum")
    if not data.parity_prompts():
        raise DataError(f"{stage.prompts}: prompts of one token cannot be scored; check the chat template")
    return data


def narrowed(
    data: RlData, stage: RlStage, rates: Mapping[str, float], *, run_seed: int, stage_index: int
) -> RlData:
    """The data with the prompts that re-scoring left alone, `rates` by id, and a sampler over them at its beginning.

    Raises DataError where that leaves too few for an iteration.
    """
    kept = replace(
        data.prompts, prompts=tuple(prompt for prompt in data.prompts.prompts if prompt.id in rates)
    )
    if not kept.prompts:
        raise DataError(
            f"{stage.prompts}: re-scoring left no prompt; widen rescore.drop_above and drop_below"
        )
    sampler = _sampler(
        kept.prompts, stage, stage.curriculum, run_seed=run_seed, stage_index=stage_index, rates=rates
    )
    _check_pools(sampler, stage, "lower it, or widen the limits of rescore or the curriculum")
    return replace(data, prompts=kept, sampler=sampler)


def _sampler(
    prompts: Sequence[Prompt],
    stage: RlStage,
    windows: Sequence[CurriculumWindow],
    *,
    run_seed: int,
    stage_index: int,
    rates: Mapping[str, float] | None = None,
) -> CurriculumSampler:
    seed = derive_seed(run_seed, stage_index, "prompts")
    iterations = stage.iterations if windows else None
    return CurriculumSampler(prompts, windows, seed, iterations=iterations, pass_rates=rates)


def _check_pools(sampler: CurriculumSampler, stage: RlStage, advice: str) -> None:
    for iteration in range(stage.iterations):
        size = sampler.pool_size(iteration)
        if size < prompts_drawn(stage):
            name = "dynamic_sampling.generate_prompts" if stage.dynamic_sampling else "prompts_per_iteration"
            raise DataError(
                f"{stage.prompts}: iteration {iteration} draws from {size} prompts, fewer than {name} = "
                f"{prompts_drawn(stage)}: some would be drawn twice with the same seeds; {advice}"
            )

"""The prompts of an RL stage: what it trains on, what it is evaluated on, and the order of drawing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from megatron_rl.data.chat import render_prompt
from megatron_rl.data.curriculum import CurriculumSampler
from megatron_rl.data.prompts import PromptSet, load_prompts, stage_options
from megatron_rl.data.seeds import derive_seed
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.errors import DataError
from megatron_rl.recipe.stages import RlStage

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
    data = RlData(
        prompts=prompts,
        eval_sets={name: load(path, **for_eval) for name, path in stage.eval.sets.items()}
        if stage.eval
        else {},
        sampler=CurriculumSampler(
            prompts.prompts,
            stage.curriculum,
            derive_seed(run_seed, stage_index, "prompts"),
            iterations=stage.iterations,
        ),
    )
    for iteration in range(stage.iterations):
        size = data.sampler.pool_size(iteration)
        if size < stage.prompts_per_iteration:
            raise DataError(
                f"{stage.prompts}: iteration {iteration} draws from {size} prompts, fewer than prompts_per_iteration = "
                f"{stage.prompts_per_iteration}: some would be drawn twice with the same seeds; lower it or widen the "
                "curriculum"
            )
    if not data.parity_prompts():
        raise DataError(f"{stage.prompts}: prompts of one token cannot be scored; check the chat template")
    return data

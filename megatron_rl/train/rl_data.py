"""The prompts of an RL stage: what it trains on, what it is evaluated on, and the order of drawing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from megatron_rl.data.chat import render_prompt
from megatron_rl.data.curriculum import CurriculumSampler
from megatron_rl.data.prompts import PromptSet, load_prompts
from megatron_rl.data.seeds import derive_seed
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.errors import DataError
from megatron_rl.recipe.stages import RlStage


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

    def probe(self) -> tuple[int, ...]:
        """The longest of the first prompts, for the parity gate: more positions see more of the weights."""
        first = self.prompts.prompts[:64]
        return max((tuple(self.prompts.token_ids[prompt.id]) for prompt in first), key=len)


def load_rl_data(stage: RlStage, tokenizer: Tokenizer, *, run_seed: int, stage_index: int) -> RlData:
    """Read every prompt file of the stage. Raises DataError for what cannot be used, curriculum included."""
    load = partial(
        load_prompts,
        render=partial(render_prompt, tokenizer),
        max_prompt_tokens=stage.sampling.max_prompt_tokens,
    )
    prompts = load(stage.prompts)
    data = RlData(
        prompts=prompts,
        eval_sets={name: load(path) for name, path in stage.eval.sets.items()} if stage.eval else {},
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
    if len(data.probe()) < 2:
        raise DataError(f"{stage.prompts}: prompts of one token cannot be scored; check the chat template")
    return data

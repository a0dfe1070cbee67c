"""avg@k on held-out prompts, through the same engine and reward code as training."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from megatron_rl.data.prompts import PromptSet
from megatron_rl.data.seeds import derive_seed
from megatron_rl.data.types import RolloutGroup
from megatron_rl.recipe.stages import EvalConfig
from megatron_rl.rollout.collect import Collector, Draw
from megatron_rl.train.eval_result import EvalProblem, EvalResult
from megatron_rl.train.metrics import Meter


def evaluate(
    collector: Collector,
    sets: Mapping[str, PromptSet],
    config: EvalConfig,
    *,
    max_tokens: int,
    run_seed: int,
    iteration: int,
    weight_version: int,
) -> list[EvalResult]:
    """One result per set. Every evaluation of a run uses the same seeds, so that curves differ by the weights alone."""
    results = []
    for name, prompt_set in sets.items():
        draw = Draw(
            samples=config.samples,
            seed=partial(derive_seed, run_seed, "eval", name),
            max_tokens=max_tokens,
            temperature=config.temperature,
            top_p=config.top_p,
            every_test=True,
        )
        prompts = prompt_set.prompts[: config.max_prompts]
        groups = collector.collect(
            prompts, prompt_set.token_ids, draw, weight_version=weight_version, span=Meter().span
        )
        results.append(
            EvalResult(
                name=name,
                iteration=iteration,
                samples=config.samples,
                weight_version=weight_version,
                problems=tuple(_problem(group) for group in groups),
            )
        )
    return results


def _problem(group: RolloutGroup) -> EvalProblem:
    rollouts = group.rollouts
    return EvalProblem(
        id=group.prompt.id,
        difficulty=group.prompt.difficulty,
        num_correct=sum(rollout.reward.verdict.is_correct() for rollout in rollouts),
        num_samples=len(rollouts),
        num_truncated=sum(rollout.completion.finish.is_truncated() for rollout in rollouts),
    )

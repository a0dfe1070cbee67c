"""Evaluations of an RL stage: what its recipe says, as a plan that `megatron-rl eval` can repeat."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from megatron_rl.data.prompts import PromptSet
from megatron_rl.evaluation.evaluate import EvalPlan, evaluate, problems_per_call
from megatron_rl.evaluation.problems import Window
from megatron_rl.evaluation.result import EvalResult
from megatron_rl.recipe.checks import parse_day
from megatron_rl.recipe.stages import EvalConfig, RlStage
from megatron_rl.rewards.combine import RewardModel
from megatron_rl.rollout.collect import Collector, Span


def eval_plan(stage: RlStage, config: EvalConfig, run_seed: int) -> EvalPlan:
    """How evaluations of the stage sample; `megatron-rl eval` with the same numbers draws the same samples."""
    return EvalPlan(
        samples=config.samples,
        run_seed=run_seed,
        max_tokens=config.max_response_tokens or stage.sampling.max_response_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        pass_at=config.pass_at,
        problems_per_call=problems_per_call(
            samples=config.samples,
            max_concurrent=stage.engine.max_concurrent,
            replicas=stage.engine.replicas,
        ),
    )


def eval_window(config: EvalConfig, name: str) -> Window:
    """The days that problems of set `name` are from; all without a window."""
    if name not in config.windows:
        return Window()
    since, until = map(parse_day, config.windows[name])
    return Window(since=since, until=until)


def longest_sequence(stage: RlStage) -> int:
    """Tokens, prompt and response, that the stage's engine has room for: by rollouts or by evaluations."""
    of_eval = stage.eval.max_response_tokens if stage.eval is not None else None
    return stage.sampling.max_prompt_tokens + max(stage.sampling.max_response_tokens, of_eval or 0)


def evaluate_sets(
    sets: Mapping[str, PromptSet],
    plan: EvalPlan,
    collector: Collector,
    grader: RewardModel,
    *,
    iteration: int,
    weight_version: int,
    span: Span,
) -> list[EvalResult]:
    """One result per set, from the weights that were transferred last, as `weight_version`."""
    collect = partial(collector.collect, weight_version=weight_version, span=span)
    return [
        evaluate(
            name,
            problems,
            plan,
            collect=collect,
            grader=grader,
            iteration=iteration,
            weight_version=weight_version,
        )
        for name, problems in sets.items()
    ]

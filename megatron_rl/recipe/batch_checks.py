"""What does not fit together in dynamic sampling, overlong responses, mapped rewards and the curriculum of a stage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron_rl.recipe.amounts import iterations_before_promotion
from megatron_rl.recipe.batch import (
    BUFFER_TOKENS,
    MAX_ROUNDS,
    DynamicSamplingConfig,
    OverlongConfig,
    PromoteConfig,
)
from megatron_rl.recipe.problems import Problem
from megatron_rl.recipe.stages import CurriculumWindow, GraderConfig, RlStage


def batch_problems(stage: RlStage, path: str) -> Iterator[Problem]:
    """Every contradiction; `path` is the dotted path of the stage."""
    if stage.dynamic_sampling is not None:
        yield from _sampling_problems(stage, stage.dynamic_sampling, f"{path}.dynamic_sampling")
    if stage.overlong is not None:
        yield from _overlong_problems(stage, stage.overlong, f"{path}.overlong")
    yield from _grader_problems(stage.grader, f"{path}.grader")
    if stage.grader.all_or_nothing and "code_tests" not in stage.rewards:
        yield Problem(
            f"{path}.grader.all_or_nothing",
            f"is of code_tests, but the rewards are {', '.join(stage.rewards)}, which score 0 or 1; remove it",
        )
    yield from _curriculum_problems(stage, path)
    yield from _promote_problems(stage, path)
    rescore = stage.rescore
    if rescore is not None and rescore.drop_below >= rescore.drop_above:
        yield Problem(
            f"{path}.rescore.drop_below",
            f"got {rescore.drop_below:g}, must be below drop_above = {rescore.drop_above:g}, or no prompt is left",
        )


def _sampling_problems(stage: RlStage, sampling: DynamicSamplingConfig, path: str) -> Iterator[Problem]:
    if sampling.generate_prompts < stage.prompts_per_iteration:
        yield Problem(
            f"{path}.generate_prompts",
            f"got {sampling.generate_prompts}, must be at least prompts_per_iteration = "
            f"{stage.prompts_per_iteration}, which are trained on",
        )
    if sampling.kind == "oversample" and sampling.max_rounds != MAX_ROUNDS:
        yield Problem(
            f"{path}.max_rounds",
            f"got {sampling.max_rounds}, but oversample has one round; remove it or set kind to refill",
        )
    if not stage.algorithm.drop_zero_advantage:
        yield Problem(
            path,
            "keeps only groups whose rollouts had different outcomes, which algorithm.drop_zero_advantage = false "
            "contradicts; set that to true or dynamic_sampling to null",
        )


def _overlong_problems(stage: RlStage, overlong: OverlongConfig, path: str) -> Iterator[Problem]:
    longest = stage.sampling.max_response_tokens
    if overlong.kind == "filter" and overlong.buffer_tokens != BUFFER_TOKENS:
        yield Problem(
            f"{path}.buffer_tokens",
            f"got {overlong.buffer_tokens}, which filter does not use; remove it or set kind to penalty",
        )
    if overlong.kind == "penalty" and overlong.buffer_tokens > longest:
        yield Problem(
            f"{path}.buffer_tokens",
            f"got {overlong.buffer_tokens}, must be at most sampling.max_response_tokens = {longest}; DAPO takes a "
            f"fifth of it, {max(1, longest // 5)}",
        )


def _grader_problems(grader: GraderConfig, path: str) -> Iterator[Problem]:
    low, high = grader.scale
    if low >= high:
        yield Problem(
            f"{path}.scale", f"got [{low:g}, {high:g}], the reward of a wrong answer must come first"
        )


def _curriculum_problems(stage: RlStage, path: str) -> Iterator[Problem]:
    for i, window in enumerate(stage.curriculum):
        yield from _window_problems(window, f"{path}.curriculum.{i}")
    total = sum(window.iterations for window in stage.curriculum)
    if stage.curriculum and total != stage.iterations:
        yield Problem(
            f"{path}.curriculum",
            f"its windows last {total} iterations, but the stage has iterations = {stage.iterations}; "
            "make them equal, or set curriculum to [] to draw from all prompts",
        )


def _window_problems(window: CurriculumWindow, path: str) -> Iterator[Problem]:
    if (window.difficulty is None) == (window.pass_rate is None):
        got = "neither" if window.difficulty is None else "both"
        yield Problem(path, f"got {got}, must have one of difficulty and pass_rate")
    for name, bounds in (("difficulty", window.difficulty), ("pass_rate", window.pass_rate)):
        if bounds is not None and bounds[0] > bounds[1]:
            yield Problem(
                f"{path}.{name}", f"got [{bounds[0]:g}, {bounds[1]:g}], the lower bound must come first"
            )
    if window.pass_rate is not None and not all(0 <= bound <= 1 for bound in window.pass_rate):
        low, high = window.pass_rate
        yield Problem(f"{path}.pass_rate", f"got [{low:g}, {high:g}], must be shares from 0 to 1")


def _promote_problems(stage: RlStage, path: str) -> Iterator[Problem]:
    windows: Sequence[CurriculumWindow] = stage.curriculum
    if stage.promote is not None:
        users = [window.iterations for window in windows if window.promote is None]
        if windows and not users:
            yield Problem(f"{path}.promote", "is not used, every window has its own; remove one or the other")
        else:
            yield from _rule_problems(stage.promote, max(users, default=stage.iterations), f"{path}.promote")
    for i, window in enumerate(windows):
        if window.promote is not None:
            yield from _rule_problems(window.promote, window.iterations, f"{path}.curriculum.{i}.promote")


def _rule_problems(rule: PromoteConfig, iterations: int, path: str) -> Iterator[Problem]:
    first = iterations_before_promotion(rule)
    if first >= iterations:
        yield Problem(
            path,
            f"is asked after {first} iterations for the first time, but there are only {iterations}; lower window or "
            "min_iterations, or remove it",
        )
    if rule.on == "truncated_frac" and not 0 < rule.threshold <= 1:
        yield Problem(f"{path}.threshold", f"got {rule.threshold:g}, must be a share above 0 and at most 1")

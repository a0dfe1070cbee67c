"""What does not fit together inside one stage, before anything is known of the world or the model."""

from __future__ import annotations

import datetime
from collections.abc import Iterator

from megatron_rl.recipe.algorithm_checks import algorithm_problems
from megatron_rl.recipe.batch_checks import batch_problems
from megatron_rl.recipe.dataset import conversation_problems, dataset_problems, template_problems
from megatron_rl.recipe.hosts import parse_host_port
from megatron_rl.recipe.overlap_checks import overlap_problems
from megatron_rl.recipe.problems import Problem, did_you_mean
from megatron_rl.recipe.sandbox import sandbox_problems
from megatron_rl.recipe.stages import (
    EngineConfig,
    EvalConfig,
    OptimizerConfig,
    RlStage,
    ScheduleConfig,
    SftStage,
    Stage,
)
from megatron_rl.recipe.vllm_options import option_problems


def optimizer_steps(stage: Stage) -> int:
    """Optimizer steps of a whole stage."""
    return stage.steps if isinstance(stage, SftStage) else stage.iterations * stage.updates_per_rollout


def stage_problems(stage: Stage, path: str) -> Iterator[Problem]:
    """Every contradiction inside one stage; `path` is its dotted path."""
    # no steps yet: epochs of a file that is not there, which has its own line
    if optimizer_steps(stage):
        yield from _schedule_problems(stage.schedule, stage.optimizer, optimizer_steps(stage), path)
    if isinstance(stage, SftStage):
        if stage.tokens_per_microbatch < stage.max_sample_tokens:
            yield Problem(
                f"{path}.tokens_per_microbatch",
                f"got {stage.tokens_per_microbatch}, but one sample may have max_sample_tokens = "
                f"{stage.max_sample_tokens} tokens; raise it to {stage.max_sample_tokens} or lower the other",
            )
        yield from conversation_problems(stage.columns, f"{path}.columns")
        return
    yield from dataset_problems(stage.dataset, f"{path}.dataset")
    yield from template_problems(stage.prompt_template, f"{path}.prompt_template")
    yield from _batch_problems(stage, path)
    yield from _sampling_problems(stage, path)
    yield from algorithm_problems(stage.algorithm, f"{path}.algorithm")
    yield from batch_problems(stage, path)
    yield from overlap_problems(stage, path)
    yield from sandbox_problems(stage.sandbox, f"{path}.sandbox")
    yield from _engine_problems(stage.engine, f"{path}.engine")
    if stage.eval is not None:
        yield from _eval_problems(stage.eval, f"{path}.eval")


def parse_day(text: str) -> datetime.date | None:
    """None for what is no day of the form YYYY-MM-DD."""
    try:
        return datetime.date.fromisoformat(text) if len(text) == len("2024-08-01") else None
    except ValueError:
        return None


def _eval_problems(config: EvalConfig, path: str) -> Iterator[Problem]:
    if not config.sets:
        yield Problem(f"{path}.sets", "is empty, name at least one prompt file or set eval to null")
    for k in config.pass_at:
        if k > config.samples:
            yield Problem(
                f"{path}.pass_at",
                f"got {k}, must be at most samples = {config.samples}: fewer samples say nothing unbiased about "
                f"pass@{k}; raise samples or lower it",
            )
    for name, window in config.windows.items():
        place = f"{path}.windows.{name}"
        if name not in config.sets:
            hint = did_you_mean(name, tuple(config.sets)) or f"; sets are {', '.join(config.sets)}"
            yield Problem(place, f"no set of this name{hint}")
        since, until = map(parse_day, window)
        if since is None or until is None or since >= until:
            yield Problem(
                place,
                f"got [{', '.join(window)}], must be two days, the earlier first, such as [2024-08-01, 2025-02-01]; "
                "the second is not part of the window",
            )
    if config.top_k != -1 and config.top_k < 1:
        yield Problem(f"{path}.top_k", f"got {config.top_k}, must be at least 1; -1 is no limit")


def nearest_multiples(value: int, base: int) -> str:
    """The multiples of `base` around `value`, as text."""
    below = value // base * base
    return " or ".join(str(n) for n in (below, below + base) if n)


def _schedule_problems(
    schedule: ScheduleConfig, optimizer: OptimizerConfig, steps: int, path: str
) -> Iterator[Problem]:
    if schedule.warmup_steps > steps:
        yield Problem(
            f"{path}.schedule.warmup_steps",
            f"got {schedule.warmup_steps}, but the stage has {steps} optimizer steps; use at most {steps}",
        )
    if schedule.min_lr > optimizer.lr:
        yield Problem(
            f"{path}.schedule.min_lr", f"got {schedule.min_lr}, must be at most optimizer.lr = {optimizer.lr}"
        )
    elif schedule.kind == "constant" and schedule.min_lr:
        yield Problem(
            f"{path}.schedule.min_lr",
            f"got {schedule.min_lr}, which a constant schedule does not use; remove it or set schedule.kind",
        )


def _batch_problems(stage: RlStage, path: str) -> Iterator[Problem]:
    prompts, updates = stage.prompts_per_iteration, stage.updates_per_rollout
    if prompts % updates:
        yield Problem(
            f"{path}.prompts_per_iteration",
            f"got {prompts}, must be a multiple of updates_per_rollout = {updates}; "
            f"use {nearest_multiples(prompts, updates)}",
        )
    if stage.group_size < 2:
        yield Problem(
            f"{path}.group_size",
            f"got {stage.group_size}, must be at least 2: rollouts are compared with others of their prompt",
        )


def _sampling_problems(stage: RlStage, path: str) -> Iterator[Problem]:
    sampling = stage.sampling
    reason = "in training rollouts: log-probs of a truncated distribution are not those of the policy"
    if sampling.top_p != 1.0:
        yield Problem(f"{path}.sampling.top_p", f"got {sampling.top_p}, must be 1.0 {reason}")
    if sampling.top_k != -1:
        yield Problem(f"{path}.sampling.top_k", f"got {sampling.top_k}, must be -1 {reason}")
    longest = sampling.max_prompt_tokens + sampling.max_response_tokens
    if stage.tokens_per_microbatch < longest:
        yield Problem(
            f"{path}.tokens_per_microbatch",
            f"got {stage.tokens_per_microbatch}, but one rollout may have max_prompt_tokens + "
            f"max_response_tokens = {longest} tokens; raise it to {longest} or lower those",
        )


def _engine_problems(engine: EngineConfig, path: str) -> Iterator[Problem]:
    if engine.port > 65535:
        yield Problem(f"{path}.port", f"got {engine.port}, must be at most 65535; 0 takes any free one")
    yield from option_problems(engine.vllm, f"{path}.vllm")
    yield from _host_problems(engine, path)


def _host_problems(engine: EngineConfig, path: str) -> Iterator[Problem]:
    # the trainer's own machines are not idle without an engine
    if len(engine.hosts) > engine.replicas and not engine.colocated:
        yield Problem(
            f"{path}.hosts",
            f"has {len(engine.hosts)} hosts for {engine.replicas} replicas, so that some would stay idle; raise "
            f"replicas to {len(engine.hosts)} or remove hosts",
        )
    if engine.secret_file is not None and not engine.hosts:
        yield Problem(f"{path}.secret_file", "is not used without hosts; remove it or set hosts")
    for i, text in enumerate(engine.hosts):
        try:
            address = parse_host_port(text)
        except ValueError as error:
            yield Problem(f"{path}.hosts.{i}", str(error))
            continue
        if address.port == 0:
            yield Problem(
                f"{path}.hosts.{i}", f"got {text!r}, must name the port that the engine host listens on"
            )
        elif text in engine.hosts[:i]:
            yield Problem(f"{path}.hosts.{i}", f"{text} is there twice; name each host once")
        elif engine.secret_file is None and not address.is_loopback():
            yield Problem(
                f"{path}.hosts.{i}",
                f"{text} is another machine, which asks for a secret; set secret_file to the file that "
                f"`megatron-rl engine` there was given as --secret-file",
            )

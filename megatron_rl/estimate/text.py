"""Estimates as rows of text, and as plain JSON types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_rl.estimate.hardware import Hardware
from megatron_rl.estimate.stage_time import Assumed, StageTime

Row = tuple[str, str]


def time_rows(
    times: Sequence[StageTime], hardware: Hardware, assumed: Assumed, *, dtype: str = "bfloat16"
) -> list[Row]:
    """What `check` prints about time: a head, every stage, and the recipe. Rates are those of bfloat16."""
    slower = "" if dtype == "bfloat16" else f" as in bfloat16 ({dtype} is slower)"
    rows: list[Row] = [
        ("", ""),
        (
            "time",
            f"estimated for {hardware.name}{slower}, not measured; how far off: megatron_rl/estimate/README.md",
        ),
    ]
    for i, time in enumerate(times):
        rows += _stage_rows(i, time, assumed)
    known = [time.gpu_hours for time in times if time.steps]
    if len(times) > 1 and len(known) == len(times):
        rows.append(("recipe", f"{_hours(sum(known))} GPU hours"))
    return rows


def _stage_rows(number: int, time: StageTime, assumed: Assumed) -> list[Row]:
    step = time.step
    what = "iteration" if time.kind == "rl" else "step"
    rows = [
        (f"stages.{number}", _lengths(time, assumed)),
        (f"  {what}", f"{seconds(step.step_s)} on {_gpus(time)}"),
        (
            "  " + what + " is",
            ", ".join(_share(name, s, step.step_s) for name, s in step.phases.items() if s),
        ),
    ]
    if step.generation is not None:
        made = step.generation
        rows.append(
            (
                "  generation",
                f"{made.steps:,.0f} decode steps, {made.mean_batch:,.0f} sequences at once per engine on average",
            )
        )
    rows.append(
        ("  throughput", f"{step.tokens_per_s_per_gpu:,.0f} tokens/s/GPU; training at {time.mfu:.0%} MFU")
    )
    if time.steps:
        rows.append(("  in all", f"{seconds(step.step_s * time.steps)}, {_hours(time.gpu_hours)} GPU hours"))
    else:
        rows.append(("  in all", "not known: the data is not there to count its rows; give steps"))
    return rows


def _lengths(time: StageTime, assumed: Assumed) -> str:
    mean = f"{time.mean_tokens:,.0f} tokens on average"
    if assumed.response_mean and assumed.response_mean > time.mean_tokens:
        mean = f"{time.mean_tokens:,.0f} tokens, the longest allowed"
    if time.kind == "sft":
        text = f"samples of {mean}"
    else:
        text = f"responses of {mean}, prompts of {time.prompt_tokens:,.0f}"
        if assumed.prompt_mean and assumed.prompt_mean > time.prompt_tokens:
            text += ", the longest allowed"
    return text if assumed.response_mean else f"{text}: a guess, say --response-mean"


def _gpus(time: StageTime) -> str:
    num_gpus, engines = time.step.num_gpus, time.engine_gpus
    text = f"{num_gpus} GPU{'s' * (num_gpus > 1)}"
    if time.is_separate:
        return f"{text}, {engines} of them engines"
    return f"{text}, {min(engines, time.num_ranks)} of them shared with engines" if engines else text


def _share(name: str, part: float, whole: float) -> str:
    return f"{name} {seconds(part)} ({part / whole:.0%})"


def seconds(value: float) -> str:
    """A duration with the unit that suits it."""
    if value >= 2 * 86400:
        return f"{value / 86400:,.1f} days"
    if value >= 2 * 3600:
        return f"{value / 3600:.1f} h"
    return f"{value:,.0f} s" if value >= 10 else f"{value:.2g} s"


def _hours(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def time_data(times: Sequence[StageTime], assumed: Assumed) -> list[dict[str, Any]]:
    """The same for programs: seconds, tokens, GPU hours; null for what is not known."""
    return [
        {
            "kind": time.kind,
            "step_s": time.step.step_s,
            "phases_s": time.step.phases,
            "num_gpus": time.step.num_gpus,
            "engine_gpus": time.engine_gpus,
            "tokens_per_step": time.step.tokens,
            "tokens_per_s_per_gpu": time.step.tokens_per_s_per_gpu,
            "train_mfu": time.mfu,
            "train_compute_s": time.step.train.compute_s,
            "train_exchange_s": time.step.train.exchange_s,
            "train_bubble_s": time.step.train.bubble_s,
            "decode_steps": time.step.generation.steps if time.step.generation else None,
            "mean_decode_batch": time.step.generation.mean_batch if time.step.generation else None,
            "mean_tokens": time.mean_tokens,
            "is_mean_given": assumed.response_mean is not None,
            "prompt_tokens": time.prompt_tokens,
            "steps": time.steps or None,
            "total_s": time.step.step_s * time.steps if time.steps else None,
            "gpu_hours": time.gpu_hours if time.steps else None,
        }
        for time in times
    ]

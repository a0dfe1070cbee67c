"""When a curriculum window ends before its iterations are over: a rule over the iterations of the window so far.

The plan of a stage stays as it is; ending a window early skips the rest of its iterations. Iteration i is therefore
number i + skipped of the plan, and the stage ends where the plan does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from megatron_rl.recipe.amounts import iterations_before_promotion
from megatron_rl.recipe.batch import PromoteConfig
from megatron_rl.recipe.stages import RlStage

_WATCHED = {"reward_plateau": "reward/mean", "truncated_frac": "rollout/truncated_frac"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """Number `number` (from 0) of `count`, iterations `first` to before `end` of the plan, with its rule."""

    number: int
    count: int
    first: int
    end: int
    rule: PromoteConfig | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Promotion:
    """A window that ended after `iterations`, and why."""

    window: Window
    iterations: int
    reason: str

    @property
    def ends_stage(self) -> bool:
        return self.window.number + 1 == self.window.count

    def __str__(self) -> str:
        window = self.window
        name = "the stage" if window.count == 1 else f"window {window.number + 1} of {window.count}"
        follows = (
            "" if window.count == 1 else "; the stage is over" if self.ends_stage else "; the next one begins"
        )
        return f"{name} ends after {self.iterations} of {window.end - window.first} iterations: {self.reason}{follows}"


def window_of(stage: RlStage, planned: int) -> Window:
    """The window that iteration `planned` of the plan is in; without a curriculum the stage is one."""
    first, count = 0, len(stage.curriculum)
    for number, window in enumerate(stage.curriculum):
        end = first + window.iterations
        if planned < end:
            return Window(
                number=number, count=count, first=first, end=end, rule=window.promote or stage.promote
            )
        first = end
    return Window(number=0, count=1, first=0, end=stage.iterations, rule=stage.promote)


def observe(
    pace: Mapping[str, Any], stage: RlStage, iteration: int, metrics: Mapping[str, float]
) -> tuple[dict[str, Any], Promotion | None]:
    """The pace after `iteration` (from 0) with these metrics, and the promotion that it brought.

    A pace is what a checkpoint keeps, plain JSON: `skipped` iterations of the plan, and `values`, those that the rule
    of the window has seen. It stays empty as long as no window has a rule.
    """
    skipped, values = int(pace.get("skipped", 0)), list(pace.get("values", ()))
    planned = iteration + skipped
    window = window_of(stage, planned)
    if window.rule is None:
        return ({"skipped": skipped, "values": []} if pace else {}), None
    values.append(metrics[_WATCHED[window.rule.on]])
    left = window.end - planned - 1
    if left == 0:
        return {"skipped": skipped, "values": []}, None
    reason = reason_to_end(window.rule, values)
    if reason is None:
        return {"skipped": skipped, "values": values}, None
    promotion = Promotion(window=window, iterations=len(values), reason=reason)
    return {"skipped": skipped + left, "values": []}, promotion


def reason_to_end(rule: PromoteConfig, values: Sequence[float]) -> str | None:
    """Why the rule ends a window whose iterations had these values, in words; None if it does not."""
    if len(values) < iterations_before_promotion(rule):
        return None
    last = fmean(values[-rule.window :])
    if rule.on == "truncated_frac":
        if last < rule.threshold:
            return None
        return f"{last:.3g} of the responses of {rule.window} iterations were truncated, at least {rule.threshold:g}"
    rise = last - fmean(values[-2 * rule.window : -rule.window])
    if rise > rule.threshold:
        return None
    return f"the mean reward of {rule.window} iterations rose by {rise:.3g}, at most {rule.threshold:g}"


def promotion_metrics(
    stage: RlStage, pace: Mapping[str, Any], iteration: int, promotion: Promotion | None
) -> dict[str, float]:
    """The window (from 1) that `iteration` was in under `pace`, and whether it ended early; nothing without a rule."""
    window = window_of(stage, iteration + int(pace.get("skipped", 0)))
    if window.rule is None:
        return {}
    return {"curriculum/window": window.number + 1.0, "curriculum/promoted": float(promotion is not None)}

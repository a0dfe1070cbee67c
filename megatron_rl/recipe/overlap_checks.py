"""What does not fit together where engines generate while the trainer trains."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron_rl.recipe.amounts import groups_waited_for, prompts_drawn
from megatron_rl.recipe.problems import Problem
from megatron_rl.recipe.stages import RlStage


def overlap_problems(stage: RlStage, path: str) -> Iterator[Problem]:
    """Every contradiction; `path` is the dotted path of the stage."""
    yield from _straggler_problems(stage, path)
    if stage.engine.sleep and stage.engine.colocated is False:
        yield Problem(
            f"{path}.engine.colocated",
            "got false with sleep: true, which is for engines on the trainer's GPUs; set sleep to false for engines on "
            "machines of their own (as with slurm's --engine-nodes)",
        )
    if stage.overlap == "none":
        return
    correction = stage.algorithm.correction
    if correction.kind == "none" and correction.old == "trainer":
        yield Problem(
            f"{path}.algorithm.correction",
            f"got kind none and old: trainer with overlap {stage.overlap}: rollouts come from older weights than those "
            "that are trained, and nothing accounts for it; set kind, such as token_tis, to weigh tokens by trainer "
            "over engine, or old: rollout, so that the surrogate's own ratio is to the policy that sampled",
        )
    if stage.engine.sleep:
        yield Problem(
            f"{path}.engine.sleep",
            f"got true with overlap {stage.overlap}, where engines generate while the trainer trains; set one of them "
            "to its default",
        )
    if stage.engine.colocated:
        yield Problem(
            f"{path}.engine.colocated",
            f"got true with overlap {stage.overlap}, where engines generate while the trainer trains; give them "
            "machines of their own (with slurm --engine-nodes N), or set overlap to none",
        )
    if stage.engine.transport == "shared":
        yield Problem(
            f"{path}.overlap",
            f"got {stage.overlap}, but engine.transport shared is for an engine on the trainer's own device, where one "
            "of them has to stop for the other; set transport to auto with engines on devices of their own, or overlap "
            "to none",
        )


def _share_problems(stage: RlStage, share: float, path: str) -> Iterator[Problem]:
    """A share that lets no group go, or too few to fill the optimizer steps of an iteration."""
    count = prompts_drawn(stage)
    waited_for = groups_waited_for(share, count)
    if waited_for == count:
        most = (
            f"use at most {math.floor((count - 1) / count * 1000) / 1000:g}"
            if count > 1
            else "draw more prompts"
        )
        yield Problem(
            path,
            f"got {share:g}, which waits for all {count} groups of a round; {most}, or set stragglers to null",
        )
    elif waited_for < stage.updates_per_rollout:
        yield Problem(
            path,
            f"got {share:g}, with which a round may end with {waited_for} of its {count} groups, too few for "
            f"updates_per_rollout = {stage.updates_per_rollout}; use at least "
            f"{math.ceil(stage.updates_per_rollout / count * 1000) / 1000:g}, or fewer updates",
        )


def _straggler_problems(stage: RlStage, path: str) -> Iterator[Problem]:
    config = stage.stragglers
    if config is None:
        if stage.overlap == "partial":
            yield Problem(
                f"{path}.stragglers",
                "is null, but overlap partial goes on with the groups that it leaves; set it, such as {groups: 0.9}, "
                "or overlap to one_step",
            )
        return
    if not 0 < config.groups < 1:
        yield Problem(
            f"{path}.stragglers.groups",
            f"got {config.groups:g}, must be above 0 and below 1; to wait for all groups set stragglers to null",
        )
    else:
        yield from _share_problems(stage, config.groups, f"{path}.stragglers.groups")
    if config.max_staleness is not None and stage.overlap != "partial":
        yield Problem(
            f"{path}.stragglers.max_staleness",
            f"got {config.max_staleness}, which overlap {stage.overlap} does not use: it drops what is late; remove it "
            "or set overlap to partial",
        )
    elif config.max_staleness == 1:
        yield Problem(
            f"{path}.stragglers.max_staleness",
            "got 1, but what goes on in the next iteration is 2 transfers old when it is trained on; raise it, or set "
            "overlap to one_step",
        )

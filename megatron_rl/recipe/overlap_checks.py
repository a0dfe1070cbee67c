"""What does not fit together where engines generate while the trainer trains."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rl.recipe.problems import Problem
from megatron_rl.recipe.stages import RlStage


def overlap_problems(stage: RlStage, path: str) -> Iterator[Problem]:
    """Every contradiction; `path` is the dotted path of the stage."""
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
    if stage.engine.transport == "shared":
        yield Problem(
            f"{path}.overlap",
            f"got {stage.overlap}, but engine.transport shared is for an engine on the trainer's own device, where one "
            "of them has to stop for the other; set transport to auto with engines on devices of their own, or overlap "
            "to none",
        )

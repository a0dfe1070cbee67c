"""Where a run stands, and how stages are named and counted on the run's one step axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_rl.recipe.stages import SftStage, Stage


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """`step` optimizer steps (SFT) or iterations (RL) of stage number `stage` are done."""

    stage: int = 0
    step: int = 0
    sampler: Mapping[str, Any] = field(default_factory=dict)  # prompt cursors of an RL stage

    def advanced(self, step: int, *, sampler: Mapping[str, Any] | None = None) -> Progress:
        return replace(self, step=step, sampler=self.sampler if sampler is None else sampler)

    def to_dict(self) -> dict[str, Any]:
        return {"stage": self.stage, "step": self.step, "sampler": dict(self.sampler)}

    def global_step(self, stages: Sequence[Stage]) -> int:
        """Position on the step axis, which counts on over all stages."""
        return sum(stage_length(stage) for stage in stages[: self.stage]) + self.step


def stage_length(stage: Stage) -> int:
    """Steps that a stage reports: optimizer steps of SFT, iterations of RL."""
    return stage.steps if isinstance(stage, SftStage) else stage.iterations


def stage_label(stages: Sequence[Stage], index: int) -> str:
    """`sft` or `rl`; numbered from 1 where a run has several of the kind: `rl2`."""
    kinds = [stage.kind for stage in stages]
    kind = kinds[index]
    return kind if kinds.count(kind) == 1 else f"{kind}{kinds[: index + 1].count(kind)}"

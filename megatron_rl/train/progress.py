"""Where a run stands, and how stages are named and counted on the run's one step axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from megatron_rl.errors import DataError
from megatron_rl.recipe.stages import SftStage, Stage


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """`step` optimizer steps (SFT) or iterations (RL) of stage number `stage` are done.

    What a checkpoint stores besides tensors and generators.
    """

    stage: int = 0
    step: int = 0
    # of an RL stage: per curriculum window the seed, epoch and position of its prompts
    sampler: Mapping[str, Any] = field(default_factory=dict)
    # of an RL stage, see data.promotion: iterations of its plan that were skipped, what the rule has seen
    pace: Mapping[str, Any] = field(default_factory=dict)
    # of an RL stage that re-scored its prompts: the file of pass rates and its sha256
    rescored: Mapping[str, Any] = field(default_factory=dict)
    skipped_before: int = 0  # iterations of the plan that earlier stages skipped
    # of the whole run so far, by what is counted
    counts: Mapping[str, int] = field(default_factory=dict)
    # of an RL stage with an entropy bonus: its coefficient and the entropy last measured
    entropy: Mapping[str, float | None] = field(default_factory=dict)
    skipped_in_a_row: int = 0  # optimizer steps left out since the last one that was taken
    weight_version: int = 0  # of the weights that the engines have
    data: str = ""  # digest of what the stage trains on

    def advanced(
        self,
        step: int,
        *,
        sampler: Mapping[str, Any] | None = None,
        pace: Mapping[str, Any] | None = None,
        counts: Mapping[str, int] | None = None,
        skipped_in_a_row: int = 0,
        weight_version: int = 0,
        entropy: Mapping[str, float | None] | None = None,
    ) -> Progress:
        """After one more step, whose `counts` are added to those so far."""
        summed = {
            name: self.counts.get(name, 0) + (counts or {}).get(name, 0)
            for name in [*self.counts, *(name for name in counts or {} if name not in self.counts)]
        }
        return replace(
            self,
            step=step,
            sampler=self.sampler if sampler is None else sampler,
            pace=self.pace if pace is None else pace,
            counts=summed,
            entropy=self.entropy if entropy is None else entropy,
            skipped_in_a_row=skipped_in_a_row,
            weight_version=weight_version,
        )

    def next_stage(self, stage: int) -> Progress:
        """Before the first step of a later stage; counts go on."""
        return Progress(stage=stage, skipped_before=self.skipped_before + self.skipped, counts=self.counts)

    def on_data(self, digest: str, *, place: str) -> Progress:
        """With the digest of what the stage trains on; `place` is its key and file.

        Raises DataError where the stage has begun with other data: its steps and cursors are places in that.
        """
        if self.step and self.data != digest:
            raise DataError(
                f"{place} does not hold what the stage was trained on up to step {self.step}: its rows, or how the "
                "tokenizer of model.hf_path renders them, have changed; put them back, or start a new run"
            )
        return replace(self, data=digest)

    @property
    def skipped(self) -> int:
        """Iterations of the stage's plan that it skipped, so that iteration i is number i + skipped of the plan."""
        return int(self.pace.get("skipped", 0))

    def last_step(self, stages: Sequence[Stage]) -> int:
        """The step after which the stage is over, as far as is known now."""
        return stage_length(stages[self.stage]) - self.skipped

    def to_dict(self) -> dict[str, Any]:
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}

    def global_step(self, stages: Sequence[Stage]) -> int:
        """Position on the step axis, which counts on over all stages and knows no step that was skipped."""
        return sum(stage_length(stage) for stage in stages[: self.stage]) - self.skipped_before + self.step


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value


def stage_length(stage: Stage) -> int:
    """Steps of a stage's plan: optimizer steps of SFT, iterations of RL."""
    return stage.steps if isinstance(stage, SftStage) else stage.iterations


def stage_label(stages: Sequence[Stage], index: int) -> str:
    """`sft` or `rl`; numbered from 1 where a run has several of the kind: `rl2`."""
    return stage_labels([stage.kind for stage in stages])[index]


def stage_labels(kinds: Sequence[str]) -> list[str]:
    """`stage_label` of every stage, by the kinds of all."""
    return [
        kind if kinds.count(kind) == 1 else f"{kind}{kinds[: index + 1].count(kind)}"
        for index, kind in enumerate(kinds)
    ]

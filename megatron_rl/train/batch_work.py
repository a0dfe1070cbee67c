"""The rollouts of one iteration, made round after round: work that can be kept in a checkpoint and gone on with.

Held by the driving rank alone. A round is one call of the collector, so its groups come from one version of weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Protocol

from megatron_rl.data.types import Prompt, RolloutGroup
from megatron_rl.recipe.stages import RlStage
from megatron_rl.rollout.collect import Span
from megatron_rl.train.groups import Collected, collect_groups
from megatron_rl.train.rl_data import RlData
from megatron_rl.train.round_sampler import with_stragglers


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Iteration `iteration` of a stage (from 0), which is number `planned` of its plan: see data.promotion."""

    iteration: int
    planned: int


class Sampler(Protocol):
    """What is asked of a `RoundSampler`."""

    def num_fresh(self, tally: Counter[str]) -> int: ...

    def sample(
        self, prompts: Sequence[Prompt], iteration: int, span: Span, tally: Counter[str]
    ) -> list[RolloutGroup]: ...


class BatchWork:
    """Call it for the whole batch; called again, after a loss or a resume, it goes on with the round at hand."""

    def __init__(
        self,
        place: Place,
        stage: RlStage,
        data: RlData,
        sampler: Sampler,
        *,
        rounds: Sequence[Sequence[RolloutGroup]] = (),
        tally: Mapping[str, int] | None = None,
    ) -> None:
        """`rounds` and their `tally` are those that an earlier start made, with draws before the data's cursor."""
        self.place = place
        self.rounds: list[Sequence[RolloutGroup]] = [*rounds]
        self.tally: Counter[str] = Counter(tally)
        self._stage, self._data, self._sampler = stage, data, sampler
        self._drawn: list[Prompt] | None = None  # of the round at hand

    def __call__(self, span: Span) -> Collected:
        """Raises what engine and graders raise; what was made until then is kept."""
        numbers = count()
        collected = collect_groups(
            lambda: self._round(next(numbers), span),
            self._stage,
            pool_size=self._data.sampler.pool_size(self.place.planned),
        )
        return with_stragglers(collected, self.tally, self._stage)

    def _round(self, number: int, span: Span) -> Sequence[RolloutGroup]:
        if number == len(self.rounds):
            if self._drawn is None:
                # drawn is drawn, whether the prompts are trained on or not
                self._drawn = self._data.sampler.take(self.place.planned, self._sampler.num_fresh(self.tally))
            self.rounds.append(self._sampler.sample(self._drawn, self.place.iteration, span, self.tally))
            self._drawn = None
        return self.rounds[number]

    @property
    def num_groups(self) -> int:
        return sum(map(len, self.rounds))


def with_staleness(collected: Collected, versions: Sequence[int]) -> Collected:
    """With how many transfers old the weights were that sampled each token; `versions` were transferred, in order.

    0 for those that the trainer has as it begins to train on them.
    """
    age = {version: len(versions) - 1 - index for index, version in enumerate(versions)}
    lengths: dict[int, int] = {}
    for group in collected.groups:
        for rollout in group.rollouts:
            for tokens, version in rollout.completion.runs:
                lengths[age[version]] = lengths.get(age[version], 0) + tokens
    total = sum(lengths.values())
    mean = sum(old * tokens for old, tokens in lengths.items()) / total if total else 0.0
    metrics = {"rollout/staleness_mean": mean, "rollout/staleness_max": float(max(lengths, default=0))}
    return replace(collected, metrics={**collected.metrics, **metrics})

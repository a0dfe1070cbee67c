"""The rollouts of one iteration, made round after round: work that can be kept in a checkpoint and gone on with.

Held by the driving rank alone. A round is one call of the collector, so its groups come from one version of weights.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from megatron_rl.data.types import Completion, Finish, Prompt, RewardResult, Rollout, RolloutGroup, Verdict
from megatron_rl.errors import CheckpointError
from megatron_rl.recipe.amounts import prompts_drawn
from megatron_rl.recipe.stages import RlStage
from megatron_rl.rollout.collect import Span
from megatron_rl.train.groups import Collected, collect_groups
from megatron_rl.train.rl_data import RlData

Rounds = list[Sequence[RolloutGroup]]
# prompts, number of the iteration (from 0), where time goes: the graded groups
Sample = Callable[[Sequence[Prompt], int, Span], list[RolloutGroup]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Iteration `iteration` of a stage (from 0), which is number `planned` of its plan: see data.promotion."""

    iteration: int
    planned: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """A batch that a checkpoint holds; `versions` of weights were transferred until then, in order."""

    place: Place
    rounds: Rounds
    versions: Sequence[int]


class BatchWork:
    """Call it for the whole batch; called again, after a loss or a resume, it goes on with the round at hand."""

    def __init__(
        self, place: Place, stage: RlStage, data: RlData, sample: Sample, *, rounds: Rounds | None = None
    ) -> None:
        """`rounds` are those that an earlier start made; its draws are behind the data's cursor already."""
        self.place = place
        self.rounds: Rounds = [] if rounds is None else rounds
        self._stage, self._data, self._sample = stage, data, sample
        self._drawn: list[Prompt] | None = None  # of the round at hand

    def __call__(self, span: Span) -> Collected:
        """Raises what engine and graders raise; what was made until then is kept."""
        numbers = count()
        sampler = self._data.sampler
        return collect_groups(
            lambda: self._round(next(numbers), span),
            self._stage,
            pool_size=sampler.pool_size(self.place.planned),
        )

    def _round(self, number: int, span: Span) -> Sequence[RolloutGroup]:
        if number == len(self.rounds):
            if self._drawn is None:
                # drawn is drawn, whether the prompts are trained on or not
                self._drawn = self._data.sampler.take(self.place.planned, prompts_drawn(self._stage))
            self.rounds.append(self._sample(self._drawn, self.place.iteration, span))
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
            old = age[rollout.completion.weight_version]
            lengths[old] = lengths.get(old, 0) + len(rollout.completion.token_ids)
    total = sum(lengths.values())
    mean = sum(old * tokens for old, tokens in lengths.items()) / total if total else 0.0
    metrics = {"rollout/staleness_mean": mean, "rollout/staleness_max": float(max(lengths, default=0))}
    return replace(collected, metrics={**collected.metrics, **metrics})


def rounds_to_bytes(work: BatchWork, versions: Sequence[int]) -> bytes:
    """What a checkpoint keeps of a batch that is ready, JSON; `versions` of weights were transferred, in order."""
    oldest = min(
        (r.completion.weight_version for one in work.rounds for g in one for r in g.rollouts), default=-1
    )
    kept = {
        **asdict(work.place),
        "versions": [version for version in versions if version >= oldest],
        "rounds": [[_group_to_json(group) for group in one] for one in work.rounds],
    }
    return json.dumps(kept).encode()


def rounds_from_bytes(
    content: bytes, prompts: Mapping[str, Prompt], token_ids: Mapping[str, Sequence[int]], *, where: Path
) -> Kept:
    """The inverse. `prompts` and `token_ids` are those of the stage, by id.

    Raises CheckpointError, naming the file `where`, for what another stage, data or program wrote.
    """
    try:
        kept = json.loads(content)
        return Kept(
            place=Place(iteration=kept["iteration"], planned=kept["planned"]),
            rounds=[[_group_from_json(group, prompts, token_ids) for group in one] for one in kept["rounds"]],
            versions=kept["versions"],
        )
    except (ValueError, KeyError, TypeError) as fault:
        raise CheckpointError(
            f"{where}: does not hold rollouts of this stage's prompts ({type(fault).__name__}: {fault}); resume with "
            "the data and the program that the checkpoint was written with, or from an older checkpoint"
        ) from None


def _group_to_json(group: RolloutGroup) -> dict[str, Any]:
    return {"prompt": group.prompt.id, "rollouts": [_rollout_to_json(rollout) for rollout in group.rollouts]}


def _rollout_to_json(rollout: Rollout) -> dict[str, Any]:
    completion, reward = rollout.completion, rollout.reward
    return {
        "sample_index": rollout.sample_index,
        "text": rollout.text,
        "completion": {**asdict(completion), "finish": completion.finish.value},
        "reward": {**asdict(reward), "parts": dict(reward.parts), "verdict": reward.verdict.value},
    }


def _group_from_json(
    kept: Mapping[str, Any], prompts: Mapping[str, Prompt], token_ids: Mapping[str, Sequence[int]]
) -> RolloutGroup:
    prompt = prompts[kept["prompt"]]
    rollouts = [
        Rollout(
            prompt=prompt,
            prompt_token_ids=token_ids[prompt.id],
            sample_index=one["sample_index"],
            completion=Completion(**{**one["completion"], "finish": Finish(one["completion"]["finish"])}),
            text=one["text"],
            reward=RewardResult(**{**one["reward"], "verdict": Verdict(one["reward"]["verdict"])}),
        )
        for one in kept["rollouts"]
    ]
    return RolloutGroup(prompt=prompt, rollouts=rollouts)

"""Rollouts that are made and not trained on yet, as a file of a checkpoint: every number as it was, prompts by id."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_rl.data.types import Completion, Finish, Prompt, RewardResult, Rollout, RolloutGroup, Verdict
from megatron_rl.errors import CheckpointError
from megatron_rl.rollout.open_groups import OpenGroup
from megatron_rl.train.batch_work import BatchWork, Place


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """A batch that a checkpoint holds, and the groups that are gone on with after it.

    `versions` of weights were transferred until then, in order.
    """

    place: Place
    rounds: Sequence[Sequence[RolloutGroup]]
    tally: Mapping[str, int]
    versions: Sequence[int]
    open_groups: Sequence[OpenGroup] = ()


def rollouts_to_bytes(
    work: BatchWork, versions: Sequence[int], open_groups: Sequence[OpenGroup] = ()
) -> bytes:
    """What a checkpoint keeps of a batch that is ready, JSON; see Kept."""
    kept = {
        **asdict(work.place),
        "rounds": [[_group_to_json(group) for group in one] for one in work.rounds],
        "tally": dict(work.tally),
        "versions": list(versions),
        "open_groups": [_open_to_json(group) for group in open_groups],
    }
    return json.dumps(kept).encode()


def rollouts_from_bytes(
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
            tally=kept["tally"],
            versions=kept["versions"],
            open_groups=[_open_from_json(group, prompts, token_ids) for group in kept["open_groups"]],
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
        "completion": _completion_to_json(completion),
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
            completion=_completion_from_json(one["completion"]),
            text=one["text"],
            reward=RewardResult(**{**one["reward"], "verdict": Verdict(one["reward"]["verdict"])}),
        )
        for one in kept["rollouts"]
    ]
    return RolloutGroup(prompt=prompt, rollouts=rollouts)


def _open_to_json(group: OpenGroup) -> dict[str, Any]:
    parts = [None if part is None else _completion_to_json(part) for part in group.parts]
    return {"prompt": group.prompt.id, "parts": parts}


def _open_from_json(
    kept: Mapping[str, Any], prompts: Mapping[str, Prompt], token_ids: Mapping[str, Sequence[int]]
) -> OpenGroup:
    prompt = prompts[kept["prompt"]]
    parts = tuple(None if part is None else _completion_from_json(part) for part in kept["parts"])
    return OpenGroup(prompt=prompt, prompt_token_ids=token_ids[prompt.id], parts=parts)


def _completion_to_json(completion: Completion) -> dict[str, Any]:
    return {**asdict(completion), "finish": completion.finish.value}


def _completion_from_json(kept: Mapping[str, Any]) -> Completion:
    runs = tuple((tokens, version) for tokens, version in kept["version_runs"])
    return Completion(**{**kept, "finish": Finish(kept["finish"]), "version_runs": runs})

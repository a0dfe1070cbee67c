"""Re-scoring before a stage: the pass rate of every prompt under the policy that the stage begins with.

The rates are a file of the run directory, and its digest is part of every later checkpoint of the stage. Seeds are
functions of stage, prompt and sample alone: a run that is ended before the first checkpoint measures the same again,
except for prompts that it had measured with the very same weights.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from megatron_rl.data.types import RolloutGroup
from megatron_rl.errors import CheckpointError
from megatron_rl.model.checkpoint_files import STATE_FILE, find_latest
from megatron_rl.model.checkpoint_match import flat_recipe
from megatron_rl.recipe.batch import RescoreConfig
from megatron_rl.recipe.schema import Recipe
from megatron_rl.train.files import append_whole, read_jsonl, to_json, write_atomically, writing

RESCORE = "rescore"


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptScore:
    """`pass_rate` is the share of correct answers among the `samples` that the grader judged."""

    id: str
    pass_rate: float
    samples: int
    truncated_frac: float
    dropped: str = ""  # why: above, below, ungraded; empty for a prompt that stays


@dataclass(frozen=True, kw_only=True, slots=True)
class Rescored:
    """Every prompt of the stage, in file order."""

    scores: Sequence[PromptScore]

    @property
    def rates(self) -> dict[str, float]:
        """Pass rate by id of each prompt that stays."""
        return {score.id: score.pass_rate for score in self.scores if not score.dropped}

    def metrics(self) -> dict[str, float]:
        dropped = Counter(score.dropped for score in self.scores)
        return {
            "rescore/prompts": float(len(self.scores)),
            "rescore/kept": float(dropped[""]),
            "rescore/pass_rate_mean": fmean(score.pass_rate for score in self.scores),
            "rescore/truncated_frac": fmean(score.truncated_frac for score in self.scores),
            **{f"rescore/dropped_{why}": float(dropped[why]) for why in ("above", "below", "ungraded")},
        }

    def __str__(self) -> str:
        numbers = self.metrics()
        reasons = [f"{numbers[f'rescore/dropped_{why}']:.0f} {why}" for why in ("above", "below", "ungraded")]
        return (
            f"re-scored {len(self.scores)} prompts: mean pass rate {numbers['rescore/pass_rate_mean']:.3f}, "
            f"{numbers['rescore/truncated_frac']:.3f} truncated; dropped {', '.join(reasons)}; "
            f"{numbers['rescore/kept']:.0f} are left"
        )


def score_group(group: RolloutGroup, config: RescoreConfig) -> PromptScore:
    """Rollouts whose grader failed say nothing; a prompt of which all did is dropped as ungraded."""
    judged = [rollout for rollout in group.rollouts if rollout.reward.verdict.is_usable()]
    rate = fmean(rollout.reward.verdict.is_correct() for rollout in judged) if judged else 0.0
    return PromptScore(
        id=group.prompt.id,
        pass_rate=rate,
        samples=len(judged),
        truncated_frac=fmean(rollout.completion.finish.is_truncated() for rollout in group.rollouts),
        dropped=why_dropped(rate, len(judged), config),
    )


def why_dropped(pass_rate: float, samples: int, config: RescoreConfig) -> str:
    """See `PromptScore.dropped`; `samples` are those that the grader judged."""
    if samples == 0:
        return "ungraded"
    if pass_rate > config.drop_above:
        return "above"
    return "below" if pass_rate < config.drop_below else ""


class PartialScores:
    """Scores of the first prompts of a stage, kept in a file until all of them are there and enough prompts stay.

    `key` stands for everything that decides a pass rate: weights, data, sampling, rewards. A file of another key is not
    used; without a key, where it cannot be told, nothing is kept. The limits of `config` may change in between.
    """

    def __init__(self, run_dir: Path, label: str, key: str | None, config: RescoreConfig) -> None:
        self._path = run_dir / RESCORE / f"{label}.partial.jsonl"
        self._key = key
        found = read_jsonl(self._path) if key is not None else []
        is_ours = bool(found) and found[0].get("key") == key
        scores = [PromptScore(**line) for line in found[1:]] if is_ours else []
        self.scores = tuple(
            replace(one, dropped=why_dropped(one.pass_rate, one.samples, config)) for one in scores
        )
        if key is not None:
            # without a last line that was cut off
            lines = [{"key": key}, *map(asdict, self.scores)]
            with writing(self._path):
                write_atomically(self._path, b"".join(to_json(line) + b"\n" for line in lines))

    def add(self, scores: Sequence[PromptScore]) -> None:
        if self._key is not None:
            content = b"".join(to_json(asdict(score)) + b"\n" for score in scores)
            with writing(self._path), self._path.open("ab", buffering=0) as stream:
                append_whole(stream, content)

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)


def weights_key(checkpoints: Path, *, stage: int, recipe: Recipe, data: str) -> str | None:
    """What decides the scores of stage number `stage` before its first iteration; `data` is the digest of its prompts.

    Its weights are those of the checkpoint at the end of the stage before, or those that the recipe starts from. None
    where that checkpoint was not saved.
    """
    flat = flat_recipe(recipe)
    own = tuple(
        f"stages.{stage}.{key}" for key in ("sampling.", "rewards.", "grader.", "sandbox", "rescore.samples")
    )
    decisive = {key: flat[key] for key in sorted(flat) if key.startswith(("run.seed", "model.", *own))}
    parts = [json.dumps(decisive), data]
    if stage > 0:
        saved = find_latest(checkpoints)
        if saved is None or saved.progress["stage"] != stage - 1:
            return None
        # it holds the digest of every file of the checkpoint
        parts.append(hashlib.sha256((saved.path / STATE_FILE).read_bytes()).hexdigest())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def write_rescored(run_dir: Path, label: str, rescored: Rescored) -> dict[str, Any]:
    """Write rescore/LABEL.jsonl; what a checkpoint keeps of it: the file and its sha256."""
    name = f"{RESCORE}/{label}.jsonl"
    content = b"".join(to_json(asdict(score)) + b"\n" for score in rescored.scores)
    with writing(run_dir / name):
        (run_dir / RESCORE).mkdir(exist_ok=True)
        write_atomically(run_dir / name, content)
    return {"file": name, "sha256": hashlib.sha256(content).hexdigest()}


def read_rescored(run_dir: Path, record: Mapping[str, Any]) -> Rescored:
    """What `write_rescored` wrote. Raises CheckpointError unless it is there to the byte."""
    path = run_dir / record["file"]
    advice = "put back the file that the run wrote, or start a new run"
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be read ({error}), but the checkpoint needs the pass rates; {advice}"
        ) from None
    if (digest := hashlib.sha256(content).hexdigest()) != record["sha256"]:
        raise CheckpointError(
            f"{path}: has sha256 {digest}, but the checkpoint was saved with {record['sha256']}; {advice}"
        )
    return Rescored(scores=tuple(PromptScore(**json.loads(line)) for line in content.splitlines()))

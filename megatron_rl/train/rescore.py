"""Re-scoring before a stage: the pass rate of every prompt under the policy that the stage begins with.

The rates are a file of the run directory, and its digest is part of every later checkpoint of the stage. Seeds are
functions of stage, prompt and sample alone: a run that is ended before the first checkpoint measures the same again.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from megatron_rl.data.types import RolloutGroup
from megatron_rl.errors import CheckpointError
from megatron_rl.recipe.batch import RescoreConfig
from megatron_rl.train.files import to_json, write_atomically, writing

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
    dropped = ""
    if not judged:
        dropped = "ungraded"
    elif rate > config.drop_above:
        dropped = "above"
    elif rate < config.drop_below:
        dropped = "below"
    return PromptScore(
        id=group.prompt.id,
        pass_rate=rate,
        samples=len(judged),
        truncated_frac=fmean(rollout.completion.finish.is_truncated() for rollout in group.rollouts),
        dropped=dropped,
    )


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

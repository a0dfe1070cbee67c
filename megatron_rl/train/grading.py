"""What is worth a word about the verdicts of an iteration: no answer in any response, golds that are none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.data.types import RolloutGroup, Verdict
from megatron_rl.train.files import read_jsonl, to_json, writing

BAD_GOLDS_FILE = "bad_golds.jsonl"


def unanswered_notice(groups: Sequence[RolloutGroup]) -> str:
    """One line where not a single response held an answer: a flat zero that training cannot leave; else nothing."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    verdicts = Counter(rollout.reward.verdict for rollout in rollouts)
    empty = verdicts[Verdict.NO_ANSWER] + verdicts[Verdict.TRUNCATED]
    if not rollouts or empty < len(rollouts):
        return ""
    reasons = Counter(rollout.reward.reason for rollout in rollouts)
    return (
        f"warning: none of {len(rollouts)} responses holds an answer ({verdicts[Verdict.TRUNCATED]} cut off; most "
        f"often: {reasons.most_common(1)[0][0] or 'no reason given'}); look at rollouts/, the chat template, "
        "sampling.max_response_tokens and grader.reasoning"
    )


class BadGolds:
    """`bad_golds.jsonl` of a run: each prompt whose gold is no answer, once by id. Such prompts are not trained on."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / BAD_GOLDS_FILE
        self._known = {str(line["id"]) for line in read_jsonl(self._path)}

    def note(self, groups: Sequence[RolloutGroup]) -> int:
        """Append what is new; how many that were."""
        lines = []
        for group in groups:
            bad = [r.reward for r in group.rollouts if r.reward.verdict is Verdict.BAD_GOLD]
            if bad and group.prompt.id not in self._known:
                self._known.add(group.prompt.id)
                gold = repr(group.prompt.answer)[:200]
                lines.append(to_json({"id": group.prompt.id, "gold": gold, "reason": bad[0].reason}) + b"\n")
        if lines:
            with writing(self._path), self._path.open("ab") as stream:
                stream.write(b"".join(lines))
        return len(lines)

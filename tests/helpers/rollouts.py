"""Made-up rollouts with chosen verdicts, for tests of what happens after grading."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_rl.data.types import Completion, Finish, Prompt, RewardResult, Rollout, RolloutGroup, Verdict


def group(name: str, verdicts: Sequence[Verdict], *, response_tokens: int = 3) -> RolloutGroup:
    """One prompt of two tokens; rollout i got `verdicts[i]` and a reward of 1 for correct, 0 otherwise."""
    prompt = Prompt(id=name, messages=[{"role": "user", "content": name}], answer="1")
    rollouts = [
        Rollout(
            prompt=prompt,
            prompt_token_ids=[1, 2],
            sample_index=index,
            completion=Completion(
                token_ids=[3] * response_tokens,
                logprobs=[-0.5] * response_tokens,
                finish=Finish.STOP,
                weight_version=7,
            ),
            text="x",
            reward=RewardResult(
                score=float(verdict.is_correct()),
                parts={"math_answer": float(verdict.is_correct())},
                verdict=verdict,
                task_score=float(verdict.is_correct()),
            ),
        )
        for index, verdict in enumerate(verdicts)
    ]
    return RolloutGroup(prompt=prompt, rollouts=rollouts)

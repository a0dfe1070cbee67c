"""Which samples of a problem gave the same answer: classes by the grader's own comparison, for cons@k.

Two spellings are one answer where the reward that grades would take one for the gold of the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_rl.data.types import RolloutGroup
from megatron_rl.evaluation.result import NO_ANSWER
from megatron_rl.rewards.combine import RewardModel
from megatron_rl.rewards.extract import extract_answer
from megatron_rl.rewards.protocol import RewardInput

# rewards whose answers can be compared with each other; programs that pass the same tests need not be equal
VOTING_REWARDS = ("math_answer",)


@dataclass(frozen=True, kw_only=True, slots=True)
class Vote:
    """Classes of equal answers of one problem, largest first, with whether the grader calls each right."""

    sizes: tuple[int, ...]
    correct: tuple[bool, ...]


@dataclass(slots=True)
class _Spelling:
    """An answer as it was written: so many samples wrote it, so many of those were graded correct."""

    num_samples: int = 0
    num_correct: int = 0


@dataclass(slots=True)
class _Ballot:
    """One problem under way: spellings that no class has yet, and the classes, each with its first spelling."""

    open: dict[str, _Spelling] = field(default_factory=dict)
    classes: list[_Spelling] = field(default_factory=list)


def take_votes(groups: Sequence[RolloutGroup], grader: RewardModel) -> list[Vote | None]:
    """One vote per group, None where the reward's answers cannot be compared.

    A sample without an answer, or with one that the grader would not take for a gold, forms no class. Answers are
    compared with the first spelling of each class, as gold, in the order in which they came.
    """
    if grader.judge not in VOTING_REWARDS:
        return [None] * len(groups)
    ballots = [_ballot(group) for group in groups]
    waiting = [ballot for ballot in ballots if ballot.open]
    while waiting:
        # one class of every problem in one batch: graders work on several answers at once
        pairs = [(next(iter(ballot.open)), answer) for ballot in waiting for answer in ballot.open]
        verdicts = iter(grader.grade([_as_response(gold, answer) for gold, answer in pairs]))
        for ballot in waiting:
            _close_class(ballot, [next(verdicts).verdict.is_correct() for _ in ballot.open])
        waiting = [ballot for ballot in waiting if ballot.open]
    return [_counted(ballot) for ballot in ballots]


def _ballot(group: RolloutGroup) -> _Ballot:
    ballot = _Ballot()
    for rollout in group.rollouts:
        verdict = rollout.reward.verdict
        answer = extract_answer(rollout.text) if verdict.value not in NO_ANSWER else None
        if answer is None or not answer.strip():
            continue
        spelling = ballot.open.setdefault(answer.strip(), _Spelling())
        spelling.num_samples += 1
        spelling.num_correct += verdict.is_correct()
    return ballot


def _as_response(gold: str, answer: str) -> RewardInput:
    """`answer` as a response of its own; reasoning that is closed, whatever the grader asks of it."""
    return RewardInput(answer=[gold], text=f"<think>\n</think>\n\\boxed{{{answer}}}")


def _close_class(ballot: _Ballot, is_same: Sequence[bool]) -> None:
    """Take the first open spelling out with all that equal it; on its own terms no answer, it forms no class."""
    first, *_ = is_same
    members = [answer for answer, same in zip(ballot.open, is_same, strict=True) if same]
    if not first:
        del ballot.open[next(iter(ballot.open))]
        return
    whole = _Spelling()
    for answer in members:
        spelling = ballot.open.pop(answer)
        whole.num_samples += spelling.num_samples
        whole.num_correct += spelling.num_correct
    ballot.classes.append(whole)


def _counted(ballot: _Ballot) -> Vote:
    classes = sorted(ballot.classes, key=lambda one: -one.num_samples)
    return Vote(
        sizes=tuple(one.num_samples for one in classes),
        # members may be graded apart where a comparison ran out of time
        correct=tuple(2 * one.num_correct > one.num_samples for one in classes),
    )

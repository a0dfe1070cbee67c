"""Evaluation of one set, the one path of `megatron-rl eval` and of evaluations during RL.

Samples come from the collector that training uses, verdicts from its rewards. Every number of a problem is taken
as its samples arrive, so that no more than one call's worth of them is held.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from megatron_rl.data.prompts import PromptSet
from megatron_rl.data.seeds import derive_seed
from megatron_rl.data.types import Finish, Prompt, RolloutGroup
from megatron_rl.errors import EngineError
from megatron_rl.evaluation.result import EvalProblem, EvalResult
from megatron_rl.evaluation.statistics import consensus
from megatron_rl.evaluation.votes import Vote, take_votes
from megatron_rl.rewards.combine import RewardModel
from megatron_rl.rollout.collect import Draw

Collect = Callable[[Sequence[Prompt], Mapping[str, Sequence[int]], Draw], list[RolloutGroup]]

_ROUNDS_PER_CALL = 4  # how often the engines' sequences are filled by one call


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalPlan:
    """How each problem is sampled, and what is reported of it."""

    samples: int  # of each problem, the k of avg@k
    run_seed: int
    max_tokens: int  # of a response
    temperature: float
    top_p: float = 1.0
    top_k: int = -1
    pass_at: tuple[int, ...] = ()
    problems_per_call: int  # asked of the engines at once

    def draw(self, set_name: str) -> Draw:
        """Seeds are functions of run seed, set, problem and sample: evaluations differ by the weights alone."""
        return Draw(
            samples=self.samples,
            seed=partial(derive_seed, self.run_seed, "eval", set_name),
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            every_test=True,
        )


def problems_per_call(*, samples: int, max_concurrent: int, replicas: int) -> int:
    """So many problems that a call fills the engines' sequences a few times: their last ones leave little idle."""
    return max(1, _ROUNDS_PER_CALL * max_concurrent * replicas // samples)


def evaluate(
    name: str,
    problems: PromptSet,
    plan: EvalPlan,
    *,
    collect: Collect,
    grader: RewardModel,
    iteration: int = 0,
    weight_version: int = -1,
    arrived: Callable[[Sequence[RolloutGroup]], None] = lambda groups: None,
) -> EvalResult:
    """Sample and grade every problem of the set; `arrived` gets the groups of each call.

    The denominator is fixed: raises EngineError if a sample is missing after it was asked for twice.
    """
    draw = plan.draw(name)
    found: list[EvalProblem] = []
    for first in range(0, len(problems.prompts), plan.problems_per_call):
        prompts = problems.prompts[first : first + plan.problems_per_call]
        groups = _all_samples(name, prompts, draw, partial(collect, prompts, problems.token_ids, draw))
        votes = take_votes(groups, grader)
        found += [_problem(group, vote) for group, vote in zip(groups, votes, strict=True)]
        arrived(groups)
    return EvalResult(
        name=name,
        iteration=iteration,
        samples=plan.samples,
        weight_version=weight_version,
        pass_at=plan.pass_at,
        problems=tuple(found),
    )


def _all_samples(
    name: str, prompts: Sequence[Prompt], draw: Draw, ask: Callable[[], list[RolloutGroup]]
) -> list[RolloutGroup]:
    groups = ask()
    if _missing(groups, draw.samples):
        groups = ask()
    missing = _missing(groups, draw.samples)
    if missing or len(groups) != len(prompts):
        problem = missing[0].prompt.id if missing else prompts[len(groups) - 1].id
        raise EngineError(
            f"eval {name}: samples of {max(1, len(missing))} problems did not arrive (the first is problem "
            f"{problem!r}), asked for twice; each has to have {draw.samples}, or the numbers mean something "
            f"else: read the engine's log"
        )
    return groups


def _missing(groups: Sequence[RolloutGroup], samples: int) -> list[RolloutGroup]:
    """Groups that are short of a sample, or hold one that the engine gave up."""
    return [
        group
        for group in groups
        if len(group.rollouts) != samples
        or any(rollout.completion.finish is Finish.ABORT for rollout in group.rollouts)
    ]


def _problem(group: RolloutGroup, vote: Vote | None) -> EvalProblem:
    rollouts = group.rollouts
    return EvalProblem(
        id=group.prompt.id,
        difficulty=group.prompt.difficulty,
        num_correct=sum(rollout.reward.verdict.is_correct() for rollout in rollouts),
        num_samples=len(rollouts),
        num_truncated=sum(rollout.completion.finish.is_truncated() for rollout in rollouts),
        verdicts=dict(Counter(rollout.reward.verdict.value for rollout in rollouts)),
        answer_classes=vote.sizes if vote is not None else (),
        consensus=consensus(vote.sizes, vote.correct) if vote is not None else None,
        response_tokens=tuple(len(rollout.completion.token_ids) for rollout in rollouts),
    )

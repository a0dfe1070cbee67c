"""From prompts to graded groups, the one path for training rollouts and evaluation alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.data.types import Completion, Prompt, RewardResult, Rollout, RolloutGroup
from megatron_rl.errors import TrainingError
from megatron_rl.rewards.protocol import RewardInput
from megatron_rl.rollout.engine import GenerateRequest, RolloutEngine
from megatron_rl.rollout.open_groups import OpenGroup, go_on

Span = Callable[[str], AbstractContextManager[None]]


class Grader(Protocol):
    """A `RewardModel`, or one seen through a mapping."""

    def grade(self, inputs: Sequence[RewardInput]) -> list[RewardResult]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """How to sample: `samples` completions per prompt, the seed of each a function of prompt id and sample index."""

    samples: int
    seed: Callable[[str, int], int]
    max_tokens: int
    temperature: float
    top_p: float = 1.0
    top_k: int = -1
    every_test: bool = False  # grade by all tests of a problem, not by those that training draws


class Collector:
    """Engine, tokenizer and graders together; lives on the driving rank alone."""

    def __init__(
        self,
        engine: RolloutEngine,
        grader: Grader,
        tokenizer: Tokenizer,
        *,
        stop_token_ids: Sequence[int],
    ) -> None:
        self._engine, self._grader, self._tokenizer = engine, grader, tokenizer
        self._stop_token_ids = tuple(stop_token_ids)

    def collect(
        self,
        prompts: Sequence[Prompt],
        token_ids: Mapping[str, Sequence[int]],
        draw: Draw,
        *,
        weight_version: int,
        span: Span,
    ) -> list[RolloutGroup]:
        """One group per prompt, in order. `token_ids` holds the rendered ids by prompt id.

        `weight_version` is the one that the engine was given last: raises TrainingError for a completion of another.
        Time goes to the spans `generate` and `reward`.
        """
        requests = [
            self._request(prompt, token_ids[prompt.id], index, draw)
            for prompt in prompts
            for index in range(draw.samples)
        ]
        with span("generate"):
            completions = self._engine.generate(requests)
            _check_versions(completions, expected=weight_version)
        return self._graded(prompts, token_ids, completions, draw, span)

    def collect_first(
        self, groups: Sequence[OpenGroup], draw: Draw, *, needed: int, weight_version: int, span: Span
    ) -> tuple[list[RolloutGroup], list[OpenGroup]]:
        """The graded groups that are whole once `needed` of them are, in order, and what the others have by then.

        `draw` seeds what is sampled now, also behind tokens that are there. For the rest see `collect`.
        """

        def request(group: OpenGroup, index: int) -> GenerateRequest:
            return self._request(group.prompt, group.prompt_token_ids, index, draw)

        with span("generate"):
            check = partial(_check_versions, expected=weight_version)
            after = go_on(self._engine, groups, request, needed=needed, check=check)
        whole = [group for group in after if not group.unfinished]
        completions = [part for group in whole for part in group.parts if part is not None]
        token_ids = {group.prompt.id: group.prompt_token_ids for group in whole}
        graded = self._graded([group.prompt for group in whole], token_ids, completions, draw, span)
        return graded, [group for group in after if group.unfinished]

    def _graded(
        self,
        prompts: Sequence[Prompt],
        token_ids: Mapping[str, Sequence[int]],
        completions: Sequence[Completion],
        draw: Draw,
        span: Span,
    ) -> list[RolloutGroup]:
        """`completions` hold `draw.samples` for each prompt, in order."""
        with span("reward"):
            texts = [self._response_text(completion) for completion in completions]
            rewards = self._grader.grade(
                [
                    RewardInput(
                        answer=prompts[i // draw.samples].answer,
                        text=text,
                        finish=completion.finish,
                        prompt_id=prompts[i // draw.samples].id,
                        meta=prompts[i // draw.samples].meta,
                        every_test=draw.every_test,
                    )
                    for i, (text, completion) in enumerate(zip(texts, completions, strict=True))
                ]
            )
        rollouts = [
            Rollout(
                prompt=prompts[i // draw.samples],
                prompt_token_ids=token_ids[prompts[i // draw.samples].id],
                sample_index=i % draw.samples,
                completion=completion,
                text=texts[i],
                reward=rewards[i],
            )
            for i, completion in enumerate(completions)
        ]
        return [
            RolloutGroup(prompt=prompt, rollouts=rollouts[i * draw.samples : (i + 1) * draw.samples])
            for i, prompt in enumerate(prompts)
        ]

    def _request(self, prompt: Prompt, ids: Sequence[int], index: int, draw: Draw) -> GenerateRequest:
        return GenerateRequest(
            prompt_token_ids=ids,
            seed=draw.seed(prompt.id, index),
            max_tokens=draw.max_tokens,
            temperature=draw.temperature,
            top_p=draw.top_p,
            top_k=draw.top_k,
            stop_token_ids=self._stop_token_ids,
        )

    def _response_text(self, completion: Completion) -> str:
        ids = list(completion.token_ids)
        if ids and ids[-1] in self._stop_token_ids and not completion.finish.is_truncated():
            ids.pop()  # the end token is trained on, but it is no part of the answer
        return self._tokenizer.decode(ids)


def _check_versions(completions: Sequence[Completion], *, expected: int) -> None:
    stale = [i for i, completion in enumerate(completions) if completion.weight_version != expected]
    if stale:
        raise TrainingError(
            f"rollouts: {len(stale)} of {len(completions)} completions were sampled from weight version "
            f"{completions[stale[0]].weight_version} (the first is number {stale[0]}), but the trainer transferred "
            f"version {expected} last; rollouts of other weights are not trained on: read the engine's log around "
            f"that transfer"
        )

"""Rounds that do not wait for their longest responses: what is trained on, gone on with, too old, and counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from megatron_rl.data.types import Completion, Finish, Prompt, RewardResult, RolloutGroup, Verdict
from megatron_rl.errors import LostEngineError, TrainingError
from megatron_rl.recipe.batch import StragglersConfig
from megatron_rl.recipe.stages import OptimizerConfig, RlStage, SamplingConfig
from megatron_rl.rewards.protocol import RewardInput
from megatron_rl.rollout.collect import Collector, Draw
from megatron_rl.rollout.engine import GenerateRequest
from megatron_rl.rollout.open_groups import OpenGroup, joined
from megatron_rl.train.batch_work import with_staleness
from megatron_rl.train.groups import Collected
from megatron_rl.train.round_sampler import RoundSampler, with_stragglers

STAGE = RlStage(
    kind="rl", prompts="p.jsonl", rewards={"math_answer": 1.0}, iterations=9, prompts_per_iteration=4, group_size=2,
    tokens_per_microbatch=64, sampling=SamplingConfig(max_prompt_tokens=8, max_response_tokens=20),
    optimizer=OptimizerConfig(lr=1e-3), overlap="partial", stragglers=StragglersConfig(groups=0.75),
)  # fmt: skip
PROMPTS = [Prompt(id=f"p{i}", messages=[], answer="1") for i in range(12)]
TOKEN_IDS = {prompt.id: (100 + i,) for i, prompt in enumerate(PROMPTS)}


class Engine:
    """Counts: after a prompt [.., n] it samples n + 1, n + 2, ... with log-prob -version; a step adds a token to each.

    A response is over at the length that `lengths` gives for the first token of the prompt.
    """

    def __init__(self, lengths: dict[int, int]) -> None:
        self.lengths, self.version = lengths, 0
        self.asked: list[GenerateRequest] = []
        self.losses = 0  # how many calls of wait end with a loss
        self._running: dict[int, tuple[GenerateRequest, list[int]]] = {}

    @property
    def weight_version(self) -> int:
        return self.version

    def submit(self, requests: Sequence[GenerateRequest]) -> list[int]:
        tickets = [len(self.asked) + i for i in range(len(requests))]
        self.asked += requests
        self._running.update((t, (r, [])) for t, r in zip(tickets, requests, strict=True))
        return tickets

    def wait(
        self, tickets: Collection[int], *, count: int | None = None, timeout_s: float | None = None
    ) -> dict[int, Completion]:
        if self.losses:
            self.losses -= 1
            raise LostEngineError("engine replica 0: died")
        while True:
            for request, made in self._running.values():
                made.append([*request.prompt_token_ids, *made][-1] + 1)
            over = [t for t in tickets if self._is_over(*self._running[t])]
            if over:
                return {t: self._end(t, Finish.STOP) for t in over}

    def cancel(self, tickets: Collection[int]) -> dict[int, Completion]:
        return {ticket: self._end(ticket, Finish.ABORT) for ticket in tickets}

    @property
    def num_running(self) -> int:
        return len(self._running)

    def _is_over(self, request: GenerateRequest, made: Sequence[int]) -> bool:
        total = len(request.prompt_token_ids) - 1 + len(made)
        return total >= self.lengths.get(request.prompt_token_ids[0], 3)

    def _end(self, ticket: int, finish: Finish) -> Completion:
        _, made = self._running.pop(ticket)
        return Completion(
            token_ids=made,
            logprobs=[-float(self.version)] * len(made),
            finish=finish,
            weight_version=self.version,
        )


class Tokenizer:
    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))


class Grader:
    def grade(self, inputs: Sequence[RewardInput]) -> list[RewardResult]:
        return [RewardResult(score=1.0, parts={}, verdict=Verdict.CORRECT, task_score=1.0) for _ in inputs]


@contextmanager
def span(name: str) -> Iterator[None]:
    yield


class Rounds:
    """Rounds of one stage, one after each transfer."""

    def __init__(self, lengths: dict[int, int], stage: RlStage = STAGE) -> None:
        self.engine, self.stage = Engine(lengths), stage
        self.versions = [0]
        self.left = [*PROMPTS]
        collector: Any = Collector(self.engine, Grader(), Tokenizer(), stop_token_ids=())  # type: ignore[arg-type]
        self.sampler = RoundSampler(
            collector, stage, TOKEN_IDS, draw=self._draw, versions=lambda: self.versions
        )
        self.tally: Counter[str] = Counter()

    def _draw(self, iteration: int) -> Draw:
        return Draw(samples=2, seed=lambda _, i: 10 * iteration + i, max_tokens=20, temperature=1.0)

    def next(self, prompts: Sequence[Prompt] | None = None) -> list[RolloutGroup]:
        self.tally.clear()
        fresh = self.sampler.num_fresh(self.tally)
        drawn, self.left = (self.left[:fresh], self.left[fresh:]) if prompts is None else (prompts, self.left)
        return self.sampler.sample(drawn, len(self.versions) - 1, span, self.tally)

    def transfer(self) -> None:
        self.engine.version += 3
        self.versions.append(self.engine.version)


def names(groups: Sequence[RolloutGroup | OpenGroup]) -> list[str]:
    return [group.prompt.id for group in groups]


def test_a_round_ends_with_its_share_of_whole_groups_and_nothing_runs_on() -> None:
    rounds = Rounds({102: 9})
    groups = rounds.next()
    assert names(groups) == ["p0", "p1", "p3"] and names(rounds.sampler.open) == ["p2"]
    assert all(len(group.rollouts) == 2 for group in groups)
    assert rounds.engine.num_running == 0
    assert +rounds.tally == {"late_groups": 1, "late_rollouts": 2, "late_tokens": 6}


def test_what_was_late_goes_on_with_its_tokens_and_each_token_keeps_its_version() -> None:
    rounds = Rounds({102: 9}, replace(STAGE, stragglers=StragglersConfig(groups=0.75, max_staleness=3)))
    rounds.next()
    rounds.transfer()
    groups = rounds.next()
    assert rounds.sampler.num_fresh(Counter()) == 4 - len(rounds.sampler.open)
    # the three fresh ones are whole first, so that it is late once more
    assert names(groups) == ["p4", "p5", "p6"] and names(rounds.sampler.open) == ["p2"]
    rounds.transfer()
    rounds.engine.lengths.update({107: 9, 108: 15})
    third = rounds.next()
    assert names(third)[0] == "p2"
    completion = third[0].rollouts[0].completion
    # one response as if nobody had stopped it
    assert list(completion.token_ids) == [102 + i for i in range(1, 10)]
    assert completion.runs == ((3, 0), (3, 3), (3, 6)) and completion.weight_version == 0
    assert list(completion.logprobs) == [-0.0] * 3 + [-3.0] * 3 + [-6.0] * 3
    assert completion.finish is Finish.STOP and third[0].rollouts[0].prompt_token_ids == (102,)
    # it may not become longer than the others, and has a seed of its own each time
    asked = [request for request in rounds.engine.asked if request.prompt_token_ids[0] == 102]
    assert [(len(one.prompt_token_ids), one.max_tokens, one.seed) for one in asked[::2]] == [
        (1, 20, 0), (4, 17, 10), (7, 14, 20),
    ]  # fmt: skip


def test_a_sample_that_is_finished_waits_for_the_others_of_its_group() -> None:
    class Uneven(Engine):
        def _is_over(self, request: GenerateRequest, made: Sequence[int]) -> bool:
            return request.seed % 10 == 0 or super()._is_over(request, made)

    rounds = Rounds({102: 9})
    rounds.engine.__class__ = Uneven
    groups = rounds.next()
    assert names(groups) == ["p0", "p1", "p3"]
    (late,) = rounds.sampler.open
    assert late.unfinished == [1] and rounds.tally["late_rollouts"] == 1
    assert [part.finish for part in late.parts if part is not None] == [Finish.STOP, Finish.ABORT]


def test_groups_with_tokens_that_would_be_too_old_are_dropped_and_counted() -> None:
    rounds = Rounds({102: 20})
    rounds.next()
    rounds.transfer()
    # trained on after one more transfer: 2 by then, the most that is allowed
    assert names(rounds.next()) == ["p4", "p5", "p6"] and rounds.tally["stale_groups"] == 0
    rounds.transfer()
    rounds.next()
    assert rounds.tally["stale_groups"] == 1 and "p2" not in names(rounds.sampler.open)
    longer = Rounds({102: 20}, replace(STAGE, stragglers=StragglersConfig(groups=0.75, max_staleness=3)))
    for _ in range(3):
        longer.next()
        longer.transfer()
    assert names(longer.sampler.open) == ["p2"]


@pytest.mark.parametrize("overlap", ["none", "one_step"])
def test_without_partial_what_is_late_is_dropped_and_counted(overlap: Any) -> None:
    stage = replace(STAGE, overlap=overlap)
    rounds = Rounds({102: 9}, stage)
    groups = rounds.next()
    assert names(groups) == ["p0", "p1", "p3"] and rounds.sampler.open == []
    collected = with_stragglers(
        Collected(groups=groups, kept=groups, metrics={}, counts={}), rounds.tally, stage
    )
    assert collected.counts == {"dropped_late": 1, "dropped_stale": 0}
    assert collected.metrics["stragglers/late_tokens"] == 6


def test_staleness_is_that_of_each_token() -> None:
    rounds = Rounds({102: 9, 104: 9})
    rounds.next()
    rounds.transfer()
    rounds.engine.lengths[102] = 6
    rounds.engine.lengths[104] = 20
    groups = rounds.next()
    assert names(groups) == ["p2", "p5", "p6"]
    plain = Collected(groups=groups, kept=groups, metrics={}, counts={})
    rounds.transfer()
    metrics = with_staleness(plain, rounds.versions).metrics
    # of 6 rollouts two have 3 tokens of two transfers ago, all others are of one
    assert metrics == {"rollout/staleness_mean": (6 * 2 + 18) / 24, "rollout/staleness_max": 2.0}


def test_a_prompt_that_is_drawn_again_meanwhile_is_in_a_batch_once() -> None:
    rounds = Rounds({102: 9})
    rounds.next()
    rounds.transfer()
    groups = rounds.next([PROMPTS[2], PROMPTS[4], PROMPTS[5]])
    assert len(set(names(groups))) == len(groups)
    assert len(rounds.sampler.open[0].parts[0].token_ids) == 3  # type: ignore[union-attr]


def test_a_loss_leaves_what_is_open_as_it_was_and_nothing_running() -> None:
    rounds = Rounds({102: 9})
    rounds.next()
    rounds.transfer()
    before = [*rounds.sampler.open]
    rounds.engine.losses = 1
    with pytest.raises(LostEngineError):
        rounds.next([PROMPTS[4], PROMPTS[5], PROMPTS[6]])
    assert rounds.sampler.open == before and rounds.engine.num_running == 0
    assert names(rounds.next([PROMPTS[4], PROMPTS[5], PROMPTS[6]])) == ["p4", "p5", "p6"]


def test_tokens_of_another_version_than_was_transferred_end_the_run() -> None:
    rounds = Rounds({})
    rounds.engine.version = 1
    with pytest.raises(TrainingError, match="sampled from weight version 1"):
        rounds.next()


def test_a_request_that_was_ended_before_it_began_changes_nothing() -> None:
    nothing = Completion(token_ids=(), logprobs=(), finish=Finish.ABORT, weight_version=5)
    some = Completion(token_ids=(7,), logprobs=(-0.5,), finish=Finish.ABORT, weight_version=2)
    assert joined(None, nothing) is None
    assert joined(some, nothing) is some
    assert joined(None, some) is some


def test_parts_of_one_version_are_one_part() -> None:
    parts = [
        Completion(
            token_ids=[1] * tokens, logprobs=[-1.0] * tokens, finish=Finish.ABORT, weight_version=version
        )
        for tokens, version in ((2, 4), (3, 4), (1, 6), (1, 6))
    ]
    two = joined(parts[0], parts[1])
    assert two is not None and two.version_runs == () and two.runs == ((5, 4),)
    four = joined(joined(two, parts[2]), parts[3])
    assert four is not None and four.runs == ((5, 4), (2, 6)) and four.weight_version == 4

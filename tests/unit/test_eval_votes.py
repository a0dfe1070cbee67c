"""cons@k: samples vote in classes that the grader's own comparison forms, with real graders."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megatron_rl.data.types import Completion, Finish, Prompt, Rollout, RolloutGroup
from megatron_rl.evaluation.statistics import consensus
from megatron_rl.evaluation.votes import take_votes
from megatron_rl.rewards.combine import RewardModel
from megatron_rl.rewards.protocol import RewardInput


@pytest.fixture(scope="module")
def grader() -> Iterator[RewardModel]:
    with RewardModel({"math_answer": 1.0}, workers=1, timeout_s=20.0) as model:
        yield model


def group(grader: RewardModel, gold: str, *answers: str | None, texts: tuple[str, ...] = ()) -> RolloutGroup:
    """One sample per answer in a box (None: a sample that boxes nothing) and per text, graded for real."""
    responses = [
        "no idea" if answer is None else f"<think>so</think> \\boxed{{{answer}}}" for answer in answers
    ]
    responses += texts
    rewards = grader.grade([RewardInput(answer=gold, text=text) for text in responses])
    prompt = Prompt(id="p", messages=[{"role": "user", "content": "?"}], answer=gold)
    completion = Completion(token_ids=[1], logprobs=[0.0], finish=Finish.STOP, weight_version=-1)
    rollouts = [
        Rollout(
            prompt=prompt,
            prompt_token_ids=[1],
            sample_index=i,
            completion=completion,
            text=text,
            reward=reward,
        )
        for i, (text, reward) in enumerate(zip(responses, rewards, strict=True))
    ]
    return RolloutGroup(prompt=prompt, rollouts=rollouts)


def test_spellings_of_one_answer_are_one_class(grader):
    (vote,) = take_votes([group(grader, "1/2", "7", "0.5", "\\frac{1}{2}", "7", "\\dfrac12")], grader)
    assert vote is not None
    assert (vote.sizes, vote.correct) == ((3, 2), (True, False))


def test_answers_that_need_algebra_are_one_class(grader):
    (vote,) = take_votes([group(grader, "9", "(x+1)^2", "x^2+2x+1", "x^2+2x")], grader)
    assert vote is not None
    assert (vote.sizes, vote.correct) == ((2, 1), (False, False))


def test_leading_zeros_are_the_same_integer(grader):
    """Some files hold AIME answers as 025, others as 25."""
    (vote,) = take_votes([group(grader, "025", "25", "025", "52")], grader)
    assert vote is not None
    assert (vote.sizes, vote.correct) == ((2, 1), (True, False))


def test_a_sample_without_an_answer_forms_no_class(grader):
    texts = ("<think>never ends \\boxed{4}", "\\boxed{}", "\\boxed{ ... }", "\\boxed{4")
    (vote,) = take_votes([group(grader, "4", None, None, "4", texts=texts)], grader)
    assert vote is not None
    assert (vote.sizes, vote.correct) == ((1,), (True,))
    (none,) = take_votes([group(grader, "4", None, None)], grader)
    assert none is not None
    assert (none.sizes, consensus(none.sizes, none.correct)) == ((), 0.0)


def test_problems_vote_apart_and_in_order(grader):
    groups = [group(grader, "1", "1", "2", "2"), group(grader, "2", None), group(grader, "3", "3", "03", "1")]
    votes = take_votes(groups, grader)
    found = [(vote.sizes, consensus(vote.sizes, vote.correct)) for vote in votes if vote is not None]
    assert found == [((2, 1), 0.0), ((), 0.0), ((2, 1), 1.0)]


def test_a_shaping_reward_beside_it_changes_no_vote(grader):
    with RewardModel({"math_answer": 1.0, "format": 0.1}, workers=1, timeout_s=20.0) as shaped:
        assert shaped.judge == "math_answer"
        one = group(shaped, "1/2", "7", "0.5", "\\frac{1}{2}")
        assert take_votes([one], shaped) == take_votes([one], grader)


def test_votes_do_not_ask_an_answer_alone_for_the_reasoning_that_its_response_had():
    with RewardModel({"math_answer": 1.0}, workers=1, timeout_s=20.0, requires_reasoning=True) as strict:
        bare = "\\boxed{0.5}"
        (vote,) = take_votes([group(strict, "1/2", "0.5", "\\frac12", "7", texts=(bare,))], strict)
    assert vote is not None
    assert (vote.sizes, vote.correct) == ((2, 1), (True, False))

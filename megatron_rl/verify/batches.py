"""The global batch of a proof: the first one of SFT; for RL the first prompts with responses drawn from a seed."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

from megatron_rl.data.chat import render_prompt
from megatron_rl.data.curriculum import CurriculumSampler
from megatron_rl.data.prompts import load_prompts, stage_options
from megatron_rl.data.seeds import derive_seed
from megatron_rl.data.sft_data import load_sft_data
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.data.types import (
    Completion,
    Finish,
    Prompt,
    RewardResult,
    Rollout,
    RolloutGroup,
    TrainSample,
    Verdict,
)
from megatron_rl.recipe.algorithm import option
from megatron_rl.recipe.stages import AlgorithmConfig, RlStage, SftStage

_CLEAR = 0.2  # nats between a planted ratio and the clip: rounding must not carry a token across
_USUAL, _LOWEST = 0.2, 0.9


def sft_samples(stage: SftStage, tokenizer: Tokenizer, *, seed: int, index: int) -> list[TrainSample]:
    """Samples of the first optimizer step of stage `index` of a run with this seed."""
    data = load_sft_data(
        stage.data,
        tokenizer=tokenizer,
        max_sample_tokens=stage.max_sample_tokens,
        seed=derive_seed(seed, index, "samples"),
        columns=stage.columns,
    )
    return data.batch(0, stage.global_batch_size)


def rl_groups(
    stage: RlStage, tokenizer: Tokenizer, *, vocab_size: int, seed: int, index: int
) -> list[RolloutGroup]:
    """Groups of the first optimizer step: the run's own prompts, random responses, rewards of both kinds.

    Lengths run from one token to the longest allowed. Log-probs are 0: see `with_logprobs`.
    """
    load = load_prompts(
        stage.prompts,
        render=lambda messages: render_prompt(tokenizer, messages),
        **stage_options(stage),
    )
    sampler = CurriculumSampler(load.prompts, stage.curriculum, derive_seed(seed, index, "prompts"))
    prompts = sampler.take(0, stage.prompts_per_iteration // stage.updates_per_rollout)
    draw = random.Random(derive_seed(seed, index, "verify"))
    return [_group(prompt, load.token_ids[prompt.id], stage, vocab_size, draw) for prompt in prompts]


def _group(
    prompt: Prompt, prompt_ids: Sequence[int], stage: RlStage, vocab_size: int, draw: random.Random
) -> RolloutGroup:
    rollouts = []
    for number in range(stage.group_size):
        length = draw.randint(1, stage.sampling.max_response_tokens)
        # the first two differ, so that no group has equal rewards
        is_correct = number == 0 if number < 2 else draw.random() < 0.5
        rollouts.append(
            Rollout(
                prompt=prompt,
                prompt_token_ids=prompt_ids,
                sample_index=number,
                completion=Completion(
                    token_ids=[draw.randrange(vocab_size) for _ in range(length)],
                    logprobs=[0.0] * length,
                    finish=Finish.STOP,
                    weight_version=0,
                ),
                text="",
                reward=RewardResult(
                    score=float(is_correct) + 0.1 * draw.random(),
                    parts={},
                    verdict=Verdict.CORRECT if is_correct else Verdict.WRONG,
                    task_score=float(is_correct),
                ),
            )
        )
    return RolloutGroup(prompt=prompt, rollouts=rollouts)


def planted_logprobs(
    logprobs: Mapping[str, Sequence[float]], algorithm: AlgorithmConfig, *, seed: int
) -> dict[str, list[float]]:
    """Old log-probs for the responses, by sample: a third each puts the ratio below, inside and above the clip.

    `logprobs` are those of the model itself. The planted ones stay clear of the borders, so that every layout
    clips the same tokens.
    """
    draw = random.Random(derive_seed(seed, "ratios"))
    low, high = option(algorithm, "clip_low"), option(algorithm, "clip_high")
    # a surrogate without bounds, or without a lower one, is walked on both sides of ratios that are usual
    below = math.log1p(-min(_USUAL if low is None else low, _LOWEST))
    above = math.log1p((_USUAL if low is None else low) if high is None else high)

    def ratio() -> float:
        return draw.choice((below - _CLEAR, draw.uniform(below / 2, above / 2), above + _CLEAR))

    # a log-prob is never above 0, which an old one may be here: only the ratio counts
    return {name: [value - ratio() for value in values] for name, values in sorted(logprobs.items())}


def with_logprobs(
    groups: Sequence[RolloutGroup], logprobs: Mapping[str, Sequence[float]]
) -> list[RolloutGroup]:
    """The same groups with these log-probs of their responses, by sample id."""
    return [
        replace(group, rollouts=[_with_logprobs(rollout, logprobs) for rollout in group.rollouts])
        for group in groups
    ]


def _with_logprobs(rollout: Rollout, logprobs: Mapping[str, Sequence[float]]) -> Rollout:
    # the name that `rollout_samples` gives the sample
    own = logprobs[f"{rollout.prompt.id}/{rollout.sample_index}"]
    return replace(rollout, completion=replace(rollout.completion, logprobs=own))

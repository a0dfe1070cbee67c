"""The RL batch of `verify layout`: lengths, rewards and ratios that reach every branch of an algorithm."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from megatron_rl.algo.advantages import group_std_advantages
from megatron_rl.data.tokenizer import load_tokenizer
from megatron_rl.recipe.algorithm import SurrogateName
from megatron_rl.recipe.load import load_recipe
from megatron_rl.recipe.stages import AlgorithmConfig
from megatron_rl.train.batches import rollout_samples
from megatron_rl.verify.batches import planted_logprobs, rl_groups, with_logprobs
from tests.helpers.proofs import write_proof


def test_groups_follow_from_the_seed_with_both_signs_of_advantage_and_mixed_lengths(tmp_path: Path) -> None:
    recipe = load_recipe(write_proof(tmp_path)).recipe
    stage, tokenizer = recipe.stages[1], load_tokenizer(recipe.model.hf_path)
    groups, same, other = (
        rl_groups(stage, tokenizer, vocab_size=120, seed=seed, index=1) for seed in (1, 1, 2)
    )
    assert groups == same != other
    # one optimizer step of two
    assert len(groups) == stage.prompts_per_iteration // stage.updates_per_rollout
    for group in groups:
        advantages = group_std_advantages([rollout.reward.score for rollout in group.rollouts])
        assert min(advantages) < 0 < max(advantages)
    lengths = {len(rollout.completion.token_ids) for group in groups for rollout in group.rollouts}
    assert len(lengths) > 1 and max(lengths) <= stage.sampling.max_response_tokens

    planted = {
        sample.sample_id: [-0.5] * sum(sample.loss_mask)
        for sample in rollout_samples(groups, [[0.0] * 3] * 2)
    }
    samples = rollout_samples(with_logprobs(groups, planted), [[0.0] * 3] * 2)
    assert all(s.rollout_logprobs[-1] == -0.5 and s.rollout_logprobs[0] == 0.0 for s in samples)


@pytest.mark.parametrize("surrogate", get_args(SurrogateName))
def test_ratios_are_planted_on_both_sides_of_one_for_every_surrogate(surrogate: SurrogateName) -> None:
    algorithm = AlgorithmConfig(surrogate=surrogate)
    planted = planted_logprobs({"a": [-1.0] * 300}, algorithm, seed=1)["a"]
    ratios = [math.exp(-1.0 - value) for value in planted]
    assert all(map(math.isfinite, ratios)) and min(ratios) < 0.9 < 1.1 < max(ratios)


@pytest.mark.parametrize("surrogate", ["gppo", "grpo"])
def test_planted_ratios_lie_on_both_sides_of_the_clip_and_clear_of_it(surrogate: str) -> None:
    algorithm = replace(AlgorithmConfig(), surrogate=surrogate, clip_low=0.2, clip_high=0.28)
    own = {"a": [-1.0] * 300}
    planted = planted_logprobs(own, algorithm, seed=1)
    assert planted == planted_logprobs(own, algorithm, seed=1) != planted_logprobs(own, algorithm, seed=2)
    ratios = [math.exp(a - b) for a, b in zip(own["a"], planted["a"], strict=True)]
    high = 1.2 if surrogate == "grpo" else 1.28
    parts = [sum(r > high for r in ratios), sum(r < 0.8 for r in ratios), sum(0.8 < r < high for r in ratios)]
    assert sum(parts) == 300 and min(parts) > 60
    assert all(abs(math.log(r / edge)) > 0.05 for r in ratios for edge in (0.8, high))

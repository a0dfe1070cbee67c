"""What is made of rollouts before the first step of an iteration: batch-wide advantages, the KL in the reward."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_rl.algo.advantages import group_mean_advantages
from megatron_rl.algo.losses import policy_loss
from megatron_rl.data.pack import unpack_per_token
from megatron_rl.data.types import Verdict
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.recipe.algorithm import KlConfig
from megatron_rl.recipe.stages import AlgorithmConfig, OptimizerConfig, RlStage, SamplingConfig
from megatron_rl.train.scoring import with_kl_in_reward
from megatron_rl.train.updates import logprob_gaps, plan_updates, update_loss
from tests.helpers.rollouts import group

C, W = Verdict.CORRECT, Verdict.WRONG
GROUPS = [group(str(i), [C, W, W] if i % 2 else [C, C, W], response_tokens=1 + i) for i in range(4)]


def _stage(**algorithm: object) -> RlStage:
    return RlStage(
        kind="rl", prompts="p.jsonl", rewards={"math_answer": 1.0}, iterations=1, prompts_per_iteration=4,
        group_size=3, updates_per_rollout=2, tokens_per_microbatch=16,
        sampling=SamplingConfig(max_prompt_tokens=4, max_response_tokens=12), optimizer=OptimizerConfig(lr=1e-3),
        algorithm=AlgorithmConfig(**algorithm),
    )  # fmt: skip


@pytest.mark.parametrize("advantage", ["batch_std", "reinforce_pp", "reinforce_pp_baseline"])
def test_batch_forms_are_over_the_whole_iteration_however_it_is_cut(advantage: str) -> None:
    """The same advantages with one update or several, and on any number of ranks."""
    stage = _stage(advantage=advantage)
    found = [
        [s.advantage for update in plan_updates(GROUPS, one, layout, dp_rank=rank) for s in update.samples]
        for one, layout, rank in (
            (replace(stage, updates_per_rollout=1), ParallelLayout(), 0),
            (stage, ParallelLayout(), 0),
            (stage, ParallelLayout(dp=2), 1),
        )
    ]
    assert found[0] == found[1] == found[2] and len(set(found[0])) > 1


@pytest.mark.parametrize("dp", [1, 2])
def test_kl_in_the_reward_moves_advantages_of_samples_and_tokens_alike(dp: int) -> None:
    stage = _stage(advantage="group_mean", kl=KlConfig(coefficient=0.5, where="reward"))
    distances = {f"{i}/{j}": 0.1 * i + j for i in range(4) for j in range(3)}
    seen = []
    for rank in range(dp):
        updates = plan_updates(GROUPS, stage, ParallelLayout(dp=dp), dp_rank=rank)
        for update in with_kl_in_reward(updates, GROUPS, stage, distances):
            for sample in update.samples:
                number, index = map(int, sample.sample_id.split("/"))
                rewards = [
                    rollout.reward.score - 0.5 * distances[f"{number}/{j}"]
                    for j, rollout in enumerate(GROUPS[number].rollouts)
                ]
                assert sample.advantage == group_mean_advantages(rewards)[index]
            for batch in update.batches:
                assert batch.rl is not None
                for at, values in zip(
                    batch.sample_index, unpack_per_token(batch, batch.rl.advantages), strict=True
                ):
                    sample = update.samples[at]
                    seen.append(sample.sample_id)
                    want = torch.tensor(sample.loss_mask[1:]).float() * sample.advantage
                    torch.testing.assert_close(values, want)
    assert sorted(seen) == sorted(distances)


def test_log_probs_of_the_engine_as_old_ones_say_nothing_of_the_gap_to_it() -> None:
    (update, _) = plan_updates(GROUPS, _stage(), ParallelLayout(), dp_rank=0)
    assert logprob_gaps([update]).numel() > 0
    batches = [
        replace(b, rl=replace(b.rl, old_logprobs=b.rl.rollout_logprobs)) for b in update.batches if b.rl
    ]
    assert logprob_gaps([replace(update, batches=batches)]).numel() == 0


@pytest.mark.parametrize(
    ("algorithm", "normaliser"),
    [
        ({"aggregate": "token_mean"}, 9.0),
        ({"aggregate": "sequence_mean"}, 6.0),
        ({"aggregate": "sequence_sum"}, 6.0),
        ({"aggregate": "token_sum_norm"}, 72.0),
        ({"aggregate": "token_sum_norm", "loss_length": 10}, 60.0),
        ({"normaliser": "micro_batch"}, 6.0),
    ],
    ids=str,
)
def test_normalisers_count_the_whole_step(algorithm: dict[str, object], normaliser: float) -> None:
    stage = _stage(**algorithm)
    (first, _) = plan_updates(GROUPS, stage, ParallelLayout(), dp_rank=0)
    loss = update_loss(first, stage)
    assert loss.func is policy_loss and loss.keywords["normaliser"] == normaliser  # type: ignore[attr-defined]
    assert loss.keywords["per_micro_batch"] == (stage.algorithm.normaliser == "micro_batch")  # type: ignore[attr-defined]

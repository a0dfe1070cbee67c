"""Reference log-probs, corrections and advantages of an iteration do not depend on the layout that makes them."""

from __future__ import annotations

import os
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.data.types import RolloutGroup, Verdict
from megatron_rl.errors import CheckpointError
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.recipe.algorithm import CorrectionConfig, EntropyConfig, KlConfig
from megatron_rl.recipe.schema import ModelConfig, Recipe
from megatron_rl.recipe.stages import (
    AlgorithmConfig,
    OptimizerConfig,
    RlStage,
    SamplingConfig,
    ScheduleConfig,
)
from tests.helpers.distributed import run_distributed
from tests.helpers.models import make_tiny_hf
from tests.helpers.rollouts import group

C, W = Verdict.CORRECT, Verdict.WRONG
TP2, DP2, PP2 = ParallelLayout(tp=2), ParallelLayout(dp=2), ParallelLayout(pp=2)


def _stage(**algorithm: Any) -> RlStage:
    return RlStage(
        kind="rl", prompts="p.jsonl", rewards={"math_answer": 1.0}, iterations=1, prompts_per_iteration=4,
        group_size=3, updates_per_rollout=2, tokens_per_microbatch=24,
        sampling=SamplingConfig(temperature=0.8, max_prompt_tokens=4, max_response_tokens=12),
        optimizer=OptimizerConfig(lr=1e-2), algorithm=AlgorithmConfig(**algorithm),
    )  # fmt: skip


IN_REWARD = _stage(
    advantage="batch_std",
    kl=KlConfig(coefficient=0.1, where="reward"),
    correction=CorrectionConfig(kind="token_tis", high=1.5, veto=1e-9, batch_normalise=True),
)
ONE_STEP = replace(_stage(drop_zero_advantage=False), updates_per_rollout=1)
IN_LOSS = _stage(kl=KlConfig(coefficient=0.1), entropy=EntropyConfig(target=50.0, delta=1e-3))


def _groups() -> list[RolloutGroup]:
    """Random responses of several lengths, with log-probs around those of a random model."""
    draw = random.Random(3)
    made = []
    for number in range(4):
        one = group(str(number), [C, W, W] if number % 2 else [C, C, W])
        rollouts = []
        for rollout in one.rollouts:
            length = draw.randint(2, 9)
            completion = replace(
                rollout.completion,
                token_ids=[draw.randrange(250) for _ in range(length)],
                logprobs=[-5.5 + draw.uniform(-1, 1) for _ in range(length)],
            )
            rollouts.append(replace(rollout, completion=completion))
        made.append(replace(one, rollouts=rollouts))
    return made


def _measure(rank: int, world_size: int, model: str, other: str, place: str) -> list[dict[str, Any]]:
    from megatron_rl.parallel import groups

    groups.init_process_groups(
        TP2, rank=rank, world_size=world_size, master_addr="127.0.0.1",
        master_port=int(os.environ["MASTER_PORT"]), timeout_s=60,
    )  # fmt: skip
    first = _of_layout(TP2, rank, model, other, f"{place}/tp")
    groups.destroy_model_groups()
    groups.build_model_groups(DP2, timeout_s=60)
    second = _of_layout(DP2, rank, model, other, f"{place}/dp")
    groups.destroy_model_groups()
    groups.build_model_groups(PP2, timeout_s=60)
    _check_one_step(PP2, rank, model)
    groups.destroy_process_groups()
    return [first, second]


def _check_one_step(layout: ParallelLayout, rank: int, model: str) -> None:
    """Where an iteration has one step, its own pass gives the bits of a pass for old log-probs, and so all after it."""
    import torch

    from megatron_rl.algo.entropy import EntropyState
    from megatron_rl.model.spec import ModelSpec
    from megatron_rl.train.policy import Policy
    from megatron_rl.train.scoring import score_updates
    from megatron_rl.train.updates import add_old_logprobs, apply_updates, plan_updates

    policy = Policy(ModelConfig(hf_path=model, dtype="float32"), ModelSpec.from_hf(model), layout, rank=rank)
    planned = plan_updates(_groups(), ONE_STEP, layout, dp_rank=policy.dp_rank)
    before, ways = _weights(policy), []
    for is_on_policy in (True, False):
        policy.start_stage(ONE_STEP.optimizer, ScheduleConfig(), total_steps=4)
        for param, value in zip(_live_weights(policy), before, strict=True):
            param.copy_(value)
        scored, _ = score_updates(policy, planned, _groups(), ONE_STEP, reference=None)
        assert [update.is_on_policy for update in scored] == [True]
        if not is_on_policy:
            scored = [add_old_logprobs(policy, planned[0], temperature=0.8)]
        done, steps, _ = apply_updates(policy, scored, ONE_STEP, EntropyState.start(None, {}))
        old = [batch.rl.old_logprobs for batch in done[0].batches if batch.rl is not None]
        assert not done[0].is_on_policy and any(one.any() for one in old)
        ways.append((old, steps, _weights(policy)))
    for one, other in zip(ways[0][0] + ways[0][2], ways[1][0] + ways[1][2], strict=True):
        assert torch.equal(one, other)
    assert ways[0][1] == ways[1][1]
    assert not all(torch.equal(a, b) for a, b in zip(before, ways[0][2], strict=True))


def _of_layout(layout: ParallelLayout, rank: int, model: str, other: str, place: str) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from megatron_rl.algo.entropy import EntropyState
    from megatron_rl.model.spec import ModelSpec
    from megatron_rl.train.metrics import merge
    from megatron_rl.train.policy import Policy
    from megatron_rl.train.progress import Progress
    from megatron_rl.train.reference import ReferencePolicy, open_reference
    from megatron_rl.train.scoring import score_updates
    from megatron_rl.train.updates import apply_updates, plan_updates

    _check_one_step(layout, rank, model)
    policy = Policy(ModelConfig(hf_path=model, dtype="float32"), ModelSpec.from_hf(model), layout, rank=rank)
    policy.start_stage(IN_LOSS.optimizer, ScheduleConfig(), total_steps=4)
    before = _weights(policy)
    reference = ReferencePolicy.from_hf(policy, other, rank=rank)
    groups = _groups()
    found: dict[str, Any] = {"advantages": {}, "tokens": {}}
    planned = plan_updates(groups, IN_REWARD, layout, dp_rank=policy.dp_rank)
    updates, found["metrics"] = score_updates(policy, planned, groups, IN_REWARD, reference=reference)
    found["is_lent"] = all(torch.equal(a, b) for a, b in zip(before, _weights(policy), strict=True))
    for update in updates:
        found["advantages"] |= {sample.sample_id: sample.advantage for sample in update.samples}
        for batch in update.batches:
            bounds, rl = batch.cu_seqlens.tolist(), batch.rl
            assert rl is not None and rl.ref_logprobs is not None and rl.correction is not None
            for number, index in enumerate(batch.sample_index):
                tokens = slice(bounds[number], bounds[number + 1])
                found["tokens"][update.samples[index].sample_id] = [
                    one[tokens].tolist()
                    for one in (rl.old_logprobs, rl.ref_logprobs, rl.correction, rl.advantages)
                ]
    planned = plan_updates(groups, IN_LOSS, layout, dp_rank=policy.dp_rank)
    updates, _ = score_updates(policy, planned, groups, IN_LOSS, reference=reference)
    updates, steps, entropy = apply_updates(
        policy, updates, IN_LOSS, EntropyState.start(IN_LOSS.algorithm.entropy, {})
    )
    found["steps"] = [merge(step) for step in steps]
    found["entropy"] = entropy.to_dict()
    # a second stage begins here; it is resumed after a step, and once more when its reference is gone
    kept, run = _weights(policy), _run_context(policy, model, place, rank)
    began = open_reference(IN_LOSS, Progress(stage=1), run)
    apply_updates(policy, updates, IN_LOSS, entropy)
    resumed = open_reference(IN_LOSS, Progress(stage=1, step=1), run)
    assert began is not None and resumed is not None
    found["is_kept"] = [_holds(one, policy, kept) for one in (began, resumed)]
    dist.barrier()
    shutil.rmtree(Path(place, "reference"), ignore_errors=True)
    dist.barrier()
    with pytest.raises(CheckpointError, match="reference of its KL term, are not there"):
        open_reference(IN_LOSS, Progress(stage=1, step=1), run)
    assert open_reference(_stage(), Progress(stage=1, step=1), run) is None
    return found


def _run_context(policy: Any, model: str, place: str, rank: int) -> Any:
    """Of a run of two stages, without what a reference does not need."""
    from megatron_rl.train.context import RunContext

    needless = dict.fromkeys(
        ("tokenizer", "reporter", "checkpoints", "phases", "stop", "host", "driver_group", "border_group", "profile")
    )
    recipe = Recipe(name="two", model=ModelConfig(hf_path=model, dtype="float32"), stages=(IN_LOSS, IN_LOSS))
    return RunContext(
        recipe=recipe, run_dir=Path(place), rank=rank, layout=policy.layout, spec=policy.spec, policy=policy,
        **needless,
    )  # fmt: skip


def _holds(reference: Any, policy: Any, weights: list[Any]) -> bool:
    """Whether the reference is those weights, bit for bit, and the policy is as it was once it was looked at."""
    import torch

    own = _weights(policy)
    with reference._in_place(policy):
        is_same = all(torch.equal(a, b) for a, b in zip(weights, _weights(policy), strict=True))
        differs = not all(torch.equal(a, b) for a, b in zip(own, _weights(policy), strict=True))
    is_back = all(torch.equal(a, b) for a, b in zip(own, _weights(policy), strict=True))
    return is_same and differs and is_back


def _weights(policy: Any) -> list[Any]:
    return [param.detach().clone() for param in _live_weights(policy)]


def _live_weights(policy: Any) -> list[Any]:
    return [param for params in policy.named_params() for param in params.values()]


@pytest.mark.timeout(240)
def test_scores_of_an_iteration_do_not_depend_on_the_layout(tmp_path: Path) -> None:
    model = make_tiny_hf(tmp_path / "model")
    other = make_tiny_hf(tmp_path / "other", seed=9)
    ranks = run_distributed(_measure, 2, str(model), str(other), str(tmp_path), timeout_s=200)
    tp, dp = ([of_rank[which] for of_rank in ranks] for which in (0, 1))
    for found in tp + dp:
        # the trained weights come back after the reference was scored
        assert found["is_lent"] and found["is_kept"] == [True, True]
    want = tp[0]
    tokens = dp[0]["tokens"] | dp[1]["tokens"]
    assert set(tokens) == set(want["tokens"]) and len(dp[0]["tokens"]) < len(tokens) == 12
    for name, fields in want["tokens"].items():
        for got, field in zip(tokens[name], fields, strict=True):
            assert got == pytest.approx(field, abs=2e-5), name
    for found in dp:
        assert found["advantages"] == pytest.approx(want["advantages"], abs=1e-5)
        assert found["metrics"] == pytest.approx(want["metrics"], abs=1e-5)
        assert found["entropy"] == pytest.approx(want["entropy"], abs=1e-5)
    # weights of both updates, normalised each, have a mean of 1 over what they keep
    assert want["metrics"]["mismatch/weight_mean"] == pytest.approx(
        want["metrics"]["mismatch/kept_frac"], abs=1e-6
    )
    assert abs(want["metrics"]["reward/kl_ref"]) > 1e-3
    first, second = want["steps"]
    assert first["policy/kl_ref"] > 1e-4
    assert (first["policy/entropy_coefficient"], second["policy/entropy_coefficient"]) == (0.0, 1e-3)

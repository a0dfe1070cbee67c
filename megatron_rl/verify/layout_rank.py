"""One rank of `verify layout`: the same batch through several layouts of one number of processes, one by one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from megatron_rl.algo.aggregate import normaliser
from megatron_rl.algo.entropy import EntropyState
from megatron_rl.algo.losses import sft_loss
from megatron_rl.data.pack import unpack_per_token, with_old_logprobs, with_ref_logprobs
from megatron_rl.data.tokenizer import Tokenizer, load_tokenizer
from megatron_rl.data.types import PackedBatch, RolloutGroup
from megatron_rl.model.spec import ModelSpec
from megatron_rl.parallel.collectives import all_gather_object
from megatron_rl.parallel.groups import (
    build_model_groups,
    destroy_model_groups,
    destroy_process_groups,
    init_process_groups,
)
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.recipe.load import load_recipe
from megatron_rl.recipe.schema import Recipe
from megatron_rl.recipe.stages import RlStage, ScheduleConfig, SftStage
from megatron_rl.train.batches import local_batches
from megatron_rl.train.metrics import merge
from megatron_rl.train.policy import LossFunction, Policy
from megatron_rl.train.updates import plan_updates, update_loss
from megatron_rl.verify.batches import planted_logprobs, rl_groups, sft_samples, with_logprobs
from megatron_rl.verify.gradients import compare_gradients, unequal_replicas, write_reference
from megatron_rl.verify.jobs import LayoutJob
from megatron_rl.verify.layouts import Measurement, TensorGap, layout_text


def run_layouts(job: LayoutJob, *, rank: int) -> None:
    """Measure every layout on this rank; all ranks call it. Rank 0 leaves the measurements."""
    recipe = load_recipe(job.recipe).recipe
    torch.set_num_threads(recipe.run.torch_threads)
    open_ranks(job, rank=rank)
    results: list[Measurement] = []
    for number, layout in enumerate(job.layouts):
        if number:
            destroy_model_groups()
            build_model_groups(layout, timeout_s=job.timeout_s)
        results += measure_layout(recipe, layout, Path(job.place), rank=rank)
        if rank == 0:
            print(f"        {layout_text(layout)} measured", flush=True)
    if rank == 0:
        job.results.write_text(json.dumps([asdict(one) for one in results]))
    destroy_process_groups()


def open_ranks(job: LayoutJob, *, rank: int) -> None:
    """Meet the other ranks, in the first of the layouts. Collective."""
    init_process_groups(
        job.layouts[0],
        rank=rank,
        world_size=job.layouts[0].world_size,
        master_addr="127.0.0.1",
        master_port=job.port,
        timeout_s=job.timeout_s,
    )


def measure_layout(recipe: Recipe, layout: ParallelLayout, place: Path, *, rank: int) -> list[Measurement]:
    """One measurement per kind of stage of the recipe. One process writes the reference below `place`. Collective."""
    model = recipe.model
    spec = ModelSpec.from_hf(model.hf_path, max_positions=model.max_positions)
    tokenizer = load_tokenizer(model.hf_path)
    measured: list[Measurement] = []
    for index, stage in enumerate(recipe.stages):
        if stage.kind in [one.part for one in measured]:
            continue
        # afresh for each: an optimizer step ends the measurement
        policy = Policy(recipe.model, spec, layout, rank=rank)
        policy.start_stage(stage.optimizer, ScheduleConfig(), total_steps=1)
        if isinstance(stage, SftStage):
            batches, loss_fn = _sft(stage, policy, tokenizer, seed=recipe.run.seed, index=index)
            temperature = 1.0
        else:
            batches, loss_fn = _rl(stage, policy, tokenizer, place, seed=recipe.run.seed, index=index)
            temperature = stage.sampling.temperature
        measured.append(_measure(stage.kind, policy, batches, loss_fn, place, temperature=temperature))
    return measured


def _measure(
    part: str,
    policy: Policy,
    batches: Sequence[PackedBatch],
    loss_fn: LossFunction,
    place: Path,
    *,
    temperature: float,
) -> Measurement:
    metrics = merge(policy.forward_backward(batches, loss_fn, temperature=temperature))
    reference = place / f"{part}.safetensors"
    gaps: tuple[TensorGap, ...] = ()
    if policy.layout.world_size == 1:
        write_reference(policy, reference)
    else:
        gaps = compare_gradients(policy, reference)
    # past the policy's own check of replicas, which would end the proof before it can name what differs
    grad_norm = policy.optimizer.step().grad_norm
    is_rl = part == "rl"
    return Measurement(
        part=part,
        layout=layout_text(policy.layout),
        loss=metrics["policy/loss" if is_rl else "sft/loss"],
        grad_norm=grad_norm,
        gaps=gaps,
        unequal=unequal_replicas(policy),
        shares=(metrics["policy/clip_high_frac"], metrics["policy/clip_low_frac"]) if is_rl else None,
    )


def _sft(
    stage: SftStage, policy: Policy, tokenizer: Tokenizer, *, seed: int, index: int
) -> tuple[list[PackedBatch], LossFunction]:
    samples = sft_samples(stage, tokenizer, seed=seed, index=index)
    batches = local_batches(
        samples, policy.layout, dp_rank=policy.dp_rank, tokens_per_microbatch=stage.tokens_per_microbatch
    )
    return batches, partial(sft_loss, normaliser=normaliser(samples, "token_mean"))


def _rl(
    stage: RlStage, policy: Policy, tokenizer: Tokenizer, place: Path, *, seed: int, index: int
) -> tuple[list[PackedBatch], LossFunction]:
    groups = rl_groups(stage, tokenizer, vocab_size=policy.spec.vocab_size, seed=seed, index=index)
    planted = place / "old_logprobs.json"
    if policy.layout.world_size == 1:
        own = _response_logprobs(stage, policy, groups)
        planted.write_text(json.dumps(planted_logprobs(own, stage.algorithm, seed=seed)))
    groups = with_logprobs(groups, json.loads(planted.read_text()))
    (update,) = plan_updates(groups, stage, policy.layout, dp_rank=policy.dp_rank)
    batches = []
    for batch in update.batches:
        assert batch.rl is not None
        planted_batch = with_old_logprobs(batch, batch.rl.rollout_logprobs)
        if stage.algorithm.kl is not None:
            # any policy will do for a reference
            planted_batch = with_ref_logprobs(planted_batch, batch.rl.rollout_logprobs)
        batches.append(planted_batch)
    entropy = EntropyState.start(stage.algorithm.entropy, {}).active_coefficient(stage.algorithm.entropy)
    return batches, update_loss(update, stage, entropy_coefficient=entropy)


def _response_logprobs(
    stage: RlStage, policy: Policy, groups: Sequence[RolloutGroup]
) -> dict[str, list[float]]:
    """Of each sample the model's own log-probs of its response. Collective."""
    (update,) = plan_updates(groups, stage, policy.layout, dp_rank=policy.dp_rank)
    values = policy.logprobs(update.batches, temperature=stage.sampling.temperature)
    mine: dict[str, list[float]] = {}
    for batch, of_batch in zip(update.batches, values, strict=True):
        for number, logprobs in zip(batch.sample_index, unpack_per_token(batch, of_batch), strict=True):
            sample = update.samples[number]
            mine[sample.sample_id] = logprobs[-sum(sample.loss_mask) :].tolist()
    return {name: found for of_rank in all_gather_object(mine) for name, found in of_rank.items()}

"""One rank of `verify parity`: the same tokens through trainer, engines and transformers. Rank 0 asks the others."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_rl.algo.losses import sft_loss
from megatron_rl.data.chat import render_prompt
from megatron_rl.data.prompts import load_prompts, stage_options
from megatron_rl.data.tokenizer import load_tokenizer
from megatron_rl.data.types import TrainSample
from megatron_rl.model.spec import ModelSpec
from megatron_rl.parallel.collectives import broadcast_object
from megatron_rl.parallel.groups import destroy_process_groups, init_process_groups, new_driver_group
from megatron_rl.recipe.load import load_recipe
from megatron_rl.recipe.stages import OptimizerConfig, RlStage, ScheduleConfig, SftStage
from megatron_rl.reshard.verify import Probe, Values, compare, max_gap, parity_bound
from megatron_rl.rollout.engine import GenerateRequest
from megatron_rl.rollout.vllm_engine import VllmEngine
from megatron_rl.rollout.weight_sync import WeightSync
from megatron_rl.train.batches import local_batches
from megatron_rl.train.policy import DTYPES, Policy
from megatron_rl.train.trials import sequence_logprobs
from megatron_rl.verify.batches import sft_samples
from megatron_rl.verify.jobs import ParityJob

PROMPTS = 4  # of the recipe's first ones
SAMPLED_TOKENS = 32  # that each replica adds to each
# an engine left on the weights it was started with must be noticed: steps until they give other log-probs
_LR, _STEPS = 3e-4, 10

Sequences = list[tuple[int, ...]]


def run_parity(job: ParityJob, *, rank: int) -> None:
    """All of it on this rank; all ranks call it. Rank 0 leaves the result."""
    recipe = load_recipe(job.recipe).recipe
    torch.set_num_threads(recipe.run.torch_threads)
    init_process_groups(
        job.layout,
        rank=rank,
        world_size=job.layout.world_size,
        master_addr="127.0.0.1",
        master_port=job.port,
        timeout_s=job.timeout_s,
    )
    with ExitStack() as closing:
        _Parity(job, rank=rank).run(closing)
    destroy_process_groups()


class _Parity:
    """One rank's share; every method is collective but those of rank 0, which say so."""

    def __init__(self, job: ParityJob, *, rank: int) -> None:
        self._job, self._rank = job, rank
        self._recipe = recipe = load_recipe(job.recipe).recipe
        self._spec = ModelSpec.from_hf(recipe.model.hf_path, max_positions=recipe.model.max_positions)
        self._tokenizer = load_tokenizer(recipe.model.hf_path)
        self._group = new_driver_group()
        self._policy = Policy(recipe.model, self._spec, job.layout, rank=rank)
        self._stage = next((stage for stage in recipe.stages if isinstance(stage, RlStage)), None)
        given = self._stage.engine.parity_bound if self._stage else None
        self._bound = parity_bound(recipe.model.dtype) if given is None else given
        self._engine: VllmEngine | None = None

    def run(self, closing: ExitStack) -> None:
        prompts = broadcast_object(self._prompts() if self._rank == 0 else [], src=0, group=self._group)
        if self._stage is not None:
            self._start_engine(self._stage, prompts, closing)
        moved = self._train(prompts)
        sampled: list[list[Values]] = []
        sequences = prompts
        if self._stage is not None:
            self._transfer(self._stage)
            if self._rank == 0:
                sequences, sampled = self._sample(self._stage, prompts)
            sequences = broadcast_object(sequences, src=0, group=self._group)
        trainer = sequence_logprobs(self._policy, sequences)
        at_temperature: list[list[float]] = []
        if self._stage is not None:
            temperature = self._stage.sampling.temperature
            at_temperature = sequence_logprobs(self._policy, sequences, temperature=temperature)
        exported = Path(self._job.place) / "exported"
        self._policy.save_hf(str(exported), hf_source=self._recipe.model.hf_path)
        if self._rank == 0:
            hf = self._transformers(exported, sequences)
            rows = list(self._rows(prompts, sequences, trainer, hf, at_temperature, sampled))
            result = {"rows": rows, "bound": self._bound, "moved": moved, **self._about(prompts, sequences)}
            self._job.results.write_text(json.dumps(result, indent=2) + "\n")
        broadcast_object(None, src=0, group=self._group)

    def _prompts(self) -> Sequences:
        """Rank 0: token ids of the first prompts, or of the first conversations of a recipe without RL."""
        if self._stage is None:
            stage = self._recipe.stages[0]
            assert isinstance(stage, SftStage)
            samples = sft_samples(stage, self._tokenizer, seed=self._recipe.run.seed, index=0)
            return [tuple(sample.token_ids) for sample in samples[:PROMPTS]]
        found = load_prompts(
            self._stage.prompts,
            render=partial(render_prompt, self._tokenizer),
            **stage_options(self._stage),
        )
        return [tuple(found.token_ids[prompt.id]) for prompt in found.prompts[:PROMPTS]]

    def _start_engine(self, stage: RlStage, prompts: Sequences, closing: ExitStack) -> None:
        if self._rank == 0:
            self._say(f"starting {stage.engine.replicas} vllm engine(s) of {stage.engine.tp} worker(s)")
            longest = max(map(len, prompts)) + self._num_sampled(stage) + 1
            self._engine = closing.enter_context(
                VllmEngine.start(
                    stage.engine,
                    hf_path=self._recipe.model.hf_path,
                    dtype=self._recipe.model.dtype,
                    spec=self._spec,
                    max_model_len=min(longest, self._spec.max_positions),
                    seed=self._recipe.run.seed,
                    log_dir=Path(self._job.place) / "logs",
                )
            )
        broadcast_object(None, src=0, group=self._group)

    def _train(self, prompts: Sequences) -> float:
        """Optimizer steps on the prompts until log-probs have moved by more than the bound; by how much they have."""
        samples = [
            TrainSample(token_ids=ids, loss_mask=[True] * len(ids), sample_id=str(number))
            for number, ids in enumerate(prompts)
        ]
        tokens = sum(sample.packed_length for sample in samples)
        layout, policy = self._job.layout, self._policy
        batches = local_batches(samples, layout, dp_rank=policy.dp_rank, tokens_per_microbatch=tokens)
        policy.start_stage(OptimizerConfig(lr=_LR), ScheduleConfig(), total_steps=_STEPS)
        loss_fn = partial(sft_loss, normaliser=float(sum(sample.num_trained_tokens for sample in samples)))
        before, moved = sequence_logprobs(policy, prompts), 0.0
        while not moved > self._bound and policy.optimizer.num_steps < _STEPS:
            policy.forward_backward(batches, loss_fn)
            policy.optimizer_step()
            after = sequence_logprobs(policy, prompts)
            moved = max(max_gap(a, b) for a, b in zip(before, after, strict=True))
        self._say(f"{policy.optimizer.num_steps} optimizer step(s) moved log-probs by up to {moved:.2g} nats")
        return moved

    def _transfer(self, stage: RlStage) -> None:
        sync = WeightSync(
            self._policy.named_params,
            spec=self._spec,
            layout=self._job.layout,
            rank=self._rank,
            engine=self._engine,
            config=stage.engine,
            dtype=self._policy.dtype,
            trainers=self._group,
        )
        result = sync.push(self._policy.optimizer.num_steps)
        self._say(f"transferred {result.bytes:,} bytes to the engines in {result.seconds:.2f} s")

    def _sample(self, stage: RlStage, prompts: Sequences) -> tuple[Sequences, list[list[Values]]]:
        """Rank 0: prompts with what was sampled, and the sampler's log-probs of that by replica."""
        assert self._engine is not None
        requests = [
            GenerateRequest(
                prompt_token_ids=ids,
                seed=number,
                max_tokens=self._num_sampled(stage),
                temperature=stage.sampling.temperature,
            )
            for number, ids in enumerate(prompts)
        ]
        # as many blocks as replicas: each draws all of them
        done = self._engine.generate(requests * stage.engine.replicas, evenly=True)
        sequences = [(*ids, *one.token_ids) for ids, one in zip(prompts, done, strict=False)]
        by_replica = [done[i : i + len(prompts)] for i in range(0, len(done), len(prompts))]
        # a replica that draws other tokens is infinitely far off
        sampled: list[list[Values]] = [
            [
                one.logprobs if one.token_ids == first.token_ids else [math.inf] * len(first.logprobs)
                for one, first in zip(of_replica, done, strict=False)
            ]
            for of_replica in by_replica
        ]
        return sequences, sampled

    def _num_sampled(self, stage: RlStage) -> int:
        return min(SAMPLED_TOKENS, stage.sampling.max_response_tokens)

    def _transformers(self, model_dir: Path, sequences: Sequences) -> list[list[float]]:
        """Rank 0: the exported weights in transformers' own model, one sequence at a time."""
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        dtype = DTYPES[self._recipe.model.dtype]
        model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype, local_files_only=True)
        found = []
        for ids in sequences:
            tokens = torch.tensor([ids])
            with torch.no_grad():
                rows = model.eval()(tokens).logits[0, :-1].float().log_softmax(-1)
            found.append(rows.gather(1, tokens[0, 1:, None])[:, 0].tolist())
        self._say("transformers has scored the exported model")
        return found

    def _rows(
        self,
        prompts: Sequences,
        sequences: Sequences,
        trainer: list[list[float]],
        hf: list[list[float]],
        at_temperature: list[list[float]],
        sampled: list[list[Values]],
    ) -> Iterator[dict[str, Any]]:
        """Rank 0: one row per pair of sides."""
        whole = [Probe(token_ids=ids) for ids in sequences]
        yield _row("trainer", "transformers", compare([whole], [trainer], [hf]))
        if self._engine is None:
            return
        scores = self._engine.score_all(sequences)
        count = len(scores)
        name = f"{count} engines" if count > 1 else "engine"
        yield _row("trainer", name, compare([whole] * count, [trainer] * count, scores))
        yield _row(name, "transformers", compare([whole] * count, scores, [hf] * count))
        probes = [
            Probe(token_ids=ids, start=len(given)) for ids, given in zip(sequences, prompts, strict=True)
        ]
        responses = [values[probe.start - 1 :] for probe, values in zip(probes, at_temperature, strict=True)]
        yield _row("trainer", f"{name}, as sampled", compare([probes] * count, [responses] * count, sampled))

    def _about(self, prompts: Sequences, sequences: Sequences) -> dict[str, Any]:
        return {
            "prompts": len(prompts),
            "tokens": sum(len(ids) - 1 for ids in sequences),
            "sequences": [list(ids) for ids in sequences],
            "texts": [[self._tokenizer.decode([token]) for token in ids] for ids in sequences],
        }

    def _say(self, text: str) -> None:
        if self._rank == 0:
            print(f"          {text}", flush=True)


def _row(one: str, other: str, report: Any) -> dict[str, Any]:
    return {"one": one, "other": other, **asdict(report)}

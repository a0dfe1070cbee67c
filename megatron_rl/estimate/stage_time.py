"""The time of every stage of a checked recipe on one type of machine, and what had to be assumed for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_rl.estimate.generation import Engines
from megatron_rl.estimate.hardware import Hardware
from megatron_rl.estimate.lengths import Lengths
from megatron_rl.estimate.memory import ELEMENT_BYTES
from megatron_rl.estimate.memory_engine import engine_memory
from megatron_rl.estimate.memory_types import GIB
from megatron_rl.estimate.timing import RlWork, StepTime, TransferLoad, rl_step, sft_step, sync_s, train_pass
from megatron_rl.estimate.training import Trainer
from megatron_rl.estimate.work import ModelWork, model_work
from megatron_rl.model.spec import ModelSpec
from megatron_rl.recipe.amounts import has_old_logprob_pass, prompts_drawn
from megatron_rl.recipe.load import LoadedRecipe
from megatron_rl.recipe.resolve import Resolved
from megatron_rl.recipe.stages import EngineConfig, RlStage, SftStage, Stage
from megatron_rl.recipe.transfer import is_colocated, transfer_summary

RESPONSE_FRAC = 1 / 3  # of the longest allowed, where nobody says the mean: ours, a guess
PROMPT_TOKENS = 200  # of a problem in its template, where nobody says the mean: ours, of public math sets
# one answer on one grading process, one test of a program in one sandbox. Ours: orders of size on one CPU core; what
# a run measures is time/reward_s
ANSWER_S, PROGRAM_TEST_S = 0.02, 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class Assumed:
    """What a recipe does not say. None: derived, see RESPONSE_FRAC and PROMPT_TOKENS."""

    response_mean: float | None = None  # tokens; of an SFT sample: all its tokens
    prompt_mean: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTime:
    """One stage: a step of it, how many there are, and on what lengths."""

    kind: str
    step: StepTime
    steps: int  # 0: not known
    mean_tokens: float  # of a response, or of an SFT sample
    prompt_tokens: float  # 0 for SFT
    mfu: float  # of training: products and attention without recompute, over the BF16 peak
    engine_gpus: int  # 0 for SFT
    is_separate: bool  # whether engines have GPUs of their own
    num_ranks: int  # of the trainer

    @property
    def gpu_hours(self) -> float:
        return self.step.gpu_hours(self.steps)


def stage_times(
    loaded: LoadedRecipe, resolved: Resolved, hardware: Hardware, assumed: Assumed
) -> tuple[StageTime, ...]:
    """One entry per stage of a recipe that `check_recipe` accepted."""
    recipe, work = loaded.recipe, model_work(resolved.spec)
    cost = train_pass(recipe.model.recompute)
    times = []
    for stage, numbers in zip(recipe.stages, resolved.stages, strict=True):
        trainer = Trainer(
            work=work,
            layout=resolved.layout,
            hardware=hardware,
            microbatch_tokens=stage.tokens_per_microbatch,
        )
        if isinstance(stage, SftStage):
            lengths = sample_lengths(stage, assumed)
            context = lengths.mean_square / lengths.mean / 2
            step = sft_step(
                trainer, tokens=stage.global_batch_size * lengths.mean, context=context, cost=cost
            )
            prompt, engine_gpus, is_separate = 0.0, 0, False
        else:
            transfer = transfer_summary(
                resolved.spec,
                resolved.layout,
                stage,
                dtype=recipe.model.dtype,
                gpus_per_node=hardware.gpus_per_node,
            )
            load = rl_work(stage, assumed, transfer_s=transfer_time(transfer, hardware))
            lengths, context, prompt = load.lengths, load.context, load.prompt_tokens
            element_bytes = ELEMENT_BYTES[recipe.model.dtype]
            engines = stage_engines(stage.engine, resolved.spec, hardware, element_bytes=element_bytes)
            engine_gpus, is_separate = engines.tp * engines.replicas, not is_colocated(stage)
            # engines may be more than the trainer's processes on its machine
            both = max(resolved.layout.world_size, engine_gpus)
            num_gpus = resolved.layout.world_size + engine_gpus if is_separate else both
            step = rl_step(trainer, engines, load, cost=cost, num_gpus=num_gpus)
        times.append(
            StageTime(
                kind=stage.kind,
                step=step,
                steps=numbers.iterations,
                mean_tokens=lengths.mean,
                prompt_tokens=prompt,
                mfu=_mfu(work, step, context, resolved.layout.world_size, hardware),
                engine_gpus=engine_gpus,
                is_separate=is_separate,
                num_ranks=resolved.layout.world_size,
            )
        )
    return tuple(times)


def sample_lengths(stage: Stage, assumed: Assumed) -> Lengths:
    """Lengths of what a stage generates, or of SFT's whole samples."""
    longest = stage.max_sample_tokens if isinstance(stage, SftStage) else stage.sampling.max_response_tokens
    mean = assumed.response_mean or longest * RESPONSE_FRAC
    return Lengths(mean=min(mean, float(longest)), longest=longest)


def rl_work(stage: RlStage, assumed: Assumed, *, transfer_s: float) -> RlWork:
    """An iteration of one round of generation that trains on all groups it may keep: the most of both."""
    answers = prompts_drawn(stage) * stage.group_size
    prompt = min(assumed.prompt_mean or PROMPT_TOKENS, stage.sampling.max_prompt_tokens)
    kl = stage.algorithm.kl
    return RlWork(
        generated=answers,
        trained=stage.prompts_per_iteration * stage.group_size,
        updates=stage.updates_per_rollout,
        prompt_tokens=prompt,
        lengths=sample_lengths(stage, assumed),
        scorings=has_old_logprob_pass(stage, updates=stage.updates_per_rollout) + (kl is not None),
        reward_s=_reward_s(stage, answers),
        sync_s=transfer_s,
        overlap=stage.overlap != "none",
    )


def _reward_s(stage: RlStage, answers: int) -> float:
    if "code_tests" in stage.rewards:
        return answers * stage.sandbox.max_tests * PROGRAM_TEST_S / stage.sandbox.slots
    return answers * ANSWER_S / stage.grader.workers


def transfer_time(transfer: dict[str, Any], hardware: Hardware) -> float:
    """Seconds of a transfer from the summary of its plan."""
    on_wires = transfer["intra_node_bytes"] + transfer["cross_node_bytes"]
    sent, received = transfer["sent_bytes"].values(), transfer["received_bytes"].values()
    # of the side with fewer members, which have more each
    members = min(sum(map(bool, sent)), len(received))
    load = TransferLoad(
        sent_bytes=max([*sent, *transfer["relayed_bytes"].values()]),
        received_bytes=max(received),
        crossing_frac=transfer["cross_node_bytes"] / on_wires if on_wires else 0.0,
        messages=transfer["messages"] / members,
        tensors=transfer["tensors"],
    )
    return sync_s(hardware, load)


def stage_engines(
    engine: EngineConfig, spec: ModelSpec, hardware: Hardware, *, element_bytes: int
) -> Engines:
    """Engines with the KV cache that their share of the memory leaves them, in the model's dtype."""
    memory = engine_memory(spec, engine, element_bytes=element_bytes)
    budget = int(hardware.memory_gib * GIB * engine.gpu_memory_fraction)
    return Engines(
        work=model_work(spec),
        hardware=hardware,
        tp=engine.tp,
        replicas=engine.replicas,
        max_concurrent=engine.max_concurrent,
        kv_tokens=memory.kv_bytes(budget) / memory.kv_token_bytes,
    )


def _mfu(work: ModelWork, step: StepTime, context: float, num_ranks: int, hardware: Hardware) -> float:
    flops = 3 * (work.model_flops + work.attention_flops * context * work.num_layers) * step.tokens
    return flops / (step.phases["train"] * num_ranks * hardware.bf16_tflops * 1e12)

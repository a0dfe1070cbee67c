"""Seconds of one step of a stage, phase by phase: an RL iteration, or an optimizer step of SFT."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.estimate.generation import Engines, GenerationTime, generation_time
from megatron_rl.estimate.hardware import Hardware
from megatron_rl.estimate.lengths import Lengths
from megatron_rl.estimate.training import (
    FORWARD,
    TRAIN,
    TRAIN_RECOMPUTED,
    Pass,
    PassTime,
    Trainer,
    bandwidth,
    pass_time,
    update_s,
)

PHASES = ("generate", "reward", "logprob", "train", "sync")


@dataclass(frozen=True, kw_only=True, slots=True)
class RlWork:
    """What one RL iteration has to do."""

    generated: float  # responses, of all rounds
    trained: float  # responses that are trained on
    updates: int  # optimizer steps
    prompt_tokens: float  # on average
    lengths: Lengths  # of responses
    scorings: int  # forward passes over what is trained on: old log-probs, and a reference's
    reward_s: float
    sync_s: float
    overlap: bool = False  # the next iteration is generated while this one is trained on, by GPUs of its own

    @property
    def sample_tokens(self) -> float:
        return self.prompt_tokens + self.lengths.mean

    @property
    def context(self) -> float:
        """Positions that a trained token attends to on average: half of E[n^2] / E[n] over samples of n tokens."""
        prompt, lengths = self.prompt_tokens, self.lengths
        square = prompt**2 + 2 * prompt * lengths.mean + lengths.mean_square
        return square / self.sample_tokens / 2


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """One step of a stage. The phases follow one another, except for what `overlap` puts side by side."""

    phases: dict[str, float]  # seconds; of PHASES, or train and update
    step_s: float
    tokens: float  # trained on: prompts and responses
    num_gpus: int
    train: PassTime  # what of `train` is what
    generation: GenerationTime | None  # None for SFT

    @property
    def tokens_per_s_per_gpu(self) -> float:
        return self.tokens / self.step_s / self.num_gpus

    def gpu_hours(self, steps: float) -> float:
        return self.step_s * steps * self.num_gpus / 3600


def train_pass(recompute: str) -> Pass:
    """The cost of forward and backward under `model.recompute`."""
    return TRAIN_RECOMPUTED if recompute == "full" else TRAIN


def rl_step(trainer: Trainer, engines: Engines, work: RlWork, *, cost: Pass, num_gpus: int) -> StepTime:
    """One iteration: generation and rewards, then log-probs and training, then the new weights.

    With `overlap` the slower of both sides counts, and the transfer after it.
    """
    tokens = work.trained * work.sample_tokens
    generation = generation_time(
        engines, sequences=work.generated, prompt_tokens=work.prompt_tokens, lengths=work.lengths
    )
    scoring = pass_time(trainer, FORWARD, tokens=tokens, context=work.context)
    one = pass_time(trainer, cost, tokens=tokens / work.updates, context=work.context)
    train = PassTime(
        compute_s=one.compute_s * work.updates,
        exchange_s=one.exchange_s * work.updates + update_s(trainer) * work.updates,
        bubble_s=one.bubble_s * work.updates,
    )
    phases = {
        "generate": generation.total_s,
        "reward": work.reward_s,
        "logprob": scoring.total_s * work.scorings,
        "train": train.total_s,
        "sync": work.sync_s,
    }
    making, using = phases["generate"] + phases["reward"], phases["logprob"] + phases["train"]
    step = (max(making, using) if work.overlap else making + using) + phases["sync"]
    return StepTime(
        phases=phases, step_s=step, tokens=tokens, num_gpus=num_gpus, train=train, generation=generation
    )


def sft_step(trainer: Trainer, *, tokens: float, context: float, cost: Pass) -> StepTime:
    """One optimizer step over `tokens` tokens of all dp ranks."""
    train, update = pass_time(trainer, cost, tokens=tokens, context=context), update_s(trainer)
    return StepTime(
        phases={"train": train.total_s, "update": update},
        step_s=train.total_s + update,
        tokens=tokens,
        num_gpus=trainer.layout.world_size,
        train=train,
        generation=None,
    )


def sync_s(hardware: Hardware, *, busiest_bytes: float, crossing_frac: float, buckets: int) -> float:
    """Seconds of a weight transfer: the member that sends or receives most, and a collective's start per bucket.

    `crossing_frac` of its bytes go between nodes, the rest inside one. Nothing overlaps: an upper bound of the plan.
    """
    inside, between = bandwidth(hardware, 1), bandwidth(hardware, hardware.gpus_per_node + 1)
    wires = busiest_bytes * (crossing_frac / between + (1 - crossing_frac) / inside)
    return wires + buckets * hardware.collective_us / 1e6

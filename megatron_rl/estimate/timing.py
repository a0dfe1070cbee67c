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

# seconds of vLLM 0.32's loaders and its layerwise reload for one tensor of nothing. Ours, on CPU: 0.26 s for the 770
# tensors of 25 KB of a Qwen2 type of 64 layers, 0.03 s for the 50 of one of 4 (Intel Xeon, 2 cores, 2026-12-01)
TENSOR_S = 3e-4
# how often a byte is read or written in device memory: packed (2) and sealed (1); verified (1), put in place in the
# whole tensor (2), taken by the loader (2), put into the parameter (2)
_SENDER_PASSES, _RECEIVER_PASSES = 3, 7
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


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferLoad:
    """What the busiest members of a weight transfer have to do."""

    sent_bytes: float  # by a trainer rank, or passed on by a worker
    received_bytes: float  # by a worker
    crossing_frac: float  # of those, between nodes
    messages: float  # of one member
    tensors: int  # that a worker's vLLM is handed


def sync_s(hardware: Hardware, load: TransferLoad) -> float:
    """Seconds of a weight transfer, one thing after the other: an upper bound of what the plan asks for.

    Bytes on wires, copies in memory on both sides, a start of NCCL per message, and what vLLM's loaders take for each
    tensor however small it is, which is most of it for models that fit one machine. Without pausing the engines, their
    waking, and the parity check.
    """
    inside, between = bandwidth(hardware, 1), bandwidth(hardware, hardware.gpus_per_node + 1)
    frac = load.crossing_frac
    wires = max(load.sent_bytes, load.received_bytes) * (frac / between + (1 - frac) / inside)
    moved = _SENDER_PASSES * load.sent_bytes + _RECEIVER_PASSES * load.received_bytes
    copies = moved / (hardware.hbm_gb_per_s * 1e9 * hardware.hbm_frac)
    return wires + copies + load.messages * hardware.collective_us / 1e6 + load.tensors * TENSOR_S

"""From samples that every rank knows to the micro-batches of this rank. Pure but for the layout it is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_rl.data.balance import microbatch_plan
from megatron_rl.data.load import Load, load_of
from megatron_rl.data.pack import pack_microbatch
from megatron_rl.data.types import PackedBatch, RolloutGroup, TrainSample
from megatron_rl.model.spec import ModelSpec
from megatron_rl.parallel.layout import ParallelLayout


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBatches:
    """One optimizer step: the micro-batches of this rank, and what those of all ranks make of the samples."""

    batches: Sequence[PackedBatch]
    load: Load


def step_batches(
    samples: Sequence[TrainSample],
    layout: ParallelLayout,
    *,
    dp_rank: int,
    tokens_per_microbatch: int,
    attention_weight: float = 0.0,
) -> StepBatches:
    """Micro-batches of `dp_rank`: balanced by work, equally many on every rank (zero-weight ones fill up).

    An interleaved pipeline of two stages gets micro-batches of one length: the previous stage is also the next one
    there, and megatron-core 0.16.1 announces both tensors to it in one order and receives them in another.
    """
    pad_multiple, multiple_of = layout.tp if layout.sp else 1, microbatch_multiple(layout)
    plan = microbatch_plan(
        samples,
        dp=layout.dp,
        tokens_per_microbatch=tokens_per_microbatch,
        pad_multiple=pad_multiple,
        multiple_of=multiple_of,
        attention_weight=attention_weight,
    )
    lengths = [sample.packed_length for sample in samples]
    multiples = [_padding(lengths, indices, layout, pad_multiple) for indices in plan]
    return StepBatches(
        batches=[
            pack_microbatch(samples, indices, pad_multiple=multiples[dp_rank]) for indices in plan[dp_rank]
        ],
        load=load_of(
            plan,
            lengths,
            tokens_per_microbatch=tokens_per_microbatch,
            pad_multiples=multiples,
            multiple_of=multiple_of,
            attention_weight=attention_weight,
        ),
    )


def _padding(
    lengths: Sequence[int], microbatches: Sequence[Sequence[int]], layout: ParallelLayout, pad_multiple: int
) -> int:
    if layout.pp != 2 or layout.vpp == 1:
        return pad_multiple
    longest = max(sum(lengths[i] for i in indices) for indices in microbatches)
    return pad_multiple * -(-max(longest, 2) // pad_multiple)


def local_batches(
    samples: Sequence[TrainSample], layout: ParallelLayout, *, dp_rank: int, tokens_per_microbatch: int
) -> list[PackedBatch]:
    """The micro-batches of `step_batches` alone, balanced by tokens."""
    step = step_batches(samples, layout, dp_rank=dp_rank, tokens_per_microbatch=tokens_per_microbatch)
    return list(step.batches)


def attention_weight(spec: ModelSpec) -> float:
    """See `data.balance.work`: floating-point operations of causal attention over those of everything else.

    Attention of a position at depth t multiplies queries with t keys and weights with t values, t/2 on average over a
    sample: 4 heads x head_dim x length / 2 a layer; the rest multiplies each of a layer's weights and the head's once,
    at 2 operations each.
    """
    h, heads, kv_heads, dim = spec.hidden_size, spec.num_heads, spec.num_kv_heads, spec.head_dim
    ffn = spec.ffn_size if spec.moe is None else spec.moe.experts_per_token * spec.moe.expert_ffn_size
    per_layer = 2 * h * heads * dim + 2 * h * kv_heads * dim + 3 * h * ffn
    weights = spec.num_layers * per_layer + h * spec.vocab_size
    return spec.num_layers * heads * dim / weights


def microbatch_multiple(layout: ParallelLayout) -> int:
    """Counts of micro-batches that the pipeline can run are multiples of this.

    An interleaved pipeline runs them in rounds of pp; with a single round megatron-core 0.16.1 never gets from its
    warm-up to its first backward pass over gloo (seen at pp 2), with two it does.
    """
    return 2 * layout.pp if layout.vpp > 1 else 1


def split_updates(groups: Sequence[RolloutGroup], *, groups_per_update: int) -> list[list[RolloutGroup]]:
    """Groups of each optimizer step: at most `groups_per_update`, as even as possible, in order.

    Example: 10 groups with 4 per update -> steps of 4, 3 and 3. No groups, no steps.
    """
    count = -(-len(groups) // groups_per_update)
    base, extra = divmod(len(groups), count) if count else (0, 0)
    updates, start = [], 0
    for index in range(count):
        size = base + (index < extra)
        updates.append(list(groups[start : start + size]))
        start += size
    return updates


def rollout_samples(
    groups: Sequence[RolloutGroup], advantages: Sequence[Sequence[float]], *, mask_truncated: bool = False
) -> list[TrainSample]:
    """One sample per rollout; loss on the response alone. `advantages` follow the rollouts of each group.

    With `mask_truncated` there is none of a truncated rollout: it would cost a forward pass and add nothing.
    """
    samples = []
    for group, group_advantages in zip(groups, advantages, strict=True):
        for rollout, advantage in zip(group.rollouts, group_advantages, strict=True):
            if mask_truncated and rollout.completion.finish.is_truncated():
                continue
            prompt_length, completion = len(rollout.prompt_token_ids), rollout.completion
            samples.append(
                TrainSample(
                    token_ids=[*rollout.prompt_token_ids, *completion.token_ids],
                    loss_mask=[False] * prompt_length + [True] * len(completion.token_ids),
                    rollout_logprobs=[0.0] * prompt_length + list(completion.logprobs),
                    advantage=advantage,
                    is_positive=rollout.reward.verdict.is_correct(),
                    sample_id=f"{group.prompt.id}/{rollout.sample_index}",
                )
            )
    return samples

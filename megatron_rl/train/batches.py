"""From samples that every rank knows to the micro-batches of this rank. Pure but for the layout it is given."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_rl.data.balance import microbatch_plan
from megatron_rl.data.pack import pack_microbatch
from megatron_rl.data.types import PackedBatch, RolloutGroup, TrainSample
from megatron_rl.parallel.layout import ParallelLayout


def local_batches(
    samples: Sequence[TrainSample], layout: ParallelLayout, *, dp_rank: int, tokens_per_microbatch: int
) -> list[PackedBatch]:
    """Micro-batches of `dp_rank`: balanced by tokens, equally many on every rank (zero-weight ones fill up).

    An interleaved pipeline of two stages gets micro-batches of one length: the previous stage is also the next one
    there, and megatron-core 0.16.1 announces both tensors to it in one order and receives them in another.
    """
    pad_multiple = layout.tp if layout.sp else 1
    plan = microbatch_plan(
        samples,
        dp=layout.dp,
        tokens_per_microbatch=tokens_per_microbatch,
        pad_multiple=pad_multiple,
        multiple_of=microbatch_multiple(layout),
    )[dp_rank]
    if layout.pp == 2 and layout.vpp > 1:
        longest = max(sum(samples[i].packed_length for i in indices) for indices in plan)
        pad_multiple *= -(-max(longest, 2) // pad_multiple)
    return [pack_microbatch(samples, indices, pad_multiple=pad_multiple) for indices in plan]


def filled_frac(batches: Sequence[PackedBatch], tokens_per_microbatch: int) -> float:
    """Share of this rank's micro-batches, were each as long as allowed, that samples fill."""
    filled = sum(int(batch.cu_seqlens[len(batch.sample_index)]) for batch in batches if batch.sample_index)
    return filled / (len(batches) * tokens_per_microbatch)


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

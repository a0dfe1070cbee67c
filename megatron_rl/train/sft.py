"""The SFT loop."""

from __future__ import annotations

from functools import partial

from megatron_rl.algo.aggregate import normaliser
from megatron_rl.algo.losses import sft_loss
from megatron_rl.data.sft_data import SftData
from megatron_rl.recipe.stages import SftStage
from megatron_rl.train.batches import attention_weight, step_batches
from megatron_rl.train.context import RunContext
from megatron_rl.train.metrics import merge
from megatron_rl.train.progress import Progress


def run_sft(stage: SftStage, data: SftData, progress: Progress, run: RunContext) -> Progress:
    """Minimise the mean negative log-likelihood of assistant tokens, mean over the whole global batch.

    Every rank reads the same samples and keeps its dp share, so the normaliser needs no communication.
    """
    policy = run.policy
    run.start_stage(stage, progress, total_steps=stage.steps)
    run.reporter.start_stage(progress)
    for step in range(progress.step, stage.steps):
        meter = run.begin_step(progress, step + 1, phase="train")
        samples = data.batch(step, stage.global_batch_size)
        split = step_batches(
            samples,
            run.layout,
            dp_rank=policy.dp_rank,
            tokens_per_microbatch=stage.tokens_per_microbatch,
            attention_weight=attention_weight(run.spec),
        )
        with meter.span("train"):
            loss_fn = partial(sft_loss, normaliser=normaliser(samples, "token_mean"))
            metrics = merge(policy.forward_backward(split.batches, loss_fn))
            stats = policy.optimizer_step()
        tokens = sum(sample.packed_length for sample in samples)
        metrics |= {"sft/grad_norm": stats.grad_norm, **stats.metrics(), "sft/tokens": float(tokens)}
        metrics |= split.load.metrics() | meter.metrics(tokens=tokens)
        counts = {"samples": len(samples), "tokens": tokens} | stats.counts()
        skipped = policy.optimizer.skipped_in_a_row
        progress = progress.advanced(step + 1, counts=counts, skipped_in_a_row=skipped)
        run.finish_step(progress, metrics, total=stage.steps)
    return progress

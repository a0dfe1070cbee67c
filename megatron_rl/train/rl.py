"""The RL loop: generate, grade, train, transfer."""

from __future__ import annotations

from megatron_rl.algo.entropy import EntropyState
from megatron_rl.data.promotion import observe, promotion_metrics
from megatron_rl.recipe.stages import RlStage
from megatron_rl.train.batches import attention_weight
from megatron_rl.train.context import RunContext
from megatron_rl.train.progress import Progress
from megatron_rl.train.reference import open_reference
from megatron_rl.train.rl_data import RlData
from megatron_rl.train.rl_metrics import iteration_counts, iteration_metrics, num_tokens
from megatron_rl.train.rl_session import RlSession
from megatron_rl.train.scoring import score_updates
from megatron_rl.train.token_traces import TokenTraces, choose
from megatron_rl.train.updates import apply_updates, plan_updates


def run_rl(stage: RlStage, data: RlData | None, progress: Progress, run: RunContext) -> Progress:
    """Maximise E[ sum_t f(r_t, A) / N ] with r_t = exp(log-prob now - log-prob before the iteration's updates).

    Three policies meet: the rollout policy (the engine, at the weights of the last transfer or, with `overlap`, of the
    one before), the old policy (this trainer before the updates; its log-probs are recomputed here) and the current
    one. f is the recipe's surrogate, A the advantage, N one global count of trained tokens or sequences per optimizer
    step. A KL term to a reference, an entropy bonus and weights against the distance of the first two policies are
    added where the recipe asks for them.
    """
    policy, attention = run.policy, attention_weight(run.spec)
    run.start_stage(stage, progress, total_steps=stage.iterations * stage.updates_per_rollout)
    reference = open_reference(stage, progress, run)
    entropy = EntropyState.start(stage.algorithm.entropy, progress.entropy)
    run.phases.enter("engines")
    with RlSession(stage, data, progress, run) as session:
        run.reporter.start_stage(progress)
        progress = session.progress
        while progress.step < progress.last_step(run.recipe.stages):
            iteration = progress.step
            meter = run.begin_step(progress, iteration + 1, phase="generate")

            collected = session.collect(progress, meter)
            updates = plan_updates(
                collected.kept, stage, run.layout, dp_rank=policy.dp_rank, attention_weight=attention
            )

            # old log-probs of every update come before the first one changes the weights, or from its own pass
            with meter.span("logprob"):
                updates, scored = score_updates(policy, updates, collected.kept, stage, reference=reference)
            with meter.span("train"):
                traces = TokenTraces(choose(collected.groups, collected.kept, run.recipe.run.rollout_tokens))
                updates, steps, entropy = apply_updates(policy, updates, stage, entropy, watch=traces.watch)
            # engines take new weights once they have no rollouts of the next iteration to make
            after = progress.advanced(iteration + 1)
            transfer = session.settle(after, meter)
            with meter.span("sync"):
                transfer |= session.push_weights(after)

            metrics = iteration_metrics(collected, updates, steps, policy=policy) | scored | transfer
            metrics |= meter.metrics(tokens=num_tokens(collected.groups))
            pace, promotion = observe(progress.pace, stage, iteration, metrics)
            metrics |= promotion_metrics(stage, progress.pace, iteration, promotion)
            progress = progress.advanced(
                iteration + 1,
                sampler=session.sampler_state(),
                pace=pace,
                counts=iteration_counts(collected, steps),
                skipped_in_a_row=policy.optimizer.skipped_in_a_row,
                weight_version=policy.optimizer.num_steps,
                entropy=entropy.to_dict() if stage.algorithm.entropy else None,
            )
            run.reporter.rollouts(progress, collected.groups)
            if traces.chosen:
                found = traces.gather(updates, tp_rank=policy.tp_rank, pp_rank=policy.pp_rank)
                run.reporter.tokens(progress, traces, found, stage.algorithm)
            total = progress.last_step(run.recipe.stages)
            metrics |= session.evaluate_if_due(iteration + 1, total=total)
            metrics |= session.rescore_metrics() | session.fault_metrics()
            if promotion is not None:
                run.reporter.promotion(progress, promotion)
            run.finish_step(progress, metrics, total=total, extra=session.rollouts_ahead)
    return progress
